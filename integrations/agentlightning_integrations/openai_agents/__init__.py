"""The OpenAI Agents SDK."""
