"""One rollout: its attempts, conversations, rewards, errors and spans, the actions on it, and the export of labels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, Final
from urllib.parse import quote

from agentlightning import semconv
from agentlightning.adapter.call import Node, build_tree, find_states
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.frozen import thaw
from agentlightning.reward import find_feedback, find_reward_spans, get_rewards_from_span
from agentlightning.store.protocol import LightningStore
from agentlightning.types import ENDED_ROLLOUT, Attempt, AttemptedRollout, Rollout, Span
from agentlightning_plugins.dashboard.rollouts import LABEL, NOTE
from agentlightning_plugins.dashboard.visit import Visit
from agentlightning_plugins.shared.chat_history import describe_conversations, read_conversations
from agentlightning_plugins.shared.paging import every, read_spans
from agentlightning_plugins.shared.training_records.query import read_entry
from agentlightning_plugins.shared.training_records.record import LEDGER_SPAN, RECORDS, TrainedRow, read_records

MAX_BYTES: Final = 8 * 2**20
"""Maximum size of the spans that a page or a line of an export is made of; it says how many are left out."""
_MAX_ROWS: Final = 500
"""Maximum number of spans in the waterfall and in the JSON twin."""
_MAX_CONVERSATIONS: Final = 40


async def show_rollout(visit: Visit) -> dict[str, Any]:
    """Returns a rollout, with the details of the attempt in the query or of the latest attempt."""
    rollout = await find_rollout(visit)
    store = visit.run_store
    attempts = (await store.query_attempts(rollout.rollout_id)).items
    chosen = visit.query.get("attempt", "")
    shown = next((attempt for attempt in attempts if attempt.attempt_id == chosen), attempts[-1] if attempts else None)
    metadata = dict(rollout.metadata or {})
    return {
        "rollout": rollout.model_dump(mode="json", exclude={"attempt"}),
        "label": metadata.get(LABEL),
        "note": metadata.get(NOTE),
        "can_cancel": rollout.status not in ENDED_ROLLOUT,
        "can_retry": rollout.status in ("failed", "cancelled"),
        "attempts": [attempt.model_dump(mode="json") for attempt in attempts],
        "shown": None if shown is None else await _describe_attempt(visit, shown),
    }


async def find_rollout(visit: Visit) -> Rollout:
    """Returns the rollout in the path; raises NotFoundError if the run does not have it."""
    rollout_id = visit.names["rollout_id"]
    rollout = await visit.run_store.get_rollout_by_id(rollout_id)
    if rollout is None or rollout.run_id != visit.run_store.run_id:
        raise NotFoundError(f"run {visit.run_id!r} has no rollout {rollout_id!r}; it may have been deleted")
    return rollout


async def _describe_attempt(visit: Visit, attempt: Attempt) -> dict[str, Any]:
    spans, left_out = await read_attempt(visit.run_store, attempt)
    return {
        **attempt.model_dump(mode="json"),
        **await asyncio.to_thread(_summarize, spans, left_out),
        "spans_left_out": left_out,
    }


async def read_attempt(
    store: LightningStore, attempt: Attempt, max_bytes: int = MAX_BYTES
) -> tuple[Sequence[Span], int]:
    """Returns the first spans of an attempt, with its training's outcome, and the number of spans left out."""
    ids = attempt.rollout_id, attempt.attempt_id
    spans, total = await read_spans(store, *ids, max_bytes=max_bytes)
    if total == len(spans):
        return spans, 0
    outcomes = (await store.query_spans(*ids, name=LEDGER_SPAN)).items  # training adds it after the agent's spans
    spans = [*(span for span in spans if span.name != LEDGER_SPAN), *outcomes]
    return spans, total - len(spans)


def _summarize(spans: Sequence[Span], left_out: int) -> dict[str, Any]:
    nodes, conversations, entry = build_tree(spans, repair=True), describe_conversations(spans), read_entry(spans)
    trained = {call.response_id for row in read_records(TrainedRow, spans) for call in row.calls}
    return {
        "rewards": [
            {"time": span.start_time, "parts": [part._asdict() for part in get_rewards_from_span(span)]}
            for span in find_reward_spans(spans)
        ],
        "feedback": [feedback._asdict() for feedback in find_feedback(spans)],
        "states": [{"time": state.time, "changed": state.changed} for state in find_states(spans)[:_MAX_ROWS]],
        "conversations": conversations[-_MAX_CONVERSATIONS:],
        "conversation_count": len(conversations),
        # The pages about training show its records.
        "spans": _describe_spans([node for node in nodes if node.span.name not in RECORDS], trained),
        "span_total": left_out + sum(span.name not in RECORDS for span in spans),
        "is_recorded": any(span.name in RECORDS for span in spans),
        "outcome": None if entry is None else entry.outcome,
        "tokens": _count_tokens(spans),
        "tool_calls_unparsed": sum(int(span.attributes.get(semconv.TOOL_CALLS_UNPARSED) or 0) for span in spans),
    }


