"""The LLM gateway: a reverse proxy for model APIs that records each call as a span."""
