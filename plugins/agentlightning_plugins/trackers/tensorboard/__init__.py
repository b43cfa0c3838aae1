"""The tracker ``tensorboard``."""
