"""Training records: the ledger of a step, the rollouts of a group side by side, and the tokens of a rollout."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.types import AttemptedRollout, Rollout, Span
from agentlightning_plugins.dashboard.rollout import MAX_BYTES, find_rollout, read_attempt
from agentlightning_plugins.dashboard.rollouts import describe_rollout
from agentlightning_plugins.dashboard.visit import Visit
from agentlightning_plugins.shared.chat_history import describe_conversations
from agentlightning_plugins.shared.rendering.charts import heat_level
from agentlightning_plugins.shared.training_records.query import read_entry, read_ledger, read_rows
from agentlightning_plugins.shared.training_records.record import LEDGER_SPAN, LedgerEntry

MEASURES: Final = ("logprob", "trainer", "gap", "advantage", "mask")
_OUTCOME: Final = "outcome/"
_MAX_GROUP: Final = 64
_MAX_MESSAGES: Final = 40
_PAGE: Final = 2_000
"""Maximum number of tokens of a row on one page."""
_LOW_LOGPROB: Final = 3.0
"""A token with a log-probability of minus this value or less has the strongest colour."""
_LEAST_GAP: Final = 0.01
"""Smaller gaps never have the strongest colour."""


async def show_ledger(visit: Visit) -> dict[str, Any]:
    """Returns the outcomes of rollouts by step, and rollouts and groups of one step: the query's, or the last."""
    store = visit.run_store
    steps: list[dict[str, Any]] = []
    for entry in await store.query_metrics():
        counts = {name.removeprefix(_OUTCOME): int(entry.values[name]) for name in entry.values if name[:8] == _OUTCOME}
        if counts:
            total = sum(counts.values())
            ordered = dict(sorted(counts.items(), key=lambda item: (item[0] != "trained", -item[1])))
            steps.append({"step": entry.step, "total": total, "outcomes": ordered})
    wanted = visit.number("step", steps[-1]["step"] if steps else 0)
    entries = await read_ledger(store, wanted) if steps else []
    groups: dict[str, list[LedgerEntry]] = {}
    for each in entries:
        groups.setdefault(each.group, []).append(each)
    return {
        "steps": steps[::-1],
        "step": wanted,
        "rollouts": [{**each.to_json(), "turns": len(each.calls)} for each in entries],
        "groups": {name: _describe_group(members) for name, members in groups.items()},
    }


def _describe_group(members: Sequence[LedgerEntry]) -> dict[str, Any]:
    rewards = [each.reward for each in members if each.reward is not None]
    return {
        "rollouts": len(members),
        "trained": sum(each.outcome == "trained" for each in members),
        "reward": statistics.fmean(rewards) if rewards else None,
        "is_flat": len(members) > 1 and len({each.reward for each in members}) == 1,
    }


async def show_group(visit: Visit) -> dict[str, Any]:
    """Returns the rollouts of one task in one step."""
    name = visit.query.get("name", "")
    rollouts: Sequence[Rollout] = ()
    for value in (name, int(name)) if name.isdecimal() else (name,):
        page = await visit.run_store.query_rollouts(metadata={"group": value}, sort_by="start_time", limit=_MAX_GROUP)
        rollouts = page.items or rollouts
    if not rollouts:
        raise NotFoundError(f"run {visit.run_id!r} has no rollouts of group {name!r}; they may have been deleted")
    members = []
    for rollout in rollouts:
        spans: Sequence[Span] = ()
        if isinstance(rollout, AttemptedRollout):
            spans, _ = await read_attempt(visit.run_store, rollout.attempt, MAX_BYTES // len(rollouts))
        members.append(await asyncio.to_thread(_describe_member, rollout, spans))
    rewards = [member["reward"] for member in members if member["reward"] is not None]
    return {
        "group": name,
        "input": rollouts[0].input,
        "members": members,
        "is_flat": len(rewards) > 1 and len(set(rewards)) == 1,
        "mean": sum(rewards) / len(rewards) if rewards else None,
    }


def _describe_member(rollout: Rollout, spans: Sequence[Span]) -> dict[str, Any]:
    entry = read_entry(spans)
    conversations = describe_conversations(spans)
    messages = conversations[-1]["messages"] if conversations else []
    own = [message for message in messages if message["role"] not in ("system", "developer")]
    return {
        **describe_rollout(rollout),
        "outcome": None if entry is None else entry.outcome,
        "messages": own[1:][-_MAX_MESSAGES:] if own and own[0]["role"] == "user" else own[-_MAX_MESSAGES:],
    }


async def show_tokens(visit: Visit) -> dict[str, Any]:
    """Returns the trained rows of a rollout; a page shows a part of each row, the JSON twin all tokens."""
    rollout = await find_rollout(visit)
    measure = visit.query.get("by", MEASURES[0])
    if measure not in MEASURES:
        raise ConfigError(f"by={measure!r} is not a measure; allowed are {', '.join(MEASURES)}")
    rows = await read_rows(visit.run_store, rollout.rollout_id)
    entry = read_entry((await visit.run_store.query_spans(rollout.rollout_id, "latest", name=LEDGER_SPAN)).items)
    return {
        "rollout_id": rollout.rollout_id,
        "metadata": dict(rollout.metadata or {}),
        "outcome": None if entry is None else entry.outcome,
        "calls": {} if entry is None else dict(entry.calls),
        "by": measure,
        "measures": MEASURES,
        "start": visit.number("start", 0),
        "rows": [row.to_json() for row in rows],
    }


def describe_row(row: Mapping[str, Any], measure: str, start: int) -> dict[str, Any]:
    """Prepares a row for the template: the values of the measure, and one page of tokens with their colours."""
    values = _measure(row, measure)
    finite = [abs(value) for value in values if value is not None]
    most = {"logprob": _LOW_LOGPROB, "trainer": _LOW_LOGPROB, "mask": 1.0}.get(measure) or max(finite, default=0.0)
    most = max(most, _LEAST_GAP) if measure == "gap" else most
    start = min(start, max(0, len(values) - 1) // _PAGE * _PAGE)
    firsts = {call["start"]: call["response_id"] for call in row["calls"]}
    gaps = _measure(row, "gap")
    tokens = [
        {
            "id": row["response_ids"][place],
            "text": row["response"][place],
            "value": values[place],
            "level": heat_level(values[place], most),
            "is_trained": bool(row["mask"][place]),
            "call": firsts.get(place),
            "logprob": row["logprobs"][place],
            "gap": gaps[place],
            "advantage": row["advantages"][place],
        }
        for place in range(start, min(start + _PAGE, len(values)))
    ]
    return {
        "heat": values,
        "most": most,
        "boundaries": list(firsts),
        "tokens": tokens,
        "start": start,
        "before": start - _PAGE if start else None,
        "after": start + _PAGE if start + _PAGE < len(values) else None,
        "gap_max": max((abs(gap) for gap in gaps if gap is not None), default=None),
    }


def _measure(row: Mapping[str, Any], measure: str) -> list[float | None]:
    """Returns one value per response token; None if the token was not trained on or has no value."""
    mask, logprobs, trainer = row["mask"], row["logprobs"], row["trainer_logprobs"] or [None] * len(row["mask"])
    if measure == "mask":
        return [float(kept) for kept in mask]
    if measure == "gap":
        pairs = zip(trainer, logprobs, strict=True)
        values = [None if theirs is None or own is None else theirs - own for theirs, own in pairs]
    else:
        values = {"logprob": logprobs, "trainer": trainer, "advantage": row["advantages"]}[measure]
    return [value if kept else None for value, kept in zip(values, mask, strict=True)]
