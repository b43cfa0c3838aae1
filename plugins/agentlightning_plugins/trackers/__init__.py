"""Trackers: each writes the metrics of a run somewhere."""
