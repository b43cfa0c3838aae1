"""Conformance tests for parts of a training, which ``agentlightning.testing`` offers."""
