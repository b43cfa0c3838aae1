"""Updates the weights of a policy: losses, corrections, the optimizer and their settings."""
