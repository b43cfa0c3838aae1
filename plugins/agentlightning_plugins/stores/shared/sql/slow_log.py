"""``SlowLog``, which names the queries that take long, with their plans."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable

from agentlightning.errors import ConfigError

logger = logging.getLogger("agentlightning")


class SlowLog:
    """Logs each statement at most once a minute. Statements and plans contain no values of users."""

    def __init__(self, database: str) -> None:
        """Reads the threshold from ``AGL_SLOW_QUERY_S``: seconds above 0, 1 by default; else raises ConfigError."""
        given = os.environ.get("AGL_SLOW_QUERY_S") or "1"
        try:
            self._threshold_s = float(given)
        except ValueError:
            self._threshold_s = 0.0
        if not self._threshold_s > 0:
            raise ConfigError(f"AGL_SLOW_QUERY_S={given}; give the seconds from which a query is logged, as in 1.0")
        self._database = database
        self._logged: dict[str, float] = {}

    def admits(self, sql: str, took_s: float) -> bool:
        """Whether a statement that took so long is to be logged now; the caller then makes its plan."""
        now = time.monotonic()
        if took_s < self._threshold_s or now < self._logged.get(sql, -60.0) + 60.0:
            return False
        self._logged = {**dict(list(self._logged.items())[-100:]), sql: now}
        return True

    def log(self, sql: str, took_s: float, plan: Iterable[str]) -> None:
        logger.warning("%s: a query took %.2f s: %s; plan: %s", self._database, took_s, sql, "; ".join(plan))
