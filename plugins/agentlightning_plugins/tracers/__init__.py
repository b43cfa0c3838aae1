"""Tracers, and the OpenTelemetry library that they share."""
