"""The model servers behind the gateway."""
