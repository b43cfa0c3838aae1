"""Adapters besides the triplets of core."""
