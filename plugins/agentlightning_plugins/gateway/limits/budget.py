"""What one attempt may spend on models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from agentlightning import semconv
from agentlightning.errors import ConfigError, suggest
from agentlightning.store.protocol import LightningStore

_MAX_REMEMBERED: Final = 100_000
BACKEND: Final = "agentlightning.gateway.backend"
"""Span attribute: the endpoint that a call was sent to; calls that were refused before have none."""
COST: Final = "agentlightning.gateway.cost"
"""Span attribute: what a call cost, where the model list has a price."""


@dataclass(frozen=True, slots=True)
class Price:
    """What tokens cost, in the currency of the budget, for a million of each."""

    input_per_million: float = 0.0
    output_per_million: float = 0.0

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Of one call."""
        return (input_tokens * self.input_per_million + output_tokens * self.output_per_million) / 1e6


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits for each attempt; None does not limit. Calls that are answered with an error cost a call and no token."""

    calls: int | None = None
    tokens: int | None = None
    """Of input and output together."""
    cost: float | None = None
    """By the prices of the model list."""


@dataclass(slots=True)
class Usage:
    """What an attempt has used so far."""

    calls: int = 0
    tokens: int = 0
    cost: float = 0.0


class BudgetLedger:
    """What attempts have used of their budget; the one that called longest ago is forgotten first."""

    def __init__(self, budget: Budget, limit: int = _MAX_REMEMBERED) -> None:
        self._limits = [(name, value) for name, value in _items(budget) if value is not None]
        self._limit = limit
        self._spent: dict[tuple[str, str], Usage] = {}

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return bool(self._limits)

    def knows(self, attempt: tuple[str, str]) -> bool:
        """Whether an attempt has called of late, or what it spent before was recalled."""
        return attempt in self._spent

    def recall(self, attempt: tuple[str, str], spent: Usage) -> None:
        """Takes over what an attempt has spent before; what is known of it already goes first."""
        self._spent.setdefault(attempt, spent)

    def begin(self, attempt: tuple[str, str]) -> str | None:
        """Counts a call that begins. When something is used up: what, and the call is not to be made."""
        if not self._limits:
            return None
        spent = self._spent.pop(attempt, None) or Usage()
        self._spent[attempt] = spent
        if len(self._spent) > self._limit:
            del self._spent[next(iter(self._spent))]
        for name, limit in self._limits:
            used = getattr(spent, name)
            if used >= limit:
                return f"the attempt has used {used:.6g} of its {limit:.6g} {name}"
        spent.calls += 1
        return None

    def charge(self, attempt: tuple[str, str], tokens: int, cost: float) -> None:
        """Adds what a call has used; nothing to an attempt that was forgotten, whose spans tell it."""
        spent = self._spent.get(attempt)
        if spent is not None:
            spent.tokens += tokens
            spent.cost += cost

    def spent(self, attempt: tuple[str, str]) -> Usage:
        """What an attempt has spent; nothing for one that is not known."""
        return self._spent.get(attempt, Usage())


async def read_usage(store: LightningStore, attempt: tuple[str, str]) -> Usage:
    """What an attempt has spent by the spans of its calls, which outlive the gateway that recorded them.

    Raises:
        StoreError: the store cannot be reached.
    """
    spent = Usage()
    for span in await store.query_spans(*attempt):
        if BACKEND in span.attributes:
            numbers = (semconv.GEN_AI_INPUT_TOKENS, semconv.GEN_AI_OUTPUT_TOKENS, COST)
            used = [span.attributes.get(name) for name in numbers]
            input_tokens, output_tokens, cost = (value if isinstance(value, (int, float)) else 0 for value in used)
            spent.calls += 1
            spent.tokens += int(input_tokens + output_tokens)
            spent.cost += cost
    return spent


def read_budget(budget: Mapping[str, Any] | Budget | None) -> Budget:
    """Reads a budget.

    Raises:
        ConfigError: an unknown key, or a limit that is no positive number.
    """
    if isinstance(budget, Budget):
        return budget
    return Budget(**_read_numbers(budget or {}, Budget, "budget", allow_zero=False))


def read_price(price: Any, where: str) -> Price | None:
    """Reads the price of an entry of a model list.

    Raises:
        ConfigError: it is no mapping, has an unknown key, or a negative number.
    """
    if price is None:
        return None
    if not isinstance(price, Mapping):
        raise ConfigError(f"{where}: price is {price!r}; give input_per_million and output_per_million")
    return Price(**_read_numbers(price, Price, f"{where}['price']", allow_zero=True))


def _read_numbers(given: Mapping[str, Any], cls: type, where: str, *, allow_zero: bool) -> dict[str, Any]:
    known = [field.name for field in fields(cls)]
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"{where} has no key {key!r}.{suggest(str(key), known)} Keys: {', '.join(known)}.")
        if value is None and not allow_zero:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (value > 0 or (allow_zero and value == 0)):
            raise ConfigError(
                f"{where}: {key} is {value!r}; give a number {'of 0 or more' if allow_zero else 'above 0'}"
            )
    return dict(given)


def _items(budget: Budget) -> list[tuple[str, float | None]]:
    return [("calls", budget.calls), ("tokens", budget.tokens), ("cost", budget.cost)]
