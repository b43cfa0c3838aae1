"""Training on many GPUs through verl."""
