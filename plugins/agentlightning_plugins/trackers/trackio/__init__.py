"""The tracker ``trackio``."""
