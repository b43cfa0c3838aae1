"""The agent ``command``."""
