"""Library: runner processes, their supervision and their orderly end."""
