"""Algorithms that train weights without running the agent: ``sft`` and ``dpo``."""
