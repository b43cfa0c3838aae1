"""The tracer ``agentops``."""
