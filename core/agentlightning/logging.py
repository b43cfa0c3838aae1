"""Logging: one logger named ``agentlightning``, silent below WARNING until somebody sets it up."""

from __future__ import annotations

import logging


def setup_logging(level: int | str = "INFO") -> logging.Logger:
    """Sends Lightning's log to standard error, with time and level. Calling it again only changes the level."""
    logger = logging.getLogger("agentlightning")
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    return logger
