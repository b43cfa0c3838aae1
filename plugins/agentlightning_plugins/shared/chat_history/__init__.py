"""The chat histories of model calls, and which call continues which conversation."""
