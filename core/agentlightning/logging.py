"""Logging: one logger named ``agentlightning``, silent below WARNING until ``setup_logging``."""

from __future__ import annotations

import logging
import sys


class _StandardError(logging.Handler):
    """Writes to the current ``sys.stderr``, which a live display may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except (OSError, ValueError):  # it is closed
            self.handleError(record)


def setup_logging(level: int | str = "INFO") -> logging.Logger:
    """Sends Lightning's log to standard error, with time and level. Calling it again only changes the level."""
    logger = logging.getLogger("agentlightning")
    logger.setLevel(level)
    if not logger.handlers:
        handler = _StandardError()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    return logger
