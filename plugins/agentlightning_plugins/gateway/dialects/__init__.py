"""The APIs that the gateway speaks."""
