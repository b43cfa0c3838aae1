"""The algorithm ``apo``."""
