"""The LLM gateway: an OpenAI-compatible reverse proxy that records what a model was asked and what it answered."""
