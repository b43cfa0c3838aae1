"""One run: its directory, its hooks and trackers, and the threads and stop signals it is made of."""
