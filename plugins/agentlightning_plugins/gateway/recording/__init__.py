"""What the gateway records of calls."""
