"""The setting ``checkpoints.every``."""

from __future__ import annotations

import re
import time
from typing import Final

from agentlightning.errors import ConfigError

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


class CheckpointClock:
    """Decides when a checkpoint is due: after a number of steps, or after a time such as ``5m``."""

    def __init__(self, every: int | str) -> None:
        """Takes a number of steps, or a time in seconds, minutes or hours.

        Raises:
            ConfigError: ``every`` is neither.
        """
        found = re.fullmatch(r"([0-9.]+)\s*([smh])", every.strip()) if isinstance(every, str) else None
        is_number = isinstance(every, int) and not isinstance(every, bool)
        try:
            self._steps = int(every) if is_number or (isinstance(every, str) and not found) else 0
            self._seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
        except ValueError:
            self._steps, self._seconds = 0, 0.0
        if self._steps < 1 and self._seconds <= 0:
            raise ConfigError(
                f"checkpoints: every = {every!r}; give a positive number of steps, or a time: '90s', '5m' or '1h'"
            )
        self._last = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step``; if so, a time interval starts over."""
        if self._steps:
            return step % self._steps == 0
        if time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True
