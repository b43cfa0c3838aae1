"""Template engines for prompts."""
