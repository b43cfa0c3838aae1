"""GRPO on one machine: advantages, loss, a policy server in its own process, and the weight updates."""
