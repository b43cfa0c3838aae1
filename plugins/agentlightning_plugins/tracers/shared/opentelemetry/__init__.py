"""The OpenTelemetry pipeline that several tracers share."""
