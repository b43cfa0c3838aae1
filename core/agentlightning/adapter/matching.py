"""Matches rewards to model calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from agentlightning import semconv
from agentlightning.adapter.call import TracedCall
from agentlightning.adapter.tree import Node
from agentlightning.reward import get_reward_value, is_reward_span


class RewardMatchPolicy(StrEnum):
    """How to find the call of a reward that has no link to a call (``semconv.link_attributes``)."""

    FIRST_OCCURRENCE = "first_occurrence"
    """The last call that ended before the reward and has no reward yet."""
    FIRST_SIBLING = "first_sibling"
    """The last such call among those with the same parent as the reward."""


def match_rewards(
    nodes: Sequence[Node],
    calls: Sequence[TracedCall],
    policy: RewardMatchPolicy,
    *,
    is_exclusive: bool = True,
    settled_at: Callable[[TracedCall | Node], float] | None = None,
) -> dict[TracedCall, float]:
    """Finds the call of each reward: by its link, otherwise by time.

    Args:
        nodes: all spans of the attempt.
        calls: the calls that may have a reward.
        policy: how to find the calls of rewards without a link.
        is_exclusive: a call takes one reward, and a second consecutive reward goes to the previous call. If False,
            every reward is added to the nearest call before it.
        settled_at: the position of a call or a reward in the trace; default is the time.
    """
    settled_at = settled_at or (lambda item: item.settled_at if isinstance(item, TracedCall) else item.start)
    rewards: dict[TracedCall, float] = {}
    index = functools.cache(functools.partial(_index, calls))
    unlinked: list[Node] = []
    for node in nodes:
        if is_reward_span(node.span):
            linked = _find_linked(node, index, settled_at)
            if linked is None:
                unlinked.append(node)
            else:
                before = 0.0 if is_exclusive else rewards.get(linked, 0.0)
                rewards[linked] = before + (get_reward_value(node.span) or 0.0)
    events: list[tuple[float, int, TracedCall | Node]] = [(settled_at(call), 0, call) for call in calls]
    events += [(settled_at(node), 1, node) for node in unlinked]
    events.sort(key=lambda event: event[:2])
    by_sibling = policy is RewardMatchPolicy.FIRST_SIBLING
    waiting: dict[Node | None, list[TracedCall]] = {}
    for _, _, item in events:
        place = item.anchor if isinstance(item, TracedCall) else item
        stack = waiting.setdefault(place.parent if by_sibling else None, [])
        if isinstance(item, TracedCall):
            if not is_exclusive or item not in rewards:
                stack.append(item)
        elif stack:
            call = stack.pop() if is_exclusive else stack[-1]
            rewards[call] = rewards.get(call, 0.0) + (get_reward_value(item.span) or 0.0)
    return rewards


def _find_linked(
    reward: Node,
    index: Callable[[str], dict[Any, dict[TracedCall, None]]],
    settled_at: Callable[[TracedCall | Node], float],
) -> TracedCall | None:
    """Returns the call that has all linked attributes, the last one before the reward if there are several."""
    links = semconv.read_links(reward.span)
    linked = sorted((index(key).get(_hashable(value), {}) for key, value in links), key=len)
    found = [call for call in linked[0] if all(call in others for others in linked[1:])] if linked else []
    if len(found) > 1:
        found = [call for call in found if settled_at(call) <= settled_at(reward)]
    return max(found, key=settled_at, default=None)


def _index(calls: Sequence[TracedCall], key: str) -> dict[Any, dict[TracedCall, None]]:
    """Returns the calls by the value of a span attribute, or of the field ``span_id`` or ``trace_id``."""
    index: dict[Any, dict[TracedCall, None]] = {}
    for call in calls:
        for span in (node.span for node in call.nodes):
            if key in span.attributes:
                index.setdefault(_hashable(span.attributes[key]), {})[call] = None
            elif key in ("span_id", "trace_id"):
                index.setdefault(getattr(span, key), {})[call] = None
    return index


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
