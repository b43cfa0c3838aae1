"""Agent frameworks: how each is run, traced and tuned."""
