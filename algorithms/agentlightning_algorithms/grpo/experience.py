"""Turns finished rollouts into training rows with advantages.

R   rollouts of a batch
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from agentlightning.plugin.registry import get_manager
from agentlightning.types import Triplet
from agentlightning_algorithms.grpo.episode import Episode
from agentlightning_algorithms.grpo.settings import ExperienceSettings
from agentlightning_algorithms.shared.advantage import Scored, flat_groups, read_credit
from agentlightning_algorithms.shared.policy.training_row import Distribution, TrainingRow
from agentlightning_plugins.shared.training_records.record import Outcome
from agentlightning_plugins.shared.trajectories.trajectory import Decode, Turn, build_trajectories

_UNUSABLE = frozenset({"SpansDropped", "AdapterError"})
_COUNTS = (
    "calls", "calls_without_tokens", "calls_repeated", "calls_too_long", "calls_cut_off", "calls_stale",
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


@dataclass
class _Draft:
    """A row before its advantage is known."""

    index: int
    """Index of the row's rollout in the batch."""
    row: TrainingRow
    turns: Sequence[Turn]
    """Calls of the row; their positions are indices into ``row.response_ids``."""


def build_experience(
    episodes: Sequence[Episode],
    settings: ExperienceSettings,
    *,
    max_length: int,
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
        decode: the tokenizer's ``decode``; classifies why a call's tokens do not extend those of the previous call.
        oldest_version: calls sampled by weights older than this version are dropped.
        distribution: distribution that tokens should be drawn from; calls recorded with another one are counted. None:
            a row has the distribution of its calls.
    """
    scored_R = score_episodes(episodes, settings.failed_reward)
    counts: Counter[str] = Counter()
    drafts = [
        draft
        for index, (episode, _) in enumerate(scored_R)
        for draft in _draft_rows(index, episode, settings, decode, counts, distribution is None)
    ]
    if distribution is not None:
        found = [episode.distribution_of(call) for episode, _ in scored_R for call in episode.triplets]
        counts["calls_of_other_sampling"] = sum(drawn not in (None, distribution) for drawn in found)
    flat = find_flat_groups(scored_R)
    kept_groups = {episode.group for episode, _ in scored_R} - (set() if settings.keep_flat_groups else flat)
    drafts = [draft for draft in drafts if scored_R[draft.index][0].group in kept_groups]
    kept_R = [(episode, reward) for episode, reward in scored_R if episode.group in kept_groups]
    advantages = _find_advantages(kept_R, settings)
    experience = Experience()
    for episode, _ in scored_R:
        if episode.group not in kept_groups:
            experience.left_out.update((id(call), "flat_group") for call in episode.triplets)
    for draft in drafts:
        own = [advantages[id(turn.triplet)] for turn in draft.turns]
        kept = _keep_calls(draft, own, settings, max_length, oldest_version, counts, experience.left_out)
        if kept:
            experience.rows.append(_finish_row(draft, kept))
            experience.sources.append((scored_R[draft.index][0], tuple(kept)))
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
        **_describe_advantages(experience.rows),
    }
    return experience


def score_episodes(episodes: Sequence[Episode], failed_reward: float | None) -> list[tuple[Episode, float]]:
    """Returns the episodes that count in their groups, with their rewards."""
    return [
        (episode, float(reward))
        for episode in episodes
        if episode.error not in _UNUSABLE and (reward := episode.reward_or(failed_reward)) is not None
    ]


def find_flat_groups(scored_R: Sequence[tuple[Episode, float]]) -> frozenset[Hashable]:
    """Returns the groups in which there is nothing to compare."""
    return flat_groups([item for item, _ in _score_calls(scored_R)])


def _score_calls(scored_R: Sequence[tuple[Episode, float]]) -> list[tuple[Scored, Sequence[Triplet]]]:
    """Returns the items to compare, with the calls that get their advantages: whole rollouts, or calls with credit."""
    items: list[tuple[Scored, Sequence[Triplet]]] = []
    for index, (episode, reward) in enumerate(scored_R):
        calls = episode.triplets
        if any(map(_has_credit, calls)):
            for call in calls:
                value, turn = read_credit(call, episode.reward, reward)
                items.append((Scored(value, episode.group, index, turn, _count_tokens(call)), [call]))
        else:
            items.append((Scored(reward, episode.group, index, None, sum(map(_count_tokens, calls))), calls))
    # A rollout without calls has no turn that could be compared.
    by_turn = {item.group for item, _ in items if item.turn is not None}
    return [(item, calls) for item, calls in items if calls or item.group not in by_turn]


def _find_advantages(scored_R: Sequence[tuple[Episode, float]], settings: ExperienceSettings) -> dict[int, float]:
    """Returns the advantage of each call, by the ``id`` of its triplet."""
    items = _score_calls(scored_R)
    if not items:
        return {}
    estimate = get_manager().get("advantage", settings.estimator)
    advantages = estimate([item for item, _ in items], std_floor=settings.std_floor)
    return {id(call): value for value, (_, calls) in zip(advantages, items, strict=True) for call in calls}


def _count_tokens(call: Triplet) -> int:
    return len(call.response.get("token_ids") or ())


def _has_credit(triplet: Triplet) -> bool:
    """Whether a credit rule assigned ``Triplet.reward``; otherwise it is a reward emitted after that call."""
    return "credit" in triplet.metadata


def _draft_rows(
    index: int,
    episode: Episode,
    settings: ExperienceSettings,
    decode: Decode | None,
    counts: Counter[str],
    has_own_distributions: bool,
) -> Iterator[_Draft]:
    """Yields rows without advantages, and counts calls that drifted or cannot be used."""
    found = build_trajectories(episode.triplets, decode=decode)
    counts["calls"] += len(episode.triplets)
    counts["calls_repeated"] += (repeated := found.left_out.get("repeated", 0))
    counts["calls_without_tokens"] += sum(found.left_out.values()) - repeated
    counts.update({f"drift/{kind}": count for kind, count in found.counts.items()})
    rollout = episode.rollout.rollout_id
    for trajectory in found.trajectories:
        drawn = [episode.distribution_of(turn.triplet) if has_own_distributions else None for turn in trajectory.turns]
        if settings.rows == "transitions" or len(set(drawn)) > 1:  # a row has one distribution
            for (triplet, *_), own in zip(trajectory.turns, drawn, strict=True):
                row = _call_row(triplet, rollout, 0.0, own)
                yield _Draft(index, row, [Turn(triplet, 0, len(row.response_ids))])
        else:
            first = trajectory.prompt_length
            ids, logprobs = trajectory.ids, trajectory.logprobs[first:]
            mask = None if len(trajectory.turns) == 1 else trajectory.mask[first:]
            row = TrainingRow(
                ids[:first], ids[first:], logprobs, 0.0, mask=mask, rollout=rollout, distribution=drawn[0]
            )
            yield _Draft(index, row, [Turn(t.triplet, t.start - first, t.end - first) for t in trajectory.turns])


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


def _keep_calls(
    draft: _Draft,
    advantages: Sequence[float],
    settings: ExperienceSettings,
    max_length: int,
    oldest_version: int,
    counts: Counter[str],
    left_out: dict[int, Outcome],
) -> list[tuple[Turn, float]]:
    """Returns the calls of a row to train on, with their advantages; counts dropped calls and records the reasons."""
    kept = []
    for turn, advantage in zip(draft.turns, advantages, strict=True):
        version = turn.triplet.metadata.get("weight_version")
        reason: Outcome
        if len(draft.row.prompt_ids) + turn.end > max_length:
            reason = "too_long"
        elif isinstance(version, int) and version < oldest_version:
            reason = "stale"
        elif settings.drop_cut_off and turn.triplet.metadata.get("finish_reason") == "length":
            reason = "cut_off"
        else:
            kept.append((turn, advantage))
            continue
        counts[f"calls_{reason}"] += 1
        left_out[id(turn.triplet)] = reason
    return kept


def _finish_row(draft: _Draft, kept: Sequence[tuple[Turn, float]]) -> TrainingRow:
    """Cuts a row after its last kept call, masks the calls that are not kept, and sets advantages."""
    row, advantage = draft.row, kept[0][1]
    if len(draft.turns) == 1:
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


def _describe_advantages(rows: Sequence[TrainingRow]) -> dict[str, float]:
    """Returns statistics of the advantages over tokens, as the loss counts them."""
    values = [value for row in rows for value in row.advantages]
    if not values:
        return {}
    mean, std = statistics.fmean(values), statistics.pstdev(values)
    return {"advantage": mean, "advantage_std": std, "advantage_min": min(values), "advantage_max": max(values)}
