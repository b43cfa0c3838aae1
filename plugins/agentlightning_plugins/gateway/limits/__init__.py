"""Limits on calls: pauses of the gateway, and the usage of each attempt."""
