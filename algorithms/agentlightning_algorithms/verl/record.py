"""Training records of a batch: its rows, and the outcome of each of its rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import transfer_queue

from agentlightning.types import Span
from agentlightning_algorithms.verl.batch_row import RowCall
from agentlightning_plugins.shared.training_records.record import (
    Outcome,
    RolloutOutcome,
    TokenTexts,
    TrainedCall,
    TrainedRow,
)

_FIELDS: Final = ("prompts", "responses", "response_mask", "rollout_log_probs", "advantages")


@dataclass
class RecordedRow:
    """One row of verl's batch after an update; the lists have one value per token of the response."""

    rollout: RolloutOutcome
    left_out: dict[str, Outcome]
    """Reasons why calls of the rollout are in no row, by the name of the call."""
    calls: list[RowCall]
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 on the sampled tokens that the correction for rollouts did not reject."""
    logprobs: list[float] = field(default_factory=list)
    trainer_logprobs: list[float] | None = None
    advantages: list[float] = field(default_factory=list)


def read_rows(batch: Any, *, is_skipped: bool, has_trainer: bool) -> list[RecordedRow]:
    """Reads the rows of a batch from verl's queue, without padding; ``old_log_probs`` are the trainer's if it has some.

    A batch that was skipped has neither advantages nor the trainer's log-probabilities.
    """
    fields = () if is_skipped else (*_FIELDS, *(("old_log_probs",) if has_trainer else ()))
    read = transfer_queue.kv_batch_get(batch.keys, batch.partition_id, ["extra_fields", *fields])
    extra = read.pop("extra_fields").tolist()
    found = []
    for place, tag in enumerate(batch.tags):
        if tag.get("is_padding", False) or not extra[place].get("record"):
            continue
        record = extra[place]["record"]
        row = RecordedRow(
            RolloutOutcome(**record["rollout"]), record["left_out"], [RowCall(*call) for call in extra[place]["calls"]]
        )
        if fields:
            lists = {name: read[name][place].tolist() for name in fields}
            row.prompt_ids, row.response_ids = lists["prompts"], lists["responses"]
            row.mask, row.advantages = [int(kept) for kept in lists["response_mask"]], lists["advantages"]
            row.logprobs, row.trainer_logprobs = lists["rollout_log_probs"], lists.get("old_log_probs")
        found.append(row)
    return found


def mean_drift(rows: Iterable[RecordedRow], current: int) -> float:
    """Returns the mean number of updates between the weights that sampled a batch and the weights that it updates."""
    return _mean(current - call.weight_version for row in rows for call in row.calls if call.weight_version is not None)


def make_spans(
    rows: Sequence[RecordedRow], step: int, texts: TokenTexts, *, trains_flat_groups: bool = False
) -> tuple[list[Span], Counter[Outcome]]:
    """Returns the records of a batch, each in the trace of its rollout, and the number of rollouts with each outcome.

    Args:
        rows: the rows of the batch, at least one for each rollout.
        step: the version of the weights that the update made.
        texts: the texts of tokens.
        trains_flat_groups: the loss has terms without advantages, so rows of advantage 0 are trained on too.
    """
    rewards: dict[str, set[float | None]] = {}
    for row in rows:
        rewards.setdefault(row.rollout.group, set()).update({row.rollout.reward} - {None})
    spans: list[Span] = []
    calls: dict[str, dict[str, Outcome]] = {}
    rollouts: dict[str, RolloutOutcome] = {}
    for row in rows:
        rollouts[row.rollout.rollout_id] = row.rollout
        outcomes = calls.setdefault(row.rollout.rollout_id, dict(row.left_out))
        is_flat = not trains_flat_groups and len(rewards[row.rollout.group]) == 1 and not any(row.advantages)
        used: Outcome = "flat_group" if is_flat else "trained"
        for call in row.calls:
            is_kept = any(row.mask[call.start : call.end])
            outcomes[call.name] = used if is_kept else "mismatch"
        trained = [call for call in row.calls if outcomes[call.name] in ("trained", "mismatch")]
        if trained and row.rollout.attempt_id:
            spans.append(_to_row(row, trained, step, outcomes, texts).to_span())
    entries = [rollout.to_entry(step, calls[name]) for name, rollout in rollouts.items() if rollout.attempt_id]
    spans += [entry.to_span() for entry in entries]
    return spans, Counter(entry.outcome for entry in entries)


def _to_row(
    row: RecordedRow, calls: Sequence[RowCall], step: int, outcomes: dict[str, Outcome], texts: TokenTexts
) -> TrainedRow:
    has_own = any(len(set(_kept(row, call))) > 1 for call in calls)
    return TrainedRow(
        rollout_id=row.rollout.rollout_id,
        attempt_id=row.rollout.attempt_id,
        step=step,
        prompt_ids=row.prompt_ids,
        response_ids=row.response_ids,
        mask=row.mask,
        logprobs=row.logprobs,
        trainer_logprobs=row.trainer_logprobs,
        calls=[
            TrainedCall(call.name, call.start, call.end, _mean(_kept(row, call)), call.weight_version) for call in calls
        ],
        reward=row.rollout.reward,
        outcome="trained" if any(outcomes[call.name] == "trained" for call in calls) else "mismatch",
        texts=texts.read(row.prompt_ids, row.response_ids),
        token_advantages=row.advantages if has_own else None,
    )


def _kept(row: RecordedRow, call: RowCall) -> list[float]:
    """Returns the advantages of the tokens of a call that were trained on."""
    values = zip(row.advantages[call.start : call.end], row.mask[call.start : call.end], strict=True)
    return [value for value, kept in values if kept]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
