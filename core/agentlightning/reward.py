"""Reads rewards and feedback from spans and attempts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from agentlightning import semconv
from agentlightning.records import AttemptedRollout, Rollout, Span
from agentlightning.store.protocol import LightningStore


class Reward(NamedTuple):
    """One dimension of a reward."""

    name: str
    value: float


class Feedback(NamedTuple):
    """Why a result is good or bad."""

    text: str
    prompt: str | None
    """The prompt that it is about; None: all prompts."""


REWARD_SUM: Final = "agentlightning.reward_sum"
"""Attribute of a final reward that sums up the rewards of calls, and so belongs to no call itself."""
_PRIMARY: Final = f"{semconv.REWARD}.0.value"


def is_reward_span(span: Span) -> bool:
    """Whether a span carries a reward that counts; a reward written after the attempt had ended does not."""
    return semconv.LATE not in span.attributes and get_reward_value(span) is not None


def get_rewards_from_span(span: Span) -> list[Reward]:
    """Returns all dimensions of a reward that are numbers from -1e30 to 1e30, the primary one first.

    The list is empty if the span has no reward or its primary reward is not such a number.
    """
    rewards: list[Reward] = []
    for dimension in itertools.count():
        key = f"{semconv.REWARD}.{dimension}"
        if (value := semconv.read_attribute(span, f"{key}.value")) is None:
            break
        if (number := _to_float(value)) is not None:
            rewards.append(Reward(str(span.attributes.get(f"{key}.name", "primary")), number))
        elif dimension == 0:
            break
    return rewards


def get_reward_value(span: Span) -> float | None:
    """Returns the primary reward of a span, or None if it is missing or not a number from -1e30 to 1e30."""
    value = semconv.read_attribute(span, _PRIMARY)
    return None if value is None else _to_float(value)


def _to_float(value: Any) -> float | None:
    """Converts a reward to a number; None for anything else, because any program may write spans."""
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):
        return None
    return number if abs(number) <= semconv.MAX_REWARD else None  # None for NaN


def find_reward_spans(spans: Iterable[Span]) -> list[Span]:
    """Returns the spans that carry a reward, in the given order."""
    return [span for span in spans if is_reward_span(span)]


def count_failed(rewards: Iterable[float | None], failed_reward: float = 0.0) -> float:
    """Returns the reward that a failed rollout counts as: ``failed_reward``, or the lowest of ``rewards`` if lower.

    Otherwise a crash would be the best answer where all rewards are negative. ``rewards`` has the reward of each
    rollout that it is compared with; None if that one failed, too.
    """
    return min([failed_reward, *(reward for reward in rewards if reward is not None)])


def find_final_reward(spans: Iterable[Span], rollout: Rollout | None = None) -> float | None:
    """Returns the final reward of an attempt: the primary reward of its last reward span.

    ``spans`` are in the order of their arrival. A reward stored on the latest attempt of ``rollout`` takes precedence.
    """
    if isinstance(rollout, AttemptedRollout) and rollout.attempt.reward is not None:
        return rollout.attempt.reward
    rewards = find_reward_spans(spans)
    return get_reward_value(rewards[-1]) if rewards else None


def find_feedback(spans: Iterable[Span]) -> list[Feedback]:
    """Returns the feedback of an attempt in the given order: emitted feedback, and errors of tools.

    Operations, and exceptions that the agent handled and emitted, count as tools. Spans that were written after the
    attempt had ended do not count.
    """
    found = []
    for span in spans:
        if semconv.LATE in span.attributes:
            continue
        if span.name == semconv.SPAN_FEEDBACK:
            prompt = span.attributes.get(semconv.FEEDBACK_PROMPT)
            found.append(
                Feedback(str(span.attributes.get(semconv.FEEDBACK_TEXT, "")), None if prompt is None else str(prompt))
            )
        elif span.status.status_code == "ERROR" and (
            span.name in (semconv.SPAN_EXCEPTION, semconv.SPAN_OPERATION) or semconv.is_tool_call(span)
        ):
            tool = semconv.read_tool_name(span) or span.attributes.get(semconv.OPERATION_NAME)
            reason = span.status.description or "it failed"
            found.append(Feedback(reason if tool is None else f"{tool}: {reason}", None))
    return found


async def read_final_reward(store: LightningStore, rollout: Rollout) -> float | None:
    """Like ``find_final_reward`` for the latest attempt; reads its spans only if the attempt has no reward."""
    stored = find_final_reward((), rollout)
    return stored if stored is not None else find_final_reward(await store.query_spans(rollout.rollout_id, "latest"))
