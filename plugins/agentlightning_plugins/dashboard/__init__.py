"""The dashboard: runs, rollouts, workers and resources of a store in a browser."""
