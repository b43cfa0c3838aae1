"""Reads rewards from spans."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from agentlightning import semconv
from agentlightning.types import Span


class Reward(NamedTuple):
    """One dimension of a reward."""

    name: str
    value: float


def is_reward_span(span: Span) -> bool:
    """Whether a span carries a reward, whoever made it."""
    return f"{semconv.REWARD}.0.value" in span.attributes


def get_rewards_from_span(span: Span) -> list[Reward]:
    """All dimensions of a reward, the primary one first; empty for other spans."""
    rewards: list[Reward] = []
    key = f"{semconv.REWARD}.0"
    while (value := span.attributes.get(f"{key}.value")) is not None:
        rewards.append(Reward(str(span.attributes.get(f"{key}.name", "primary")), float(value)))
        key = f"{semconv.REWARD}.{len(rewards)}"
    return rewards


def get_reward_value(span: Span) -> float | None:
    """The primary reward of a span; None when it has none."""
    value = span.attributes.get(f"{semconv.REWARD}.0.value")
    return None if value is None else float(value)


def find_reward_spans(spans: Iterable[Span]) -> list[Span]:
    """The spans that carry a reward, in the order given."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Iterable[Span]) -> float | None:
    """The primary reward of the last reward span; a store gives spans in the order of their arrival."""
    rewards = find_reward_spans(spans)
    return get_reward_value(rewards[-1]) if rewards else None
