"""What the gateway lets through."""
