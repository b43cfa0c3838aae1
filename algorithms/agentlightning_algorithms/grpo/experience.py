"""Turns finished rollouts into training rows with advantages, and records the use of both.

R   rollouts of a batch
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from agentlightning.errors import ConfigError
from agentlightning.types import AttemptedRollout, Span, Triplet
from agentlightning_algorithms.grpo.episode import Episode, fill_rewards
from agentlightning_algorithms.grpo.settings import ExperienceSettings
from agentlightning_algorithms.shared.advantage import Scored, flat_groups, read_credit
from agentlightning_algorithms.shared.policy.prepared_row import RowUse
from agentlightning_algorithms.shared.policy.settings import load_part
from agentlightning_algorithms.shared.policy.training_row import Distribution, TrainingRow
from agentlightning_plugins.shared.training_records.record import (
    LedgerEntry,
    Outcome,
    RolloutOutcome,
    TokenTexts,
    TrainedCall,
    TrainedRow,
    call_keys,
    count_sampled,
    explain_unused,
    read_id,
    read_version,
)
from agentlightning_plugins.shared.trajectories import Decode, Turn, build_trajectories

_COUNTS = (
    "calls", "calls_without_tokens", "calls_repeated", "calls_side", "calls_given_up", "calls_too_long",
    "calls_cut_off", "calls_stale",
    "calls_of_other_sampling",
    "drift/template", "drift/retokenisation", "drift/other",
)  # fmt: skip


@dataclass
class Experience:
    """The rows of one step, the rollout and the calls that each row came from, and metrics."""

    rows: list[TrainingRow] = field(default_factory=list)
    sources: list[tuple[Episode, tuple[tuple[Turn, float], ...]]] = field(default_factory=list)
    """Rollout of each row, and its calls with their advantages; call positions are indices into ``response_ids``."""
    left_out: dict[int, Outcome] = field(default_factory=dict)
    """Reasons why calls are in no row, by the ``id`` of the triplet."""
    metrics: dict[str, float] = field(default_factory=dict)


def build_experience(
    episodes: Sequence[Episode],
    settings: ExperienceSettings,
    *,
    max_length: int,
    vocabulary: int | None = None,
    decode: Decode | None = None,
    oldest_version: int = 0,
    distribution: Distribution | None = None,
) -> Experience:
    """Returns the training rows of a batch, in which every model call has its advantage.

    A call has the advantage of its rollout or, if the adapter has a credit rule, its own; see
    :mod:`~agentlightning_algorithms.shared.advantage`. Calls that are too long or cut off are still compared: they are
    dropped after the advantages are computed.

    Args:
        episodes: finished rollouts.
        settings: which calls become rows.
        max_length: maximum tokens of a row, prompt and response.
        vocabulary: number of token ids of the model; None: not known.
        decode: the tokenizer's ``decode``; classifies why a call's tokens do not extend the previous call's.
        oldest_version: calls sampled by weights older than this version are dropped.
        distribution: distribution that tokens should be drawn from; calls recorded with another one are counted. None:
            a row has the distribution of its calls.
    """
    scored_R = score_episodes(episodes, settings.failed_reward)
    counts: Counter[str] = Counter()
    if distribution is not None:
        found = [episode.distribution_of(call) for episode, _ in scored_R for call in episode.triplets]
        counts["calls_of_other_sampling"] = sum(drawn not in (None, distribution) for drawn in found)
    flat = find_flat_groups(scored_R)
    left_out_groups = frozenset[Hashable]() if settings.keep_flat_groups else flat
    advantages = _find_advantages([each for each in scored_R if each[0].group not in left_out_groups], settings)
    experience = Experience()
    for episode, _ in scored_R:
        rows = list(_call_rows(episode, settings, decode, counts, has_own_distributions=distribution is None))
        if episode.group in left_out_groups:
            experience.left_out.update((id(call), "flat_group") for call in episode.triplets)
            continue
        for row, turns in rows:
            kept = []
            for turn in turns:
                reason = _find_reason(row, turn, settings, max_length, vocabulary, oldest_version)
                if reason is None:
                    kept.append((turn, advantages[id(turn.triplet)]))
                else:
                    counts[f"calls_{reason}"] += 1
                    experience.left_out[id(turn.triplet)] = reason
            if kept:
                experience.rows.append(_finish_row(row, turns, kept))
                experience.sources.append((episode, tuple(kept)))
    rewards: dict[str, list[float]] = {}
    for episode, reward in scored_R:
        rewards.setdefault(episode.group, []).append(reward)
    spreads = [statistics.pstdev(values) for values in rewards.values()]
    experience.metrics = {
        "groups_without_spread": len(flat) / len(spreads) if spreads else 0.0,
        "group_reward_std": statistics.fmean(spreads) if spreads else 0.0,
        "groups": float(len(spreads)),
        "rollouts_left_out": float(len(episodes) - len(scored_R)),
        "rollouts_filled": float(sum(episode.reward is None for episode, _ in scored_R)),
        **{name: float(counts[name]) for name in _COUNTS},
        **describe_advantages(experience.rows),
    }
    if failed := [
        value
        for episode, _ in scored_R
        if episode.reward is None or episode.rollout.status != "succeeded"
        for call in episode.triplets
        if (value := advantages.get(id(call))) is not None
    ]:
        experience.metrics["advantage_failed"] = statistics.fmean(failed)
    return experience


def score_episodes(episodes: Sequence[Episode], failed_reward: float | None) -> list[tuple[Episode, float]]:
    """Returns the episodes that count in their groups, with their rewards, also those whose spans cannot be used."""
    filled = zip(episodes, fill_rewards(episodes, failed_reward), strict=True)
    return [(episode, float(reward)) for episode, reward in filled if reward is not None]


def find_flat_groups(scored_R: Sequence[tuple[Episode, float]]) -> frozenset[Hashable]:
    """Returns the groups in which there is nothing to compare."""
    return flat_groups([item for item, _ in _score_calls(scored_R)])


def _score_calls(scored_R: Sequence[tuple[Episode, float]]) -> list[tuple[Scored, Sequence[Triplet]]]:
    """Returns the items to compare, with the calls that get their advantages: whole rollouts, or calls with credit."""
    items: list[tuple[Scored, Sequence[Triplet]]] = []
    for index, (episode, reward) in enumerate(scored_R):
        calls = episode.triplets
        if any("credit" in call.metadata for call in calls):  # otherwise their rewards were emitted after them
            for call in calls:
                value, turn = read_credit(call, episode.reward, reward)
                item = Scored(value, episode.group, index, turn, _count_tokens(call), episode.rewards)
                items.append((item, [call]))
        else:
            tokens = sum(map(_count_tokens, calls))
            items.append((Scored(reward, episode.group, index, None, tokens, episode.rewards), calls))
    # A rollout without calls has no turn that could be compared.
    by_turn = {item.group for item, _ in items if item.turn is not None}
    return [(item, calls) for item, calls in items if calls or item.group not in by_turn]


def _find_advantages(scored_R: Sequence[tuple[Episode, float]], settings: ExperienceSettings) -> dict[int, float]:
    """Returns the advantage of each call, by the ``id`` of its triplet."""
    items = _score_calls(scored_R)
    if not items:
        return {}
    advantages = estimate_advantages([item for item, _ in items], settings)
    return {id(call): value for value, (_, calls) in zip(advantages, items, strict=True) for call in calls}


def estimate_advantages(items: Sequence[Scored], settings: ExperienceSettings) -> Sequence[float]:
    """Returns the advantage of each item; raises ConfigError, which names the estimator, if it fails."""
    found: Sequence[float] = load_part("advantage", settings.estimator)(items, std_floor=settings.std_floor)
    if len(found) != len(items) or not all(map(math.isfinite, found)):
        raise ConfigError(
            f"the advantage {settings.estimator!r} returned {list(found)[:8]} for {len(items)} items; one finite "
            "number for each is needed"
        )
    return found


def _count_tokens(call: Triplet) -> int:
    return len(call.response.get("token_ids") or ())


def _call_rows(
    episode: Episode,
    settings: ExperienceSettings,
    decode: Decode | None,
    counts: Counter[str],
    *,
    has_own_distributions: bool,
) -> Iterator[tuple[TrainingRow, list[Turn]]]:
    """Yields rows without advantages, each with its calls; counts calls that drifted or are unusable."""
    found = build_trajectories(episode.triplets, decode=decode)
    counts["calls"] += len(episode.triplets)
    counts["calls_repeated"] += found.left_out.get("repeated", 0)
    counts["calls_side"] += found.left_out.get("side_call", 0)
    counts["calls_given_up"] += found.left_out.get("given_up", 0)
    counts["calls_without_tokens"] += sum(found.left_out.get(reason, 0) for reason in ("no_tokens", "no_logprobs"))
    counts.update({f"drift/{kind}": count for kind, count in found.counts.items()})
    rollout = episode.rollout.rollout_id
    for trajectory in found.trajectories:
        drawn = [episode.distribution_of(turn.triplet) if has_own_distributions else None for turn in trajectory.turns]
        if settings.rows == "transitions" or len(set(drawn)) > 1:  # a row has one distribution
            for (triplet, *_), own in zip(trajectory.turns, drawn, strict=True):
                row = _call_row(triplet, rollout, 0.0, own)
                yield row, [Turn(triplet, 0, len(row.response_ids))]
        else:
            first = trajectory.prompt_length
            ids, logprobs = trajectory.ids, trajectory.logprobs[first:]
            mask = None if len(trajectory.turns) == 1 else trajectory.mask[first:]
            row = TrainingRow(
                ids[:first], ids[first:], logprobs, 0.0, mask=mask, rollout=rollout, distribution=drawn[0]
            )
            yield row, [Turn(t.triplet, t.start - first, t.end - first) for t in trajectory.turns]


def transition_rows(episode: Episode, advantage: float, forced: Distribution | None) -> Iterator[TrainingRow]:
    """Yields a row with this advantage for each model call that can be trained on.

    ``forced`` is the distribution of all calls; None: each row has the distribution of its call.
    """
    for trajectory in build_trajectories(episode.triplets).trajectories:
        for triplet, *_ in trajectory.turns:
            drawn = episode.distribution_of(triplet) if forced is None else None
            yield _call_row(triplet, episode.rollout.rollout_id, advantage, drawn)


def _call_row(call: Triplet, rollout: str, advantage: float, drawn: Distribution | None) -> TrainingRow:
    prompt_ids, response = call.prompt["token_ids"], call.response
    logprobs = response["logprobs"]
    return TrainingRow(prompt_ids, response["token_ids"], logprobs, advantage, rollout=rollout, distribution=drawn)


def _find_reason(
    row: TrainingRow,
    turn: Turn,
    settings: ExperienceSettings,
    max_length: int,
    vocabulary: int | None,
    oldest_version: int,
) -> Literal["too_long", "unreadable_spans", "stale", "cut_off"] | None:
    """Returns why a call is not trained on; None if it is."""
    version = turn.triplet.metadata.get("weight_version")
    if len(row.prompt_ids) + turn.end > max_length:
        return "too_long"
    if vocabulary is not None and max(*row.prompt_ids, *row.response_ids[: turn.end]) >= vocabulary:
        return "unreadable_spans"
    if isinstance(version, int) and version < oldest_version:
        return "stale"
    if settings.drop_cut_off and turn.triplet.metadata.get("finish_reason") == "length":
        return "cut_off"
    return None


def _finish_row(row: TrainingRow, turns: Sequence[Turn], kept: Sequence[tuple[Turn, float]]) -> TrainingRow:
    """Cuts a row after its last kept call, masks the calls that are not kept, and sets advantages."""
    advantage = kept[0][1]
    if len(turns) == 1:
        return replace(row, advantage=advantage)
    end = kept[-1][0].end
    mask = [0] * end
    by_token = [0.0] * end
    for turn, value in kept:
        mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
        by_token[turn.start : turn.end] = [value] * (turn.end - turn.start)
    return replace(
        row,
        response_ids=row.response_ids[:end],
        logprobs=row.logprobs[:end],
        mask=mask,
        advantage=advantage if len({value for _, value in kept}) == 1 else by_token,
    )


def describe_advantages(rows: Sequence[TrainingRow]) -> dict[str, float]:
    """Returns statistics of the advantages over tokens, as the loss counts them."""
    values = [value for row in rows for value in row.advantages]
    if not values:
        return {}
    mean, std = statistics.fmean(values), statistics.pstdev(values)
    return {"advantage": mean, "advantage_std": std, "advantage_min": min(values), "advantage_max": max(values)}


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
    rewards = {each.rollout.rollout_id: reward for each, reward in score_episodes(episodes, failed_reward)}
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
                reward=rewards.get(episode.rollout.rollout_id, episode.reward),
                minibatch=0 if use is None else use.minibatch,
                outcome=outcome,
                texts=texts.read(row.prompt_ids, row.response_ids),
                token_advantages=_token_advantages(row, [turn for turn, _ in kept]),
                token_versions=_token_versions(row, [turn for turn, _ in kept]),
            )
            spans.append(record.to_span())
    for episode in episodes:
        if isinstance(episode.rollout, AttemptedRollout):
            reward = rewards.get(episode.rollout.rollout_id, episode.reward)
            spans.append(_account(episode, step, outcomes, reward).to_span())
    return spans


def _account(episode: Episode, step: int, outcomes: dict[int, Outcome], reward: float | None) -> LedgerEntry:
    assert isinstance(episode.rollout, AttemptedRollout)
    attempt = episode.rollout.attempt
    rollout = RolloutOutcome(
        attempt.rollout_id,
        attempt.attempt_id,
        episode.group,
        reward,
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
