"""The policy: its weights, checkpoints and export."""
