"""The tracker ``console``."""
