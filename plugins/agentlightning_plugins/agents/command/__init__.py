"""A command line in any language as an agent."""
