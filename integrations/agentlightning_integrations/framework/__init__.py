"""Library: what several integrations share."""
