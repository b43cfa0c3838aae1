"""The tracer ``dummy``."""
