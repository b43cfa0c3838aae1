"""Limits on calls: pauses of the gateway, and the usage of each attempt."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import aiohttp

from agentlightning import semconv
from agentlightning.errors import ConfigError, StoreError
from agentlightning.plugin.settings import bind_settings
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import AttemptKey
from agentlightning_plugins.gateway.dialects.dialect import CallRefused

logger = logging.getLogger("agentlightning")
MAX_WAITING: Final = 10_000
"""Calls that may wait at the same time; further calls get status 429."""
PAUSE_WAIT_S: Final = 300.0
"""Default time that a call waits before it gets 429. Shorter than the timeout of official clients, 600 s."""
_RETRY_S: Final = 5


class Admission:
    """Admits calls or makes them wait, and counts those in flight. Belongs to one event loop."""

    weight_version: int | None = None
    """The version of the weights that serve calls now, if the owner of the gateway stated it."""

    def __init__(self, max_waiting: int = MAX_WAITING, pause_wait_s: float = PAUSE_WAIT_S) -> None:
        self._max_waiting = max_waiting
        self._pause_wait_s = pause_wait_s
        self._is_closed = False
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.in_flight = 0
        """Calls that were admitted and have not ended."""
        self.waiting = 0
        """Calls that wait to be admitted."""

    @property
    def is_paused(self) -> bool:
        """Whether new calls wait."""
        return not self._is_open.is_set()

    async def enter(self) -> None:
        """Waits until the call is admitted; afterwards, ``leave`` must be called once.

        Raises CallRefused if too many calls wait already, the wait takes too long, or the gateway stops.
        """
        if self.is_paused:
            if self.waiting >= self._max_waiting:
                raise _refusal()
            deadline = time.monotonic() + self._pause_wait_s
            self.waiting += 1
            try:
                while self.is_paused:  # it may be paused again before this task runs
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await self._is_open.wait()
            except TimeoutError:
                raise _refusal() from None
            finally:
                self.waiting -= 1
        if self._is_closed:
            raise _refusal()
        self.in_flight += 1
        if self.in_flight == 1:
            self._is_empty.clear()

    def leave(self) -> None:
        """Ends an admitted call."""
        self.in_flight -= 1
        if not self.in_flight:
            self._is_empty.set()

    def pause(self) -> None:
        """Makes new calls wait; calls in flight continue."""
        self._is_open.clear()

    def resume(self, weight_version: int | None) -> None:
        """Admits calls again, with a new version of the weights unless it is None."""
        if weight_version is not None:
            self.weight_version = weight_version
        self._is_open.set()

    def close(self) -> None:
        """Refuses waiting and further calls, because their weight version would be unknown."""
        self._is_closed = True
        self._is_open.set()

    async def drain(self, timeout_s: float | None) -> bool:
        """Waits until no call is in flight; returns False if the timeout expires first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            return False
        return True


def _refusal() -> CallRefused:
    message = "the gateway is paused while the model's weights change; try again"
    return CallRefused(429, message, "paused", {"Retry-After": str(_RETRY_S)})


