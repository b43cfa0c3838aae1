"""An OpenAI-compatible HTTP server over the sampler."""

from typing import Final

API_KEY_VARIABLE: Final = "AGL_POLICY_API_KEY"
"""The environment variable with the key that completions require."""
