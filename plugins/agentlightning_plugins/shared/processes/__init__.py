"""Runner processes, their supervision and their orderly end."""
