"""The views: each reads the store and returns the contents of a page as plain values."""
