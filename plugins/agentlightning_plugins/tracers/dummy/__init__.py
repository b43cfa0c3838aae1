"""The tracer ``otel``."""
