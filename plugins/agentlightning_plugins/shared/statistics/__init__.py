"""Intervals and tests for comparing rewards."""
