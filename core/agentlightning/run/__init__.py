"""The parts of a run: its directory, trackers, threads, stop events and attempt tokens."""