def _describe_spans(nodes: Sequence[Node], trained: Collection[str]) -> list[dict[str, Any]]:
    """Returns the rows of the waterfall, with depth, and with start and length as shares of the total time."""
    if not nodes:
        return []
    begin, end = min(node.start for node in nodes), max(node.end for node in nodes)
    whole = max(end - begin, 1e-9)
    depths: dict[str, int] = {}
    rows = []
    for node in nodes:
        span = node.span
        depths[span.span_id] = 0 if node.parent is None else depths.get(node.parent.span.span_id, 0) + 1
        rows.append(
            {
                "span_id": span.span_id,
                "name": span.name,
                "kind": _kind(span),
                "trained": response_id if (response_id := semconv.read_response_id(span)) in trained else None,
                "status": span.status.status_code,
                "problem": span.status.description,
                "depth": depths[span.span_id],
                "offset": (node.start - begin) / whole,
                "share": (node.end - node.start) / whole,
                "start_time": node.start,
                "seconds": node.end - node.start,
                "attributes": {key: value for key, value in span.attributes.items() if not _is_long(value)}
                | {key: f"{len(value):,} values" for key, value in span.attributes.items() if _is_long(value)},
                "events": [{"name": event.name, "attributes": dict(event.attributes)} for event in span.events],
            }
        )
    return rows[:_MAX_ROWS]


def _is_long(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 20


def _kind(span: Span) -> str:
    if semconv.is_llm_call(span):
        return "model"
    if semconv.is_tool_call(span):
        return "tool"
    return "reward" if find_reward_spans([span]) else "other"


def _count_tokens(spans: Sequence[Span]) -> dict[str, int]:
    """Sums the tokens of the model calls, as reported by the model servers."""
    keys = {"input": semconv.GEN_AI_INPUT_TOKENS, "output": semconv.GEN_AI_OUTPUT_TOKENS}
    calls: dict[str, Span] = {}
    for span in filter(semconv.is_llm_call, spans):  # agent and gateway both record a call, with the same response id
        calls.setdefault(semconv.read_response_id(span) or span.span_id, span)
    counts = {name: [span.attributes.get(key) for span in calls.values()] for name, key in keys.items()}
    return {name: sum(value for value in values if isinstance(value, int)) for name, values in counts.items()}


_MAX_NOTE = 4000


async def cancel(visit: Visit) -> str:
    """Cancels a rollout."""
    rollout = await find_rollout(visit)
    await visit.run_store.cancel_rollout(rollout.rollout_id)
    return _path(visit)


async def retry(visit: Visit) -> str:
    """Queues a rollout again."""
    rollout = await find_rollout(visit)
    await visit.run_store.retry_rollout(rollout.rollout_id)
    return _path(visit)


async def label(visit: Visit) -> str:
    """Labels a rollout as good or bad, with a note, in its metadata; ``keep`` keeps the label."""
    chosen, note = visit.query.get("label", ""), visit.query.get("note", "")[:_MAX_NOTE].strip()
    if chosen not in ("good", "bad", "keep", ""):
        raise ConfigError(f"label={chosen!r} is not a label; allowed are good, bad, keep and an empty value")
    rollout = await find_rollout(visit)
    metadata = dict(rollout.metadata or {})
    if chosen != "keep":
        metadata[LABEL] = chosen
    metadata[NOTE] = note
    kept = {key: value for key, value in metadata.items() if key not in (LABEL, NOTE) or value}
    await visit.run_store.update_rollout(rollout.rollout_id, metadata=kept or None)
    return _path(visit)


def _path(visit: Visit) -> str:
    return f"/runs/{quote(visit.run_id, safe='')}/rollouts/{quote(visit.names['rollout_id'], safe='')}"


async def read_labelled(store: LightningStore) -> AsyncIterator[dict[str, Any]]:
    """Yields the labelled rollouts of a run: input, label, note, reward, feedback and conversations."""
    async for rollout in every(store.query_rollouts):
        if rollout.metadata and (LABEL in rollout.metadata or NOTE in rollout.metadata):
            yield await _describe(store, rollout)


async def _describe(store: LightningStore, rollout: Rollout) -> dict[str, Any]:
    metadata = dict(rollout.metadata or {})
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    spans, left_out = ([], 0) if attempt is None else await read_attempt(store, attempt)
    conversations = await asyncio.to_thread(read_conversations, spans)
    return {
        "rollout_id": rollout.rollout_id,
        "label": metadata.get(LABEL),
        "note": metadata.get(NOTE),
        "reward": None if attempt is None else attempt.reward,
        "feedback": [feedback._asdict() for feedback in find_feedback(spans)],
        "input": thaw(rollout.input),
        "conversations": [thaw(dict(history)) for history in conversations],
        **({"spans_left_out": left_out} if left_out else {}),
    }
