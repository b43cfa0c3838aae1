"""Limits on how much each attempt may use the models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import aiohttp

from agentlightning.errors import ConfigError, StoreError
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import AttemptKey
from agentlightning_plugins.gateway.refusal import CallRefused
from agentlightning_plugins.gateway.validation import check_keys, check_number

logger = logging.getLogger("agentlightning")
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


class UsageTracker:
    """Counts the usage of attempts. If there are too many, drops the attempt whose last call is the oldest."""

    def __init__(self, limits: UsageLimits, max_attempts: int = _MAX_REMEMBERED) -> None:
        self._limits = {name: limit for name, limit in asdict(limits).items() if limit is not None}
        self._max_attempts = max_attempts
        self._used: dict[AttemptKey, AttemptUsage] = {}

    async def restore(self, store: LightningStore, attempt: AttemptKey) -> None:
        """Reads the usage of an attempt before this gateway started from its spans, if it is limited but not known."""
        if not self._limits or attempt in self._used:
            return
        try:
            self._used.setdefault(attempt, await read_usage(store, attempt))
        except (StoreError, OSError, aiohttp.ClientError) as error:
            logger.warning("the usage of attempt %s cannot be read, so only new calls count: %s", attempt[1], error)

    def begin(self, attempt: AttemptKey | None) -> None:
        """Counts a call that begins.

        Raises:
            CallRefused: a limit is reached.
        """
        if not self._limits or attempt is None:
            return
        usage = self._used.pop(attempt, None) or AttemptUsage()
        self._used[attempt] = usage
        if len(self._used) > self._max_attempts:
            del self._used[next(iter(self._used))]
        for name, limit in self._limits.items():
            used = getattr(usage, name)
            if used >= limit:  # not 429, after which clients and frameworks would try again
                message = f"the attempt has used {used:.6g} of its {limit:.6g} {name}"
                raise CallRefused(402, message, BUDGET_EXCEEDED, {"x-should-retry": "false"})
        usage.calls += 1

    def take_back(self, attempt: AttemptKey | None) -> None:
        """Reverts ``begin`` for a call that was not made."""
        usage = self._used.get(attempt) if attempt is not None else None
        if usage is not None:
            usage.calls -= 1

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
            usage.calls += 1
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
    given = limits or {}
    check_keys(given, [field.name for field in fields(UsageLimits)], "budget")
    for name, limit in given.items():
        if limit is not None:
            check_number(limit, f"budget: {name}")
    return UsageLimits(**given)


def read_price(price: Any, where: str) -> Price | None:
    """Reads the price of an entry of a model list; raises ConfigError for an unknown key or a negative number."""
    if price is None:
        return None
    if not isinstance(price, Mapping):
        raise ConfigError(f"{where}: price is {price!r}; give input_per_million and output_per_million")
    check_keys(price, [field.name for field in fields(Price)], f"{where}['price']")
    for name, value in price.items():
        check_number(value, f"{where}['price']: {name}", allow_zero=True)
    return Price(**price)
