"""Library: the OpenTelemetry pipeline that several tracers share."""
