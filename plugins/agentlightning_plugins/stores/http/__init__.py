"""A store served over HTTP, and its client."""
