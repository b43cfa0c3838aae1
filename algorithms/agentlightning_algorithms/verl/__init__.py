"""Training on many GPUs through verl: agents roll out here, verl trains."""
