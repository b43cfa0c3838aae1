"""Shared by tracers: the OpenTelemetry pipeline and readers of spans."""
