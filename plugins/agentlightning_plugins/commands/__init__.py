"""Subcommands of ``agl``, and the libraries that they share."""
