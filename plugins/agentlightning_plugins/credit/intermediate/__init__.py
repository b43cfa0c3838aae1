"""The credit rule ``intermediate``."""