_MAX_REMEMBERED: Final = 100_000
_MAX_NUMBER: Final = 2.0**53
BACKEND: Final = "agentlightning.gateway.backend"
"""Span attribute: the endpoint that a call was sent to; absent for calls that were refused before they were sent."""
BUDGET_EXCEEDED: Final = "budget_exceeded"
"""Code of the error of a call beyond a limit."""
TOKENS: Final = "agentlightning.gateway.tokens"
"""Span attribute: the tokens that count towards the token limit."""
COST: Final = "agentlightning.gateway.cost"
"""Span attribute: the cost of a call, if the model list has a price."""


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a million tokens, in the currency of the cost limit."""

    input_per_million: float = 0.0
    output_per_million: float = 0.0

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        return (input_tokens * self.input_per_million + output_tokens * self.output_per_million) / 1e6


@dataclass(frozen=True, slots=True)
class UsageLimits:
    """Limits of each attempt; None means no limit. A call that ends in an error counts as a call without tokens."""

    calls: int | None = None
    """Calls that generate: neither embeddings nor counts of tokens."""
    tokens: int | None = None
    """Input and output tokens together."""
    cost: float | None = None
    """Cost by the prices of the model list."""


@dataclass(slots=True)
class AttemptUsage:
    """The usage of an attempt so far."""

    calls: int = 0
    tokens: int = 0
    cost: float = 0.0
    in_flight: list[AttemptUsage] = field(default_factory=list)
    """The approximate usage of each call in flight."""
    settled: asyncio.Event | None = None
    """Set when a call in flight ends; None if no call waits for that."""


class UsageTracker:
    """Counts the usage of attempts. If there are too many, drops the attempt whose last call is the oldest."""

    def __init__(self, limits: UsageLimits, max_attempts: int = _MAX_REMEMBERED) -> None:
        self._limits = {name: limit for name, limit in asdict(limits).items() if limit is not None}
        self.reads_requests = bool({"tokens", "cost"} & self._limits.keys())
        """Whether calls have to be estimated before they are sent."""
        self._max_attempts = max_attempts
        self._used: dict[AttemptKey, AttemptUsage] = {}

    async def restore(self, store: LightningStore, attempt: AttemptKey) -> None:
        """Reads the usage of an attempt before this gateway started from its spans, if it is limited but not known."""
        if not self._limits or attempt in self._used:
            return
        try:
            self._used.setdefault(attempt, await read_usage(store, attempt))
        except (StoreError, OSError, aiohttp.ClientError) as error:
            logger.warning(
                "the usage of attempt %s cannot be read, so only new calls count (%s: %s)",
                attempt[1],
                type(error).__name__,
                error,
            )

    @contextlib.asynccontextmanager
    async def reserve(
        self, attempt: AttemptKey | None, tokens: int, cost: float, *, generates: bool = True
    ) -> AsyncIterator[None]:
        """Counts a call that generates, and reserves what it may use while the block runs.

        What it has used is added before the block ends. Waits while what the attempt has used and its calls in flight
        have reserved reach a limit; raises CallRefused if what the attempt has used does.
        """
        if not self._limits or attempt is None:
            yield
            return
        while True:
            usage = self._used.pop(attempt, None) or AttemptUsage()
            self._used[attempt] = usage
            if len(self._used) > self._max_attempts:
                del self._used[next(iter(self._used))]
            limits = {name: limit for name, limit in self._limits.items() if generates or name != "calls"}
            for name, limit in limits.items():
                if (used := getattr(usage, name)) >= limit:  # not 429, after which clients would try again
                    message = f"the attempt has used {used:.6g} of its {limit:.6g} {name}"
                    raise CallRefused(402, message, BUDGET_EXCEEDED, {"x-should-retry": "false"})
            totals = {name: sum(getattr(each, name) for each in (usage, *usage.in_flight)) for name in limits}
            if all(totals[name] < limit for name, limit in limits.items()):
                break
            usage.settled = usage.settled or asyncio.Event()
            await usage.settled.wait()
        usage.calls += generates
        reserved = AttemptUsage(0, tokens, cost)
        usage.in_flight.append(reserved)
        try:
            yield
        finally:
            usage.in_flight.remove(reserved)
            if usage.settled is not None:  # waiting calls continue after what this call has used was added
                usage.settled.set()
                usage.settled = None

    def add(self, attempt: AttemptKey, tokens: int, cost: float) -> None:
        """Adds the usage of a call; ignores attempts that were dropped, because their spans contain the usage."""
        usage = self._used.get(attempt)
        if usage is not None:
            usage.tokens += tokens
            usage.cost += cost


async def read_usage(store: LightningStore, attempt: AttemptKey) -> AttemptUsage:
    """Sums up the usage of an attempt from the spans of its calls; raises StoreError.

    If the store checks no tokens, an agent can write such spans too, but they can only increase its usage.
    """
    usage = AttemptUsage()
    for span in await store.query_spans(*attempt):
        if BACKEND in span.attributes:
            usage.calls += semconv.says_generating(span) is not False
            usage.tokens += int(_read_number(span.attributes.get(TOKENS)))
            usage.cost += _read_number(span.attributes.get(COST))
    return usage


def _read_number(value: object) -> float:
    """Returns a number from 0 to ``_MAX_NUMBER``; 0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        return 0
    return min(value, _MAX_NUMBER)


def read_limits(limits: Mapping[str, Any] | UsageLimits | None) -> UsageLimits:
    """Reads ``budget`` of ``LLMProxy``; raises ConfigError for an unknown key or a limit that is not above 0."""
    if isinstance(limits, UsageLimits):
        return limits
    given = bind_settings(UsageLimits, limits or {}, "budget")
    for name, limit in given.items():
        if limit is not None and not limit > 0:
            raise ConfigError(f"budget: {name} is {limit!r}; give a number above 0")
    return UsageLimits(**given)


def read_price(price: Any, where: str) -> Price | None:
    """Reads the price of an entry of a model list; raises ConfigError for an unknown key or a negative number."""
    if price is None:
        return None
    if not isinstance(price, Mapping):
        raise ConfigError(f"{where}: price is {price!r}; give input_per_million and output_per_million")
    given = bind_settings(Price, price, f"{where}['price']")
    for name, value in given.items():
        if not value >= 0:
            raise ConfigError(f"{where}['price']: {name} is {value!r}; give a number of 0 or more")
    return Price(**given)
