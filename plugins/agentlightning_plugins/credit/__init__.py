"""Credit rules: how rewards are assigned to model calls."""
