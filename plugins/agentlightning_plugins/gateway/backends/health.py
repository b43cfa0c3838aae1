"""Health checks: detect backends that are down before a call reaches them, and backends that are up again."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final

import aiohttp

from agentlightning_plugins.gateway.backends.model_table import ModelTable
from agentlightning_plugins.gateway.backends.provider import ModelBackend, describe_error

logger = logging.getLogger("agentlightning")

INTERVAL_S: Final = 10.0
"""Seconds between checks of a backend that is up."""
_DOWN_INTERVAL_S: Final = 1.0
"""Seconds between checks of a backend that is down, unless the other interval is shorter."""
_TIMEOUT_S: Final = 5.0
_MAX_SILENCES: Final = 3
"""Unanswered checks in a row until a backend counts as down: a server that trains or compiles is only busy."""


class HealthCheck:
    """Requests the models of each backend every few seconds. Any status below 500 shows that the backend is up."""

    def __init__(self, models: ModelTable, interval_s: float = INTERVAL_S, timeout_s: float = _TIMEOUT_S) -> None:
        self._models = models
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._silences: Counter[bytes] = Counter()
        self._broken: set[bytes] = set()
        """Backends whose provider raised an unexpected error, which is logged once."""

    async def run(self) -> None:
        """Checks until cancelled."""
        clock = asyncio.get_running_loop().time
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),  # each check opens a new connection
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=self._timeout_s / 2),
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            next_round = clock()
            while True:
                is_round = clock() >= next_round
                due = [b for b in self._models.backends if b.endpoint and (is_round or not b.is_up)]
                await asyncio.gather(*(self._check(session, backend) for backend in due))
                if is_round:
                    next_round = clock() + self._interval_s
                await asyncio.sleep(min(_DOWN_INTERVAL_S, self._interval_s))

    async def _check(self, session: aiohttp.ClientSession, backend: ModelBackend) -> None:
        failure = None
        try:
            url, headers = backend.url("models"), backend.authorize({})
            async with session.get(url, headers=headers, allow_redirects=False) as answer:
                if answer.status >= 500:
                    failure = f"GET {url} answered {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = describe_error(error)
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
                self._silences[backend.identity] += 1
                if self._silences[backend.identity] < _MAX_SILENCES:
                    return
                failure = f"it did not answer for {self._timeout_s:g} s, {_MAX_SILENCES} times in a row"
        except Exception:  # isolation point: a provider may be third-party code, and the other backends need checks
            if backend.identity not in self._broken:
                self._broken.add(backend.identity)
                logger.exception("backend %s of model %r cannot be checked", backend.endpoint, backend.model)
            return
        else:
            self._silences.pop(backend.identity, None)
        backend.mark(failure)
