"""Sampling from a model: one running batch, key-value caches, and the drawing of tokens."""
