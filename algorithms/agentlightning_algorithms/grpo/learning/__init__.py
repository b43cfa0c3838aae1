"""Learning from rollouts: advantages, loss and weight updates."""
