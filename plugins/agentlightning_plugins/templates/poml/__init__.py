"""POML templates."""
