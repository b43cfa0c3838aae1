"""The algorithms that ship with Lightning; none imports another."""
