"""Finished rollouts as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from agentlightning import semconv
from agentlightning.reward import find_final_reward
from agentlightning.run.tracker import Sample
from agentlightning.types import Rollout, Span


class SampleRow(NamedTuple):
    """A finished rollout; the prompt and the answer come from its last model call."""

    rollout_id: str
    mode: str
    status: str
    reward: float | None
    task: str
    prompt: str
    answer: str


def make_row(rollout: Rollout, spans: Sequence[Span]) -> SampleRow:
    """Makes the row of a rollout with the spans of its latest attempt."""
    calls = [span for span in spans if semconv.is_llm_call(span) and semconv.read_output_messages(span)]
    asked = semconv.read_input_messages(calls[-1])[-1:] if calls else []
    answered = semconv.read_output_messages(calls[-1]) if calls else []
    prompt, answer = (
        "".join(str(message.get("content") or message.get("tool_calls") or "") for message in messages)
        for messages in (asked, answered)
    )
    reward = find_final_reward(spans, rollout)
    return SampleRow(rollout.rollout_id, rollout.mode or "", rollout.status, reward, str(rollout.input), prompt, answer)


def make_table(samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the ``columns`` and the rows (``data``) of finished rollouts, as trackers take them."""
    return {"columns": list(SampleRow._fields), "data": [list(make_row(*sample)) for sample in samples]}
