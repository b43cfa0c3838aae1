"""The policy server: sampling behind an OpenAI-compatible endpoint."""
