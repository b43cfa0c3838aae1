"""``IntermediateCredit``: rewards for tool results, invalid outputs and retries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from agentlightning import semconv
from agentlightning.adapter.triplet import load_credit_rule
from agentlightning.errors import ConfigError
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.types import Span
from agentlightning_plugins.credit.shared import CreditRule, Step

Incident: TypeAlias = Literal["tool_success", "tool_failure", "invalid_output", "retry"]


class _ToolCall(NamedTuple):
    id: str
    name: str
    arguments: str


class IntermediateCredit(CreditRule):
    """Adds intermediate rewards, found in the trace, to those of another rule.

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

        Args:
            base: the rule to whose values these rewards are added; None stays None (as for a failed attempt).
            tool_success: reward for each tool call that succeeded.
            tool_failure: reward for each tool call that failed.
            invalid_output: reward for an unusable answer.
            retry: reward for an answer that was requested again, or that repeats a failed tool call.
            error_pattern: regular expression that matches the results of failed tool calls.
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
        failed_at: dict[tuple[str | None, str, str], int] = {}
        failures: list[list[_ToolCall]] = [[] for _ in steps]
        results: dict[str, str] = {}  # in later steps, by the id of the tool call; the nearest result counts
        for position in range(len(steps) - 1, -1, -1):
            step = steps[position]
            for call in _tool_calls(step):
                outcome = self._outcome(call, step.spans, results)
                if outcome is not None:
                    incidents[position].append(outcome)
                if outcome == "tool_failure":
                    failures[position].append(call)
            results.update(_tool_results(step))
        last_of_agent: dict[str | None, int] = {}
        for position, step in enumerate(steps):
            agent = _metadata(step, "agent_name")
            if _is_invalid(step):
                incidents[position].append("invalid_output")
            if any((agent, call.name, call.arguments) in failed_at for call in _tool_calls(step)):
                incidents[position].append("retry")
            before = last_of_agent.get(agent)
            if before is not None and _prompt(steps[before]) and _prompt(steps[before]) == _prompt(step):
                incidents[before].append("retry")
            for call in failures[position]:
                failed_at[agent, call.name, call.arguments] = position
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
    calls = []
    for answer in _answers(step):
        for call in answer.get("tool_calls") or ():
            function = call.get("function") or {}
            values = call.get("id"), function.get("name"), function.get("arguments")
            calls.append(_ToolCall(*(str(value or "") for value in values)))
    return calls


def _tool_results(step: Step) -> dict[str, str]:
    return {
        str(message["tool_call_id"]): _text(message.get("content"))
        for message in _prompt(step)
        if message.get("role") == "tool" and message.get("tool_call_id")
    }


def _is_invalid(step: Step) -> bool:
    if _metadata(step, "finish_reason") == "length":
        return True
    if any(not answer.get("tool_calls") and not _text(answer.get("content")).strip() for answer in _answers(step)):
        return True
    return any(not _is_json_object(call.arguments) for call in _tool_calls(step))


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except ValueError:
        return False


def _answers(step: Step) -> Iterator[Mapping[str, Any]]:
    """Yields the first choice, with which the agent continued, if there is one."""
    yield from step.triplets[0].response["raw_content"][:1]


def _prompt(step: Step) -> Sequence[Mapping[str, Any]]:
    messages: Sequence[Mapping[str, Any]] = step.triplets[0].prompt["raw_content"]
    return messages


def _metadata(step: Step, key: str) -> Any:
    return step.triplets[0].metadata.get(key)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.credit.intermediate:IntermediateCredit"
    return [Component("credit", "intermediate", target, summary="tools, invalid outputs and retries count")]
