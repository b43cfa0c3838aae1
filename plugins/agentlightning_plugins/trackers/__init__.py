"""Trackers: write the metrics of a run to files and services."""
