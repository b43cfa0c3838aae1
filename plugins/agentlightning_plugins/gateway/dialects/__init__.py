"""The APIs that agents and model servers speak."""
