"""The tracker ``jsonl``."""
