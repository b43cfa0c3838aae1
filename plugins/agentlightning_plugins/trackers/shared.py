"""Finished rollouts as a table, for trackers that show tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentlightning import semconv
from agentlightning.reward import find_final_reward
from agentlightning.run.tracker import Sample
from agentlightning.types import Rollout, Span


def make_row(rollout: Rollout, spans: Sequence[Span]) -> dict[str, Any]:
    """Returns a finished rollout as a row; its prompt and answer come from its last model call."""
    calls = [span for span in spans if semconv.is_llm_call(span) and semconv.read_output_messages(span)]
    asked = semconv.read_input_messages(calls[-1])[-1:] if calls else []
    answered = semconv.read_output_messages(calls[-1]) if calls else []
    prompt, answer = (
        "".join(str(message.get("content") or message.get("tool_calls") or "") for message in messages)
        for messages in (asked, answered)
    )
    return {
        "rollout_id": rollout.rollout_id,
        "mode": rollout.mode or "",
        "status": rollout.status,
        "reward": find_final_reward(spans, rollout),
        "task": str(rollout.input),
        "prompt": prompt,
        "answer": answer,
    }


def make_table(samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the ``columns`` and the rows (``data``) of finished rollouts, as trackers take them."""
    rows = [make_row(*sample) for sample in samples]
    return {"columns": list(rows[0]) if rows else [], "data": [list(row.values()) for row in rows]}
