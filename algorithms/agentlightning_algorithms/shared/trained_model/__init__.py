"""The models that runs have trained, their checkpoints, and serving them."""
