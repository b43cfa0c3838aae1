"""The state of runs, workers, queues and model backends, read from a store."""
