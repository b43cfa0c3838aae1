"""The clock of a server, as seen from this machine."""

from __future__ import annotations

import logging
import time
from typing import Final

logger = logging.getLogger("agentlightning")

_TRUSTED_S: Final = 60.0
"""How long a measurement is used: two clocks drift apart by a few milliseconds per minute."""
_WARN_S: Final = 1.0


class ServerClock:
    """Estimates a server's clock from its answers; between answers, it advances with this machine's time since boot.

    Thread-safe: readers see the last complete measurement. Before the first one, it is this machine's clock.
    """

    def __init__(self, server: str) -> None:
        """Makes a clock.

        Args:
            server: the name of the server in warnings.
        """
        self._server = server
        self._offset_s = time.time() - since_boot()
        self._expires_at = 0.0
        self._has_warned = False

    def now(self) -> float:
        """Returns the Unix time by the server's clock."""
        return since_boot() + self._offset_s

    @property
    def is_due(self) -> bool:
        """Whether the clock has to be measured again."""
        return since_boot() >= self._expires_at

    def set(self, server_time: float, sent_at: float) -> None:
        """Uses an answer that was just received.

        Args:
            server_time: Unix time of the server when it answered.
            sent_at: ``since_boot()`` when the request was sent. The error is at most half of the time since then.
        """
        received_at = since_boot()
        self._offset_s = server_time - (sent_at + received_at) / 2
        self._expires_at = received_at + _TRUSTED_S
        skew_s = time.time() - self.now()
        if abs(skew_s) - (received_at - sent_at) / 2 > _WARN_S and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the clock of this machine is %.1f s %s the clock of %s, which is used for leases and deadlines; "
                "synchronize both (NTP), or times of spans will not match times of rollouts",
                abs(skew_s),
                "ahead of" if skew_s > 0 else "behind",
                self._server,
            )


def since_boot() -> float:
    """Returns the seconds since the machine started, including time in suspend if the system counts it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
