"""Calls, their spans, and the metrics of the gateway."""
