"""Adapters in addition to core's triplets."""
