"""The budget of a prompt search in model calls, tokens and money."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from agentlightning import semconv
from agentlightning.adapter.call import build_tree, find_calls
from agentlightning.errors import ConfigError
from agentlightning.types import Span


@dataclass(frozen=True)
class CallUsage:
    """The model and the tokens of one model call."""

    model: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class ModelUse:
    """The calls of one model."""

    calls: int = 0
    tokens: int = 0
    cost: float | None = None
    """The cost of the calls; None if the model has no price."""


@dataclass
class SearchBudget:
    """Limits and counts of model calls, tokens and cost; agents' calls count if they are traced."""

    max_calls: int | None = None
    max_tokens: int | None = None
    """Maximum number of tokens of prompts and answers together."""
    max_cost: float | None = None
    """Maximum cost, in the currency of ``prices``."""
    prices: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Prices of a million prompt and a million answer tokens, by prefix of the model's name; others cost nothing."""
    by_model: dict[str, ModelUse] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_calls", "max_tokens", "max_cost"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ConfigError(f"{name} = {limit}: a number above 0 is needed; None means no limit")
        self.prices = {model: (float(price[0]), float(price[1])) for model, price in self.prices.items()}

    def require_prices(self, *models: str) -> None:
        """Checks that the cost of these models can be counted."""
        for model in models:
            if self.max_cost is not None and model not in self.prices:
                raise ConfigError(
                    f"max_cost = {self.max_cost} needs the price of {model!r}: "
                    f"prices={{{model!r}: (for a million prompt tokens, for a million answer tokens)}}"
                )

    def spend(self, used: Iterable[CallUsage]) -> None:
        """Counts calls."""
        for usage in used:
            use = self.by_model.setdefault(usage.model, ModelUse())
            use.calls += 1
            use.tokens += usage.prompt_tokens + usage.completion_tokens
            prefixes = [prefix for prefix in self.prices if usage.model.startswith(prefix)]  # answers name dated models
            if prefixes:
                prompt, completion = self.prices[max(prefixes, key=len)]
                cost = (usage.prompt_tokens * prompt + usage.completion_tokens * completion) / 1e6
                use.cost = (use.cost or 0.0) + cost

    def metrics(self) -> dict[str, float]:
        """The counts by name, for all models and for each model; the cost is omitted where there is no price."""
        uses = self.by_model.values()
        found = {
            "model_calls": float(sum(use.calls for use in uses)),
            "tokens": float(sum(use.tokens for use in uses)),
            **({"cost": sum(use.cost or 0.0 for use in uses)} if self.prices else {}),
        }
        for model, use in self.by_model.items():
            found |= {f"model_calls/{model}": float(use.calls), f"tokens/{model}": float(use.tokens)}
            found |= {} if use.cost is None else {f"cost/{model}": use.cost}
        return found

    def is_spent(self, further: Iterable[CallUsage] = ()) -> bool:
        """Whether a limit is reached when ``further`` calls are counted too."""
        after = SearchBudget(prices=self.prices, by_model=copy.deepcopy(self.by_model))
        after.spend(further)
        spent, limits = after.metrics(), (self.max_calls, self.max_tokens, self.max_cost)
        names = ("model_calls", "tokens", "cost")
        return any(limit is not None and spent.get(name, 0) >= limit for name, limit in zip(names, limits, strict=True))


_TOKENS: Final = (
    (semconv.GEN_AI_INPUT_TOKENS, "gen_ai.usage.prompt_tokens"),
    (semconv.GEN_AI_OUTPUT_TOKENS, "gen_ai.usage.completion_tokens"),
)
"""The current attribute names, each with the name that instrumentations used in 2025."""


def read_usage(spans: Iterable[Span]) -> list[CallUsage]:
    """Returns an attempt's model calls; one that client and gateway recorded counts once, a cached one not at all."""
    used = []
    for call in find_calls(build_tree(list(spans), repair=True), semconv.is_llm_call):
        if any(node.span.name.endswith(semconv.CACHED_SUFFIX) for node in call.nodes):
            continue
        attributes = [node.span.attributes for node in reversed(call.nodes)]
        model = next(filter(None, (semconv.read_model(node.span) for node in reversed(call.nodes))), "")
        tokens = [
            next((int(found[key]) for found in attributes for key in keys if key in found), 0) for keys in _TOKENS
        ]
        used.append(CallUsage(model, *tokens))
    return used
