"""The policy: weights, LoRA, checkpoints and the KL reference."""
