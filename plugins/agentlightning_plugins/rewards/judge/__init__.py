"""Models that rate answers."""
