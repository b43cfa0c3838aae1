"""Training records of a step: its rows, and the outcome of each of its rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.types import AttemptedRollout, Span
from agentlightning_algorithms.grpo.episode import Episode
from agentlightning_algorithms.grpo.experience import Experience
from agentlightning_algorithms.shared.policy.prepared_row import RowUse
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_plugins.shared.training_records.account import (
    RolloutOutcome,
    TokenTexts,
    call_keys,
    count_sampled,
    explain_unused,
    read_id,
    read_version,
)
from agentlightning_plugins.shared.training_records.record import LedgerEntry, Outcome, TrainedCall, TrainedRow
from agentlightning_plugins.shared.trajectories.trajectory import Decode, Turn


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
        episodes: all rollouts of the step, with the rewards to train with; each gets an entry of the ledger.
        uses: how the updater used each row; empty: not known.
        failed_reward: the reward of rollouts that have none.
        decode: the tokenizer's ``decode``; without it, the records have no text.
    """
    spans = []
    outcomes = dict(experience.left_out)
    texts = TokenTexts(decode)
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
                    TrainedCall(read_id(turn.triplet), turn.start, turn.end, value, read_version(turn.triplet))
                    for turn, value in kept
                ],
                reward=episode.reward_or(failed_reward),
                minibatch=0 if use is None else use.minibatch,
                outcome=outcome,
                texts=texts.read(row.prompt_ids, row.response_ids),
                token_advantages=_token_advantages(row, [turn for turn, _ in kept]),
                token_versions=_token_versions(row, [turn for turn, _ in kept]),
            )
            spans.append(record.to_span())
    for episode in episodes:
        if isinstance(episode.rollout, AttemptedRollout):
            spans.append(_account(episode, step, outcomes, failed_reward).to_span())
    return spans


def _account(episode: Episode, step: int, outcomes: dict[int, Outcome], failed_reward: float | None) -> LedgerEntry:
    assert isinstance(episode.rollout, AttemptedRollout)
    attempt = episode.rollout.attempt
    rollout = RolloutOutcome(
        attempt.rollout_id,
        attempt.attempt_id,
        episode.group,
        episode.reward_or(failed_reward),
        episode.error,
        has_failed=episode.rollout.status != "succeeded",
        tokens=count_sampled(episode.triplets),
    )
    calls = zip(call_keys(episode.triplets), episode.triplets, strict=True)
    return rollout.to_entry(step, {key: outcomes.get(id(call)) or explain_unused(call) for key, call in calls})


def _spread(logprobs: Sequence[float] | None, row: TrainingRow) -> list[float] | None:
    """Returns one value per response token, given one value per sampled token."""
    if logprobs is None or row.mask is None:
        return None if logprobs is None else list(logprobs)
    values = iter(logprobs)
    return [next(values) if kept else own for kept, own in zip(row.mask, row.logprobs, strict=True)]


def _token_advantages(row: TrainingRow, turns: Sequence[Turn]) -> Sequence[float] | None:
    """Returns the advantage of each response token, if the tokens of one call differ in it, as with a teacher."""
    own = row.advantage
    if not isinstance(own, Sequence) or all(len(set(own[turn.start : turn.end])) == 1 for turn in turns):
        return None
    return own


def _token_versions(row: TrainingRow, turns: Sequence[Turn]) -> list[int | None] | None:
    """Returns the version of the weights of each response token, if a call mixes versions."""
    if not any(turn.triplet.metadata.get("weight_versions") for turn in turns):
        return None
    versions: list[int | None] = [None] * len(row.response_ids)
    for turn in turns:
        own = turn.triplet.metadata.get("weight_versions") or [read_version(turn.triplet)] * (turn.end - turn.start)
        versions[turn.start : turn.end] = own
    return versions
