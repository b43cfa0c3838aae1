"""Builds the tree of an attempt's spans, and repairs it where spans lost their parents."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning import semconv
from agentlightning.errors import AdapterError
from agentlightning.records import Span
from agentlightning.reward import is_reward_span


@dataclass(slots=True, eq=False)
class Node:
    """A span in its tree."""

    span: Span
    start: float
    end: float
    parent: Node | None = None
    agent_name: str | None = None
    """Name of the nearest agent, which is the span itself or an ancestor."""
    is_in_reward: bool = False
    """Whether the span is part of computing a reward."""


def build_tree(spans: Sequence[Span], *, repair: bool) -> list[Node]:
    """Links spans by their parent ids.

    Args:
        spans: the spans of one attempt, in any order; duplicates count once.
        repair: put spans with an unknown parent under the innermost span that encloses their time (but never under
            model calls and rewards; a span that nothing encloses stays a root), and spans outside agents under the
            agent's span that is their sibling and encloses their time, if there is exactly one.

    Returns:
        All nodes: parents before their children, siblings in the order of their starts.

    Raises:
        AdapterError: the spans belong to several attempts.
    """
    by_id: dict[str, Node] = {}
    for span in spans:
        first = spans[0]
        if span.attempt_id != first.attempt_id or span.rollout_id != first.rollout_id:
            raise AdapterError(
                f"span {span.span_id} belongs to attempt {span.attempt_id!r} of rollout {span.rollout_id!r}, others to "
                f"{first.attempt_id!r} of {first.rollout_id!r}; adapt the spans of one attempt at a time"
            )
        start = span.start_time or 0.0
        by_id.setdefault(span.span_id, Node(span, start, max(start, span.end_time or start)))
    nodes = sorted(by_id.values(), key=lambda node: (node.start, -node.end, node.span.sequence_id))
    for node in nodes:
        node.parent = by_id.get(node.span.parent_id or "")
    _cut_cycles(nodes)
    if repair:
        _adopt_orphans(nodes)
        _adopt_siblings(nodes)
    return _in_order(nodes)


def _cut_cycles(nodes: Sequence[Node]) -> None:
    """Removes one parent link from each cycle; only broken instrumentation makes cycles."""
    seen: dict[Node, int] = {}
    for walk, node in enumerate(nodes):
        step: Node | None = node
        while step is not None and step not in seen:
            seen[step] = walk
            if step.parent is not None and seen.get(step.parent) == walk:
                step.parent = None
            step = step.parent


def _adopt_orphans(nodes: Sequence[Node]) -> None:
    """Gives orphans the innermost enclosing span as parent; ``nodes`` are in the order of their starts."""
    own_root: dict[Node, Node] = {}
    for node in nodes:
        path = []
        step = node
        while step not in own_root and step.parent is not None:
            path.append(step)
            step = step.parent
        root = own_root.setdefault(step, step)
        for passed in path:
            own_root[passed] = root
    # A span that ends no later than a span started after it is never the innermost. Without such spans, the ends
    # decrease from the bottom of the stack to its top, so bisection finds the enclosing span.
    stack: list[Node] = []
    falling_ends: list[float] = []
    for node in nodes:
        if node.parent is None:
            position = bisect.bisect_right(falling_ends, -node.end) - 1
            while position >= 0 and own_root[stack[position]] is node:  # its own descendant, if the clock is coarse
                position -= 1
            if position >= 0:
                node.parent = stack[position]
        if node.end > node.start and not semconv.is_llm_call(node.span) and not is_reward_span(node.span):
            while stack and stack[-1].end <= node.end:
                stack.pop()
                falling_ends.pop()
            stack.append(node)
            falling_ends.append(-node.end)


def _adopt_siblings(nodes: Sequence[Node]) -> None:
    """Puts spans outside agents under the sibling that is an agent and encloses their time; see ``build_tree``.

    Unrelated tracing libraries in one process make such traces: an agent and its calls are children of the root.
    """
    children: dict[Node, list[Node]] = {}
    for node in nodes:
        if node.parent is not None:
            children.setdefault(node.parent, []).append(node)
    outside = [node for node in nodes if node.parent is None and not _is_agent(node)]
    for node in outside:  # the loop extends it
        inside = [child for child in children.get(node, ()) if not _is_agent(child)]
        outside += inside
        waiting = [(node, inside)]
        while waiting:
            parent, movable = waiting.pop()
            agents = [child for child in children.get(parent, ()) if _is_agent(child)]
            for agent, moved in enclosed_by_one(agents, movable).items():
                for each in moved:
                    each.parent = agent
                waiting.append((agent, moved))  # below the agent there may be further agents


def enclosed_by_one(outer: Sequence[Node], inner: Sequence[Node]) -> dict[Node, list[Node]]:
    """Maps each outer node to the inner nodes that only it encloses in time; both are ordered by start."""
    found: dict[Node, list[Node]] = {}
    ends: list[tuple[float, int]] = []  # sorted, of the outer nodes that started so far
    started = 0
    for node in inner if outer else ():
        while started < len(outer) and outer[started].start <= node.start:
            bisect.insort(ends, (outer[started].end, started))
            started += 1
        if len(ends) - bisect.bisect_left(ends, (node.end, -1)) == 1:
            found.setdefault(outer[ends[-1][1]], []).append(node)
    return found


def _is_agent(node: Node) -> bool:
    return semconv.read_agent_name(node.span) is not None and not semconv.is_llm_call(node.span)


def _in_order(nodes: Sequence[Node]) -> list[Node]:
    """Returns parents before children, with inherited agent names and reward flags."""
    children: dict[Node | None, list[Node]] = {}
    for node in nodes:
        children.setdefault(node.parent, []).append(node)
    ordered: list[Node] = []
    stack = children.get(None, [])[::-1]
    while stack:
        node = stack.pop()
        ordered.append(node)
        parent = node.parent
        node.agent_name = semconv.read_agent_name(node.span)
        if parent is not None:
            node.agent_name = node.agent_name or parent.agent_name
            node.is_in_reward = parent.is_in_reward
        computes_reward = is_reward_span(node.span) or node.span.attributes.get(semconv.OPERATION_NAME) == "reward"
        node.is_in_reward = node.is_in_reward or computes_reward
        stack.extend(reversed(children.get(node, ())))
    return ordered
