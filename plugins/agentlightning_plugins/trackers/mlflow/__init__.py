"""The tracker ``mlflow``."""
