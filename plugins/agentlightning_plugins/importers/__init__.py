"""Importers of ``agl import``, one plugin for each format."""
