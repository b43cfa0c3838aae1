"""The version of the `lightning` distribution; the build reads it from here."""

__version__ = "0.1.0"
