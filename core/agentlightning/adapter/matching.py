"""Matches rewards to model calls."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from agentlightning import semconv
from agentlightning.adapter.call import Call
from agentlightning.adapter.tree import Node
from agentlightning.reward import get_reward_value, is_reward_span
from agentlightning.types import Span


class RewardMatchPolicy(StrEnum):
    """How to find the call of a reward that has no link to one (``semconv.link_attributes``)."""

    FIRST_OCCURRENCE = "first_occurrence"
    """The last call that ended before the reward and has no reward yet."""
    FIRST_SIBLING = "first_sibling"
    """The same, among the calls under the same parent."""


def match_rewards(
    nodes: Sequence[Node], calls: Sequence[Call], policy: RewardMatchPolicy, *, is_exclusive: bool = True
) -> dict[Call, float]:
    """Finds the call of each reward: by its link, otherwise by time.

    Args:
        nodes: all spans of the attempt.
        calls: those that may have a reward.
        policy: for rewards without a link.
        is_exclusive: a call takes one reward, and the next consecutive one goes to the call before it. False: every
            reward is added to the nearest call before it.
    """
    rewards: dict[Call, float] = {}
    by_link: dict[str, dict[Any, Call]] = {}
    unlinked: list[Node] = []
    for node in nodes:
        if is_reward_span(node.span):
            linked = _find_linked(node.span, calls, by_link)
            if linked is None:
                unlinked.append(node)
            else:
                before = 0.0 if is_exclusive else rewards.get(linked, 0.0)
                rewards[linked] = before + (get_reward_value(node.span) or 0.0)
    events: list[tuple[float, int, Call | Node]] = [(call.settled_at, 0, call) for call in calls]
    events += [(node.start, 1, node) for node in unlinked]
    events.sort(key=lambda event: event[:2])
    by_sibling = policy is RewardMatchPolicy.FIRST_SIBLING
    waiting: dict[Node | None, list[Call]] = {}
    for _, _, item in events:
        place = item.anchor if isinstance(item, Call) else item
        stack = waiting.setdefault(place.parent if by_sibling else None, [])
        if isinstance(item, Call):
            if not is_exclusive or item not in rewards:
                stack.append(item)
        elif stack:
            call = stack.pop() if is_exclusive else stack[-1]
            rewards[call] = rewards.get(call, 0.0) + (get_reward_value(item.span) or 0.0)
    return rewards


def _find_linked(span: Span, calls: Sequence[Call], by_link: dict[str, dict[Any, Call]]) -> Call | None:
    for key, value in semconv.read_links(span):
        if key not in by_link:
            by_link[key] = {
                _hashable(node.span.attributes[key]): call
                for call in calls
                for node in call.nodes
                if key in node.span.attributes
            }
        call = by_link[key].get(_hashable(value))
        if call is not None:
            return call
    return None


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
