"""Finds the attempt of a call, and refuses calls of attempts that have ended."""
