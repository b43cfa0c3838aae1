"""Execution strategies, and the library of processes that they share."""
