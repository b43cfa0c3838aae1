"""Reads training records from a store."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Set
from typing import Final

from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Rollout, Span
from agentlightning_plugins.shared.paging import every
from agentlightning_plugins.shared.training_records.record import (
    LEDGER_SPAN,
    ROW_SPAN,
    LedgerEntry,
    Outcome,
    TrainedRow,
    read_records,
)

_IDS: Final = 500
"""Number of rollouts in one query."""
_CLOCKS_S: Final = 10.0
"""How much the clock of a trainer, which makes the records, may differ from the store's."""


async def read_rows(store: LightningStore, rollout_id: str) -> list[TrainedRow]:
    """Reads the trained rows of a rollout in order of step."""
    spans = await store.query_spans(rollout_id, name=ROW_SPAN)
    return sorted(read_records(TrainedRow, spans), key=lambda row: row.step)


async def read_ledger(store: LightningStore, step: int | None = None) -> list[LedgerEntry]:
    """Reads the outcome of every training rollout, of all steps or one, in the order in which they were enqueued.

    ``step`` is the version of the weights that the training step produced.
    """
    conditions = {} if step is None else {"metadata": {"step": step}}
    rollouts = [rollout async for rollout in every(store.query_rollouts, sort_by="start_time", **conditions)]
    spans: list[Span] = []
    if step is None:
        spans = [span async for span in every(store.query_spans, None, name=LEDGER_SPAN)]
    else:
        if not rollouts or any((rollout.metadata or {}).get("asynchronous") for rollout in rollouts):
            rollouts += await _read_earlier(store, step, {rollout.rollout_id for rollout in rollouts})
            rollouts.sort(key=operator.attrgetter("start_time"))
        ids = [rollout.rollout_id for rollout in rollouts if rollout.mode == "train"]
        for start in range(0, len(ids), _IDS):
            spans += await store.query_spans(None, rollout_id_in=ids[start : start + _IDS], name=LEDGER_SPAN)
    entries = {entry.rollout_id: entry for entry in read_records(LedgerEntry, spans)}
    found = [entries.get(each.rollout_id) or _missing(each) for each in rollouts if each.mode == "train"]
    return [entry for entry in found if step in (None, entry.step)]


async def _read_earlier(store: LightningStore, step: int, known: Set[str]) -> list[Rollout]:
    """Reads the rollouts that an earlier step enqueued and ``step`` recorded, as asynchronous training does.

    No store has an index for the step of a record, so this searches the records made around the time of the step.
    """
    times = {each.step: each.time for each in await store.query_metrics()}
    after = max((time for of, time in times.items() if of < step), default=0.0) - _CLOCKS_S
    before = times.get(step, store.now()) + _CLOCKS_S
    spans = every(store.query_spans, None, name=LEDGER_SPAN, start_after=after, start_before=before)
    entries = read_records(LedgerEntry, [span async for span in spans])
    ids = sorted({entry.rollout_id for entry in entries if entry.step == step} - known)
    found: list[Rollout] = []
    for start in range(0, len(ids), _IDS):
        found += await store.query_rollouts(rollout_id_in=ids[start : start + _IDS])
    return found


def read_entry(spans: Iterable[Span]) -> LedgerEntry | None:
    """Reads the outcome of a rollout from its spans; if there are several, the outcome in the last step."""
    return max(read_records(LedgerEntry, spans), key=lambda entry: entry.step, default=None)


def count_outcomes(entries: Iterable[LedgerEntry]) -> dict[int, Counter[Outcome]]:
    """Counts the rollouts by step and outcome."""
    counts: dict[int, Counter[Outcome]] = {}
    for entry in entries:
        counts.setdefault(entry.step, Counter())[entry.outcome] += 1
    return dict(sorted(counts.items()))


def _missing(rollout: Rollout) -> LedgerEntry:
    """Returns the entry of a rollout without a record."""
    metadata = rollout.metadata or {}
    step = metadata.get("step")
    outcome: Outcome = "not_recorded" if rollout.status in ("succeeded", "failed") else "unfinished"
    outcome = "cancelled" if rollout.status == "cancelled" else outcome
    attempt_id = rollout.attempt.attempt_id if isinstance(rollout, AttemptedRollout) else ""
    group = str(metadata.get("group", rollout.rollout_id))
    return LedgerEntry(rollout.rollout_id, attempt_id, step if isinstance(step, int) else 0, group, outcome)
