"""The base of algorithms that search for better prompts."""
