"""Training records of a step: its rows, and what became of each of its rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentlightning.types import AttemptedRollout, Span, Triplet
from agentlightning_algorithms.grpo.learning.episode import Episode
from agentlightning_algorithms.grpo.learning.experience import Experience
from agentlightning_algorithms.grpo.learning.prepared_row import RowUse
from agentlightning_algorithms.grpo.training_row import TrainingRow
from agentlightning_plugins.training_records.record import LedgerEntry, Outcome, TrainedCall, TrainedRow
from agentlightning_plugins.trajectories.trajectory import Decode

_UNUSABLE: dict[str, Outcome] = {"SpansDropped": "spans_dropped", "AdapterError": "unreadable_spans"}


def training_spans(
    experience: Experience,
    step: int,
    *,
    episodes: Sequence[Episode] = (),
    uses: Sequence[RowUse] = (),
    failed_reward: float | None = 0.0,
    decode: Decode | None = None,
) -> list[Span]:
    """Returns the spans that record a step, each in the trace of its rollout.

    Args:
        experience: the rows.
        step: the version of the weights that the step made.
        episodes: all rollouts of the step; each gets an entry of the ledger.
        uses: how the updater used each row; empty: not known.
        failed_reward: the reward of rollouts that have none.
        decode: the tokenizer's; without it, the records have no text.
    """
    spans = []
    outcomes = dict(experience.left_out)
    texts: dict[int, str] = {}
    known: Sequence[RowUse | None] = uses or [None] * len(experience.rows)
    for row, (episode, kept), use in zip(experience.rows, experience.sources, known, strict=True):
        outcome: Outcome = "trained" if use is None else use.outcome
        outcomes.update((id(turn.triplet), outcome) for turn, _ in kept)
        if isinstance(episode.rollout, AttemptedRollout):
            attempt = episode.rollout.attempt
            record = TrainedRow(
                rollout_id=attempt.rollout_id,
                attempt_id=attempt.attempt_id,
                step=step,
                prompt_ids=row.prompt_ids,
                response_ids=row.response_ids,
                mask=[1] * len(row.response_ids) if row.mask is None else [int(bool(kept)) for kept in row.mask],
                logprobs=row.logprobs,
                trainer_logprobs=None if use is None else _spread(use.logprobs, row),
                calls=[
                    TrainedCall(_response_id(turn.triplet), turn.start, turn.end, value, _weight_version(turn.triplet))
                    for turn, value in kept
                ],
                reward=episode.reward_or(failed_reward),
                minibatch=0 if use is None else use.minibatch,
                outcome=outcome,
                texts=_decode(row, texts, decode) if decode is not None else {},
            )
            spans.append(record.to_span())
    for episode in episodes:
        if isinstance(episode.rollout, AttemptedRollout):
            spans.append(_account(episode, step, outcomes, failed_reward).to_span())
    return spans


def _account(episode: Episode, step: int, outcomes: dict[int, Outcome], failed_reward: float | None) -> LedgerEntry:
    assert isinstance(episode.rollout, AttemptedRollout)
    attempt, reward = episode.rollout.attempt, episode.reward_or(failed_reward)
    has_failed = episode.rollout.status != "succeeded"
    whole: Outcome | None = _UNUSABLE.get(episode.error)
    if whole is None and reward is None:
        whole = "failed" if has_failed else "no_reward"
    if whole is None and not episode.triplets:
        whole = "failed" if has_failed else "no_calls"
    calls: dict[str, Outcome] = {}
    for place, call in enumerate(episode.triplets):
        calls[_response_id(call) or f"call {place}"] = whole or outcomes.get(id(call)) or _unusable_call(call)
    counts = Counter(calls.values())
    outcome = whole or ("trained" if counts["trained"] else counts.most_common(1)[0][0])
    return LedgerEntry(attempt.rollout_id, attempt.attempt_id, step, episode.group, outcome, reward, calls)


def _unusable_call(call: Triplet) -> Outcome:
    """Returns why a call became part of no trajectory."""
    if not call.prompt.get("token_ids") or not call.response.get("token_ids"):
        return "no_tokens"
    return "repeated" if call.response.get("logprobs") else "no_logprobs"


def _decode(row: TrainingRow, known: dict[int, str], decode: Decode) -> dict[int, str]:
    """Returns the text of each token of a row."""
    tokens = {*row.prompt_ids, *row.response_ids}
    known.update((token, decode([token])) for token in tokens - known.keys())
    return {token: known[token] for token in tokens}


def _spread(logprobs: Sequence[float] | None, row: TrainingRow) -> list[float] | None:
    """Returns one value per response token, from one per sampled token."""
    if logprobs is None or row.mask is None:
        return None if logprobs is None else list(logprobs)
    values = iter(logprobs)
    return [next(values) if kept else own for kept, own in zip(row.mask, row.logprobs, strict=True)]


def _response_id(call: Triplet) -> str:
    return str(call.metadata.get("response_id") or "")


def _weight_version(call: Triplet) -> int | None:
    version = call.metadata.get("weight_version")
    return version if isinstance(version, int) else None
