"""What is learned from rollouts: advantages, loss, weight updates."""
