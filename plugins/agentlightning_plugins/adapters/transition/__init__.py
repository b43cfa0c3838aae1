"""The adapter ``transition``."""
