"""``CreditRule``: the base class of components of kind ``credit``, which divide an attempt's reward among its calls."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentlightning.adapter.call import Node, TracedCall
from agentlightning.errors import AdapterError
from agentlightning.plugin.registry import get_manager
from agentlightning.types import Span, Triplet


@dataclass(frozen=True, slots=True)
class Step:
    """One answered model call, as a credit rule sees it."""

    triplets: Sequence[Triplet]
    """One triplet for each choice of the answer; the ``reward`` of the triplets is not set yet."""
    reward: float | None
    """The sum of the rewards that the agent emitted nearest to this call; None when it emitted none."""
    spans: Sequence[Span]
    """Spans of the same agent, such as tool runs, between this call and the agent's next call, by start time."""


class CreditRule(ABC):
    """Assigns a reward to each call of an attempt. Rules are stateless, so one rule serves all attempts."""

    @abstractmethod
    def assign(self, steps: Sequence[Step], final_reward: float | None) -> Sequence[float | None]:
        """Returns one reward for each step, or None for steps without one.

        Args:
            steps: the calls to train on, in the order of the adapter: by start, or by ``sequence_id``.
            final_reward: the last reward of the attempt (``find_final_reward``); None when there is none.
        """

    def compared_turns(self, steps: Sequence[Step]) -> Sequence[int | str | None]:
        """Returns a key for each call.

        A call is compared with the calls of the task's other rollouts that have the same key. For the key None, each
        rollout counts once, regardless of its number of calls. By default a call is compared with the calls of the same
        turn, and turns are counted separately for each agent.
        """
        counts: Counter[str | None] = Counter()
        turns = []
        for step in steps:
            agent = step.triplets[0].metadata.get("agent_name")
            turns.append(f"{agent or ''}/{counts[agent]}")
            counts[agent] += 1
        return turns

    def apply(
        self,
        nodes: Sequence[Node],
        calls: Sequence[TracedCall],
        triplets: Sequence[Sequence[Triplet]],
        rewards: Mapping[TracedCall, float],
        final_reward: float | None,
    ) -> list[list[Triplet]]:
        """Sets ``Triplet.reward`` to the assigned rewards, and the metadata ``credit`` (the rule's name) and ``turn``.

        Raises:
            AdapterError: the number of rewards or turns differs from the number of calls.
        """
        steps = [
            Step(own, rewards.get(call), spans)
            for call, own, spans in zip(calls, triplets, _find_spans_after(nodes, calls), strict=True)
        ]
        values, turns = self.assign(steps, final_reward), self.compared_turns(steps)
        name = _find_name(self)
        for what, given in (("values", values), ("turns", turns)):
            if len(given) != len(steps):
                raise AdapterError(f"the credit rule {name!r} gave {len(given)} {what} for {len(steps)} model calls")
        return [
            [
                triplet.model_copy(
                    update={"reward": value, "metadata": {**triplet.metadata, "credit": name, "turn": turn}}
                )
                for triplet in own
            ]
            for own, value, turn in zip(triplets, values, turns, strict=True)
        ]


def _find_name(rule: CreditRule) -> str:
    """Returns the registered name of the rule, else the name of its class."""
    target = f"{type(rule).__module__}:{type(rule).__qualname__}"
    offers = get_manager().components("credit").values()
    return next((offer.name for offer in offers if offer.target == target), type(rule).__qualname__)


def _find_spans_after(nodes: Sequence[Node], calls: Sequence[TracedCall]) -> list[list[Span]]:
    """Returns, for each call, the other spans of its agent that start between it and the agent's next call."""
    of_calls = {node for call in calls for node in call.nodes}
    starts: dict[str | None, list[float]] = {}
    positions: dict[str | None, list[int]] = {}
    # An adapter may list calls in the order in which they ended.
    for position, call in sorted(enumerate(calls), key=lambda item: item[1].anchor.start):
        starts.setdefault(call.anchor.agent_name, []).append(call.anchor.start)
        positions.setdefault(call.anchor.agent_name, []).append(position)
    spans: list[list[Span]] = [[] for _ in calls]
    for node in sorted(nodes, key=lambda node: (node.start, node.span.sequence_id)):
        if node in of_calls or node.agent_name not in starts:
            continue
        before = bisect.bisect_right(starts[node.agent_name], node.start) - 1
        if before >= 0:
            spans[positions[node.agent_name][before]].append(node.span)
    return spans
