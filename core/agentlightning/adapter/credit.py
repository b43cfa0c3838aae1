"""Credit rules: what each model call of an attempt is worth. Plugins offer them as components, kind ``credit``."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentlightning.adapter.call import Call
from agentlightning.adapter.tree import Node
from agentlightning.errors import AdapterError, ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning.types import Span, Triplet


@dataclass(frozen=True, slots=True)
class Step:
    """One answered model call, as a credit rule sees it."""

    triplets: Sequence[Triplet]
    """One for each choice of the answer; their ``reward`` is not set yet."""
    reward: float | None
    """The sum of the rewards that the agent emitted nearest to this call; None when it emitted none."""
    spans: Sequence[Span]
    """What the same agent did between this answer and its next call, such as running tools, in the order of starts."""


class CreditRule(ABC):
    """Says what each call of an attempt is worth; stateless, so one rule serves all attempts."""

    @abstractmethod
    def assign(self, steps: Sequence[Step], final_reward: float | None) -> Sequence[float | None]:
        """Gives one value for each step.

        Args:
            steps: the calls that are trained on, in the order of their beginnings.
            final_reward: the last reward of the attempt (``find_final_reward``); None when there is none.

        Returns:
            As many values as there are steps; None where nothing can be said.
        """


CreditSpec: TypeAlias = CreditRule | str | Mapping[str, object]
"""A rule, its registered name, or ``{"name": ..., **settings}``."""


def create_credit(spec: CreditSpec) -> CreditRule:
    """Makes a rule of its name.

    Raises:
        PluginError: no plugin offers it.
        ConfigError: a setting that it does not take, or something that is no rule.
    """
    rule = get_manager().create("credit", spec) if isinstance(spec, (str, Mapping)) else spec
    if not isinstance(rule, CreditRule):
        raise ConfigError(f"credit = {rule!r} is no CreditRule; give one, or a name that `agl plugins` lists")
    return rule


def credit_name(rule: CreditRule) -> str:
    """What triplets say of the rule: the name it is registered by, else that of its class."""
    target = f"{type(rule).__module__}:{type(rule).__qualname__}"
    offers = get_manager().components("credit").values()
    return next((offer.name for offer in offers if offer.target == target), type(rule).__qualname__)


def assign_credit(
    rule: CreditRule,
    nodes: Sequence[Node],
    calls: Sequence[Call],
    triplets: Sequence[Sequence[Triplet]],
    rewards: Mapping[Call, float],
    final_reward: float | None,
) -> list[list[Triplet]]:
    """Writes what a rule says into ``Triplet.reward``, and the rule's name into ``metadata["credit"]``.

    Raises:
        AdapterError: the rule gave another number of values than there are calls.
    """
    between = _spans_after(nodes, calls)
    steps = [
        Step(triplets_of_call, rewards.get(call), spans)
        for call, triplets_of_call, spans in zip(calls, triplets, between, strict=True)
    ]
    values = rule.assign(steps, final_reward)
    name = credit_name(rule)
    if len(values) != len(steps):
        raise AdapterError(f"the credit rule {name!r} gave {len(values)} values for {len(steps)} model calls")
    return [
        [
            triplet.model_copy(update={"reward": value, "metadata": {**triplet.metadata, "credit": name}})
            for triplet in own
        ]
        for own, value in zip(triplets, values, strict=True)
    ]


def _spans_after(nodes: Sequence[Node], calls: Sequence[Call]) -> list[list[Span]]:
    """For each call, the other spans of its agent that began after it did and before the agent's next call."""
    of_calls = {node for call in calls for node in call.nodes}
    starts: dict[str | None, list[float]] = {}
    positions: dict[str | None, list[int]] = {}
    for position, call in enumerate(calls):
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
