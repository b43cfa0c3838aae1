"""Training records of verl's batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentlightning_algorithms.verl.batch_row import RowCall
from agentlightning_plugins.shared.training_records.record import (
    LEDGER_SPAN,
    LedgerEntry,
    RolloutOutcome,
    TokenTexts,
    TrainedRow,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl's imports


def row(name: str, group: str, reward: float, advantages: list[float], mask: list[int]) -> object:
    from agentlightning_algorithms.verl.record import RecordedRow

    return RecordedRow(
        RolloutOutcome(name, f"at-{name}", group, reward),
        {"late": "too_long"},
        [RowCall("first", 0, 2, 4), RowCall("second", 3, 4, 4)],
        prompt_ids=[1, 2],
        response_ids=[3, 4, 5, 6],
        mask=mask,
        logprobs=[-0.5] * 4,
        trainer_logprobs=[-0.25] * 4,
        advantages=advantages,
    )


def record(*rows: object, **options: bool) -> tuple[list[TrainedRow], dict[str, LedgerEntry]]:
    from agentlightning_algorithms.verl.record import make_spans

    spans, outcomes = make_spans(rows, 5, TokenTexts(lambda ids: f"<{ids[0]}>"), **options)
    entries = [LedgerEntry.from_span(span) for span in spans if span.name == LEDGER_SPAN]
    assert sum(outcomes.values()) == len(entries)
    kept = [TrainedRow.from_span(span) for span in spans if span.name != LEDGER_SPAN]
    return kept, {entry.rollout_id: entry for entry in entries}


def test_flat_groups_are_recorded_as_trained_only_if_the_loss_has_other_terms() -> None:
    flat: list[Any] = [row(name, "flat", 1.0, [0.0] * 4, [1, 1, 0, 1]) for name in "ab"]
    rows, entries = record(*flat, replace(flat[0], rollout=RolloutOutcome("c", "", "flat", None, "model_error")))
    assert (rows, {entry.outcome for entry in entries.values()}) == ([], {"flat_group"})
    rows, entries = record(*flat, trains_flat_groups=True)
    assert (len(rows), {entry.outcome for entry in entries.values()}) == (2, {"trained"})


def test_drift_counts_the_updates_since_the_calls_of_the_batch_were_sampled() -> None:
    from agentlightning_algorithms.verl.record import mean_drift

    rows: list[Any] = [row(name, "g", 1.0, [1.0] * 4, [1] * 4) for name in "ab"]
    assert mean_drift(rows, 4) == 0.0
    rows[1].calls[1] = RowCall("second", 3, 4, 2)
    assert mean_drift(rows, 4) == 0.5
    assert mean_drift([], 4) == 0.0


def test_a_rejected_call_is_recorded_as_a_mismatch_and_other_calls_of_its_row_as_trained() -> None:
    rows, entries = record(
        row("a", "g", 1.0, [1.0, 1.0, 0.0, 0.0], [1, 1, 0, 0]), row("b", "g", 0.0, [-1.0] * 2 + [0.0] * 2, [0] * 4)
    )
    assert entries["a"].calls == {"late": "too_long", "first": "trained", "second": "mismatch"}
    assert [entries[name].outcome for name in "ab"] == ["trained", "mismatch"]
    assert [each.outcome for each in rows] == ["trained", "mismatch"]
    assert (rows[0].texts[3], rows[0].calls[0].weight_version) == ("<3>", 4)


def test_advantages_that_differ_within_a_call_are_recorded_for_each_token() -> None:
    rows, _ = record(
        row("a", "g", 1.0, [1.0, 0.5, 0.0, 0.25], [1, 1, 0, 1]), row("b", "g", 0.0, [0.5] * 4, [1, 1, 0, 1])
    )
    assert rows[0].advantages == [1.0, 0.5, 0.0, 0.25]
    assert rows[0].calls[0].advantage == 0.75
    assert rows[1].advantages == [0.5, 0.5, 0.0, 0.5]
    assert rows[1].token_advantages is None
