"""Stores, and the libraries that they share."""
