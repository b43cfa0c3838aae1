"""Library: the models that runs have trained, their checkpoints, and serving them."""
