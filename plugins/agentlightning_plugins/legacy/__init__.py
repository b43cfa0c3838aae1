"""Names and protocols of Agent Lightning 0.1 to 0.3."""
