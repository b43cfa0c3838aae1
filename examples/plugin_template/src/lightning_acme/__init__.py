"""Acme assistants and the folder store for Lightning."""
