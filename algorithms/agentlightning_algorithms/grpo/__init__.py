"""GRPO on one machine: advantages, loss, a policy server in a process of its own, and the weight updates."""
