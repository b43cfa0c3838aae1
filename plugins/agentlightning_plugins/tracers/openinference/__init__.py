"""The tracer ``openinference``."""
