"""``SlowLog``, which names the queries that take long, with their plans."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable
from typing import Final

from agentlightning.errors import ConfigError

VARIABLE: Final = "AGL_SLOW_QUERY_S"
_DEFAULT_S: Final = 1.0
_AGAIN_S: Final = 60.0
_REMEMBERED: Final = 256

logger = logging.getLogger("agentlightning")


class SlowLog:
    """Logs each statement at most once a minute. Statements and plans contain no values of users."""

    def __init__(self, database: str) -> None:
        """Reads the threshold from ``AGL_SLOW_QUERY_S``: seconds, 1 by default.

        Args:
            database: the name of the database in messages.

        Raises:
            ConfigError: the threshold is not a number above 0.
        """
        given = os.environ.get(VARIABLE) or str(_DEFAULT_S)
        try:
            self._threshold_s = float(given)
        except ValueError:
            self._threshold_s = math.nan
        if not self._threshold_s > 0:
            raise ConfigError(f"{VARIABLE}={given}; give the seconds from which a query is logged, as in {_DEFAULT_S}")
        self._database = database
        self._logged: dict[str, float] = {}

    def admits(self, sql: str, took_s: float) -> bool:
        """Whether a statement that took so long is to be logged now; the caller then makes its plan."""
        if took_s < self._threshold_s:
            return False
        now = time.monotonic()
        if now - self._logged.get(sql, -_AGAIN_S) < _AGAIN_S:
            return False
        self._logged[sql] = now
        while len(self._logged) > _REMEMBERED:
            self._logged.pop(next(iter(self._logged)), None)
        return True

    def log(self, sql: str, took_s: float, plan: Iterable[str]) -> None:
        shown = " ".join(sql.split())
        logger.warning("%s: a query took %.2f s: %s; plan: %s", self._database, took_s, shown, "; ".join(plan))
