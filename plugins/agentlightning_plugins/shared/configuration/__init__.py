"""Configuration files, and the parts of a run that they describe."""
