"""Credit rules: components of the kind ``credit``, which divide an attempt's reward among its model calls."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from agentlightning import semconv
from agentlightning.adapter.call import Node, TracedCall
from agentlightning.adapter.triplet import load_credit_rule
from agentlightning.errors import AdapterError, ConfigError
from agentlightning.plugin.hookspecs import Component, hookimpl
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
        """Sets ``Triplet.reward`` to the assigned rewards, and the metadata ``credit`` (the rule) and ``turn``."""
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
    own: dict[Node, list[Span]] = {call.anchor: [] for call in calls}
    latest: dict[str | None, list[Span]] = {}
    for node in sorted(nodes, key=lambda node: (node.start, node not in own, node.span.sequence_id)):
        if node in own:
            latest[node.agent_name] = own[node]
        elif node not in of_calls and node.agent_name in latest:
            latest[node.agent_name].append(node.span)
    return [own[call.anchor] for call in calls]


class IdenticalCredit(CreditRule):
    """Every call gets the final reward, as without a rule."""

    def assign(self, steps: Sequence[Step], final_reward: float | None) -> Sequence[float | None]:
        return [final_reward] * len(steps)

    def compared_turns(self, steps: Sequence[Step]) -> Sequence[int | str | None]:
        """Compares whole rollouts."""
        return [None] * len(steps)


class DiscountedCredit(CreditRule):
    """The discounted return-to-go: ``G_t = r_t + gamma * G_{t+1}``.

    ``r_t`` is the sum of the rewards emitted right after call t or linked to it, else 0. See
    Sutton and Barto, Reinforcement Learning (2018), equation 3.9; a step is a model call.
    """

    def __init__(self, gamma: float = 0.95) -> None:
        """Sets the discount of a reward that comes one call later, from 0 to 1."""
        if not 0.0 <= gamma <= 1.0:
            raise ConfigError(f"gamma = {gamma}: give a discount from 0 to 1")
        self.gamma = gamma

    def assign(self, steps: Sequence[Step], final_reward: float | None) -> Sequence[float | None]:
        if all(step.reward is None for step in steps):  # the attempt failed, or emitted no rewards
            return [None] * len(steps)
        returns: list[float] = []
        following = 0.0
        for step in reversed(steps):
            following = (step.reward or 0.0) + self.gamma * following
            returns.append(following)
        return returns[::-1]


class NearestCredit(DiscountedCredit):
    """A call gets its own rewards only: ``DiscountedCredit`` with a gamma of 0."""

    def __init__(self) -> None:
        super().__init__(gamma=0.0)


Incident: TypeAlias = Literal["tool_success", "tool_failure", "invalid_output", "retry"]


class _ToolCall(NamedTuple):
    id: str
    name: str
    arguments: str


class IntermediateCredit(CreditRule):
    """Adds intermediate rewards, found in the trace, to the rewards of another rule.

    These incidents of each model call are counted:

    * ``tool_success`` and ``tool_failure``: a tool call. It failed if its span has the status ERROR, or its result
      matches ``error_pattern``; a tool call with neither a span nor a result is not counted.
    * ``invalid_output``: the answer was cut off at the length limit, is empty, or has a tool call whose arguments are
      not a JSON object.
    * ``retry``: the agent's next call has the same prompt, so this answer was not used; or the answer exactly repeats
      an earlier failed tool call of the same agent.
    """

    def __init__(
        self,
        base: str | Mapping[str, Any] | CreditRule = "identical",
        *,
        tool_success: float = 0.0,
        tool_failure: float = -0.1,
        invalid_output: float = -0.1,
        retry: float = -0.05,
        error_pattern: str = r"(?i)^\W*(error|exception|traceback|failed)\b",
    ) -> None:
        """Sets the reward of each incident.

        ``base`` is the rule to whose values these rewards are added; None stays None, as for a failed attempt.
        ``error_pattern`` is a regular expression that matches the results of failed tool calls.
        """
        try:
            self._error = re.compile(error_pattern)
        except re.error as error:
            raise ConfigError(f"error_pattern = {error_pattern!r} is not a regular expression: {error}") from error
        self.base: CreditRule = load_credit_rule(base)
        self.weights: dict[Incident, float] = {
            "tool_success": tool_success,
            "tool_failure": tool_failure,
            "invalid_output": invalid_output,
            "retry": retry,
        }

    def assign(self, steps: Sequence[Step], final_reward: float | None) -> Sequence[float | None]:
        values = self.base.assign(steps, final_reward)
        return [
            value if value is None else value + sum(self.weights[incident] for incident in incidents)
            for value, incidents in zip(values, self.find_incidents(steps), strict=True)
        ]

    def compared_turns(self, steps: Sequence[Step]) -> Sequence[int | str | None]:
        """Compares calls as the base rule does."""
        return self.base.compared_turns(steps)

    def find_incidents(self, steps: Sequence[Step]) -> list[list[Incident]]:
        """Returns the incidents of each step."""
        incidents: list[list[Incident]] = [[] for _ in steps]
        failures: list[list[_ToolCall]] = [[] for _ in steps]
        results: dict[str, str] = {}  # in later steps, by the id of the tool call; the nearest result counts
        for position in range(len(steps) - 1, -1, -1):
            step = steps[position]
            outcomes = [(call, self._outcome(call, step.spans, results)) for call in _tool_calls(step)]
            incidents[position] += [outcome for _, outcome in outcomes if outcome is not None]
            failures[position] = [call for call, outcome in outcomes if outcome == "tool_failure"]
            results.update(_tool_results(step))
        failed: set[tuple[str | None, str, str]] = set()
        last_of_agent: dict[str | None, int] = {}
        for position, step in enumerate(steps):
            agent = step.triplets[0].metadata.get("agent_name")
            if _is_invalid(step):
                incidents[position].append("invalid_output")
            if any((agent, call.name, call.arguments) in failed for call in _tool_calls(step)):
                incidents[position].append("retry")
            before = last_of_agent.get(agent)
            if before is not None and _prompt(steps[before]) and _prompt(steps[before]) == _prompt(step):
                incidents[before].append("retry")
            failed.update((agent, call.name, call.arguments) for call in failures[position])
            last_of_agent[agent] = position
        return incidents

    def _outcome(self, call: _ToolCall, spans: Sequence[Span], results: Mapping[str, str]) -> Incident | None:
        runs = [span for span in spans if semconv.is_tool_call(span)]
        own = [span for span in runs if span.attributes.get("gen_ai.tool.call.id") == call.id]
        own = own or [
            span
            for span in runs
            if "gen_ai.tool.call.id" not in span.attributes and semconv.read_tool_name(span) == call.name
        ]
        result = results.get(call.id)
        has_error = any(span.status.status_code == "ERROR" for span in own)
        if has_error or (result is not None and self._error.search(result)):
            return "tool_failure"
        return "tool_success" if own or result is not None else None


def _tool_calls(step: Step) -> list[_ToolCall]:
    calls = [call for answer in _answers(step) for call in answer.get("tool_calls") or ()]
    functions = [call.get("function") or {} for call in calls]
    return [
        _ToolCall(str(call.get("id") or ""), str(function.get("name") or ""), str(function.get("arguments") or ""))
        for call, function in zip(calls, functions, strict=True)
    ]


def _tool_results(step: Step) -> dict[str, str]:
    return {
        str(message["tool_call_id"]): _text(message.get("content"))
        for message in _prompt(step)
        if message.get("role") == "tool" and message.get("tool_call_id")
    }


def _is_invalid(step: Step) -> bool:
    if step.triplets[0].metadata.get("finish_reason") == "length":
        return True
    if any(not answer.get("tool_calls") and not _text(answer.get("content")).strip() for answer in _answers(step)):
        return True
    return any(not isinstance(semconv.parse_json(call.arguments or "{}"), dict) for call in _tool_calls(step))


def _answers(step: Step) -> Sequence[dict[str, Any]]:
    """Returns the first choice, with which the agent continued, if there is one."""
    return list(step.triplets[0].response["raw_content"][:1])


def _prompt(step: Step) -> Sequence[dict[str, Any]]:
    return list(step.triplets[0].prompt["raw_content"])


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


@hookimpl
def components() -> list[Component]:
    return [
        Component("credit", name, f"{__name__}:{rule.__name__}", summary=summary)
        for name, rule, summary in (
            ("identical", IdenticalCredit, "the final reward for all calls"),
            ("nearest", NearestCredit, "rewards of the nearest call"),
            ("discounted", DiscountedCredit, "discounted return-to-go"),
            ("intermediate", IntermediateCredit, "tools, invalid outputs and retries count"),
        )
    ]
