"""From finished rollouts to rows with advantages: what one step learns from, and what it leaves out and why.

R   rollouts of a batch
"""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from agentlightning import semconv
from agentlightning.types import AttemptedRollout, Span, Triplet
from agentlightning_algorithms.grpo.learning.advantage import Estimator, group_scales, zero_spread_groups
from agentlightning_algorithms.grpo.learning.episode import Episode
from agentlightning_algorithms.grpo.learning.row import Row
from agentlightning_plugins.trajectories.trajectory import Decode, Turn, build_trajectories

RowKind = Literal["transitions", "trajectories"]
Penalty = Callable[[Sequence[Row]], Sequence[Sequence[float]]]

TRAINING_SPAN = "agentlightning.training"
"""Name of the span that tells what a row was trained with, in the rollout's own trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What of the rollouts becomes training data, and as what.

    Attributes:
        rows: ``transitions``: a row for each model call. ``trajectories``: calls whose tokens go on from each other
            are one row, which costs one forward pass where they would cost several.
        estimator: the formula of the advantages.
        failed_reward: what a rollout without a reward counts as; None leaves it out, also of its group's mean.
        keep_flat_groups: keep the groups whose rollouts all earned the same.
        drop_cut_off: leave out answers that ended at ``max_tokens`` (overlong filtering, DAPO, arXiv:2503.14476).
    """

    rows: RowKind = "transitions"
    estimator: Estimator = "grpo"
    failed_reward: float | None = 0.0
    keep_flat_groups: bool = False
    drop_cut_off: bool = False


@dataclass
class Experience:
    """The rows of one step, the rollout and the calls each came from, and the numbers to report."""

    rows: list[Row] = field(default_factory=list)
    sources: list[tuple[Episode, tuple[Triplet, ...]]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class _Draft(NamedTuple):
    """A row before its advantage is known; ``turns`` place its calls in ``row.response_ids``."""

    position: int
    row: Row
    turns: Sequence[Turn]


def build_experience(
    episodes: Sequence[Episode],
    selection: Selection = Selection(),
    *,
    max_length: int,
    decode: Decode | None = None,
    penalty: Penalty | None = None,
    oldest_version: int = 0,
) -> Experience:
    """Gives every model call of a batch the advantage of its rollout within the rollout's group.

    Where the adapter has a credit rule, each call has a reward of its own (``Triplet.reward``). A rollout then counts
    with the mean of its calls' rewards, and each call gets its own advantage on the scale of its rollout's group.
    What is left out of the rows (too long, cut off) still counts in its group: it is left out after the advantages.

    Args:
        episodes: finished rollouts.
        selection: what becomes a row.
        max_length: tokens, prompt and response, that the trainer takes.
        decode: the tokenizer's, to tell apart why the tokens of calls do not go on from each other.
        penalty: says for every response token of rows what to take from the reward of its rollout (KL in the reward).
        oldest_version: calls answered by older weights are left out.
    """
    scored_R = [
        (episode, selection.failed_reward if episode.reward is None else _mean_credit(episode))
        for episode in episodes
        if (episode.reward is not None or selection.failed_reward is not None) and episode.error not in _UNUSABLE
    ]
    rewards_R = [float(reward) for _, reward in scored_R if reward is not None]
    groups_R = [episode.group for episode, _ in scored_R]
    flat = zero_spread_groups(rewards_R, groups_R)
    counts: Counter[str] = Counter()
    drafts = [
        draft
        for position, (episode, _) in enumerate(scored_R)
        for draft in _draft_rows(position, episode, selection, decode, counts)
    ]
    if not selection.keep_flat_groups:
        useful = [draft for draft in drafts if groups_R[draft.position] not in flat]
    else:
        useful = drafts
    penalties = _find_penalties(useful, max_length, penalty)
    taken_R = [0.0] * len(scored_R)
    for draft in useful:
        taken_R[draft.position] += math.fsum(penalties.get(id(draft), ()))
    for position, (episode, _) in enumerate(scored_R):
        if any(map(_has_credit, episode.triplets)):  # it counts with the mean over its calls
            taken_R[position] /= len(episode.triplets)
    tokens_R = Counter(dict.fromkeys(range(len(scored_R)), 0))
    for draft in drafts:
        tokens_R[draft.position] += draft.row.n_sampled
    penalised_R = [reward - taken for reward, taken in zip(rewards_R, taken_R, strict=True)]
    scales_R = group_scales(
        penalised_R, groups_R, selection.estimator, tokens_R=[tokens_R[i] for i in range(len(scored_R))]
    )
    experience = Experience()
    for draft in useful:
        mean, factor = scales_R[draft.position]
        worths = [
            turn.triplet.reward - math.fsum(penalties.get(id(draft), ())[turn.start : turn.end])
            if _has_credit(turn.triplet) and turn.triplet.reward is not None
            else penalised_R[draft.position]
            for turn in draft.turns
        ]
        advantages = [(worth - mean) * factor for worth in worths]
        row = _finish(draft, advantages, selection, max_length, oldest_version, counts)
        if row is not None:
            experience.rows.append(row[0])
            experience.sources.append((scored_R[draft.position][0], row[1]))
    experience.metrics = {
        "groups_without_spread": len(flat) / len(set(groups_R)) if groups_R else 0.0,
        "group_reward_std": _mean_spread(rewards_R, groups_R),
        "groups": float(len(set(groups_R))),
        "rollouts_left_out": float(len(episodes) - len(scored_R)),
        "rollouts_filled": float(sum(episode.reward is None for episode, _ in scored_R)),
        **{name: float(counts[name]) for name in _COUNTS},
        **_describe_advantages(experience.rows),
    }
    if penalty is not None:
        experience.metrics["reward_penalty"] = statistics.fmean(taken_R) if taken_R else 0.0
    return experience


_UNUSABLE = frozenset({"SpansDropped", "AdapterError"})
_COUNTS = (
    "calls", "calls_without_tokens", "calls_too_long", "calls_cut_off", "calls_stale",
    "drift/template", "drift/retokenisation", "drift/other",
)  # fmt: skip


def _draft_rows(
    position: int, episode: Episode, selection: Selection, decode: Decode | None, counts: Counter[str]
) -> Iterator[_Draft]:
    """Makes rows without advantages, and counts what drifted or cannot be used."""
    found = build_trajectories(episode.triplets, decode=decode)
    counts["calls"] += len(episode.triplets)
    counts["calls_without_tokens"] += sum(found.left_out.values())
    for kind, count in found.counts.items():
        counts[f"drift/{kind}"] += count
    rollout = episode.rollout.rollout_id
    for trajectory in found.trajectories:
        if selection.rows == "transitions":
            for turn in trajectory.turns:
                response = turn.triplet.response["token_ids"]
                row = Row(
                    turn.triplet.prompt["token_ids"], response, turn.triplet.response["logprobs"], 0.0, rollout=rollout
                )
                yield _Draft(position, row, [Turn(turn.triplet, 0, len(response))])
        else:
            first = trajectory.prompt_length
            row = Row(
                trajectory.ids[:first],
                trajectory.ids[first:],
                trajectory.logprobs[first:],
                0.0,
                mask=None if len(trajectory.turns) == 1 else trajectory.mask[first:],
                rollout=rollout,
            )
            yield _Draft(
                position, row, [Turn(turn.triplet, turn.start - first, turn.end - first) for turn in trajectory.turns]
            )


def _find_penalties(
    drafts: Sequence[_Draft], max_length: int, penalty: Penalty | None
) -> Mapping[int, Sequence[float]]:
    """What is taken for each response token, by draft; too long rows cannot be asked about."""
    if penalty is None:
        return {}
    asked = [d for d in drafts if len(d.row.prompt_ids) + len(d.row.response_ids) <= max_length]
    return {id(draft): values for draft, values in zip(asked, penalty([d.row for d in asked]), strict=True)}


def _finish(
    draft: _Draft,
    advantages: Sequence[float],
    selection: Selection,
    max_length: int,
    oldest_version: int,
    counts: Counter[str],
) -> tuple[Row, tuple[Triplet, ...]] | None:
    """Cuts a row to the calls that fit and count; None when there are none. Beside it the calls it trains on."""
    row = draft.row
    fitting = [turn for turn in draft.turns if len(row.prompt_ids) + turn.end <= max_length]
    counts["calls_too_long"] += len(draft.turns) - len(fitting)
    kept = []
    for turn, advantage in zip(fitting, advantages, strict=False):
        version = turn.triplet.metadata.get("weight_version")
        if isinstance(version, int) and version < oldest_version:
            counts["calls_stale"] += 1
        elif selection.drop_cut_off and turn.triplet.metadata.get("finish_reason") == "length":
            counts["calls_cut_off"] += 1
        else:
            kept.append((turn, advantage))
    if not kept:
        return None
    end = kept[-1][0].end
    triplets = tuple(turn.triplet for turn, _ in kept)
    if len(draft.turns) == 1:
        return replace(row, advantage=kept[0][1]), triplets
    mask = [0] * end
    by_token = [0.0] * end
    for turn, advantage in kept:
        mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
        by_token[turn.start : turn.end] = [advantage] * (turn.end - turn.start)
    same = len({advantage for _, advantage in kept}) == 1
    cut = replace(
        row,
        response_ids=row.response_ids[:end],
        logprobs=row.logprobs[:end],
        mask=mask,
        advantage=kept[0][1] if same else by_token,
    )
    return cut, triplets


def _mean_credit(episode: Episode) -> float | None:
    """What a rollout counts as: the mean of its calls where a credit rule says what they are worth, else its reward."""
    worth = [t.reward for t in episode.triplets if _has_credit(t) and t.reward is not None]
    return statistics.fmean(worth) if worth else episode.reward


def _has_credit(triplet: Triplet) -> bool:
    """Whether ``Triplet.reward`` is a credit rule's; else it is whatever was emitted after this very call."""
    return "credit" in triplet.metadata


def _mean_spread(rewards_R: Sequence[float], groups_R: Sequence[str]) -> float:
    members: dict[str, list[float]] = {}
    for reward, group in zip(rewards_R, groups_R, strict=True):
        members.setdefault(group, []).append(reward)
    return statistics.fmean(map(statistics.pstdev, members.values())) if members else 0.0


def _describe_advantages(rows: Sequence[Row]) -> dict[str, float]:
    """By token, as the loss sees them."""
    values = [value for row in rows for value in row.advantages]
    if not values:
        return {}
    return {
        "advantage": statistics.fmean(values),
        "advantage_std": statistics.pstdev(values),
        "advantage_min": min(values),
        "advantage_max": max(values),
    }


def training_spans(experience: Experience, step: int) -> list[Span]:
    """Says, in the trace of each rollout, what its rows were trained with.

    ``mask`` is written as the lengths of runs: so many tokens sampled, so many given, and so on.
    """
    spans = []
    for row, (episode, triplets) in zip(experience.rows, experience.sources, strict=True):
        rollout = episode.rollout
        if isinstance(rollout, AttemptedRollout):
            ids = [triplet.metadata.get("response_id") or "" for triplet in triplets]
            attributes: Mapping[str, Any] = {
                semconv.GEN_AI_OPERATION_NAME: "train",  # it has a response's id and is no call of a model
                "agentlightning.training.step": step,
                "agentlightning.training.advantage": statistics.fmean(row.advantages),
                "agentlightning.training.tokens": row.n_sampled,
                "gen_ai.response.id": ids[-1],
            }
            if row.mask is not None:
                runs = [(sampled, sum(1 for _ in run)) for sampled, run in itertools.groupby(map(bool, row.mask))]
                lengths = [length for _, length in runs]
                attributes = {
                    **attributes,
                    "agentlightning.training.mask": lengths if runs[0][0] else [0, *lengths],
                    "agentlightning.training.response_ids": ids,
                }
            # A step that is done again after a kill says the same again, which the store takes once.
            place = f"{step}/{rollout.attempt.attempt_id}/{ids}"
            spans.append(
                Span.from_attributes(
                    attributes=attributes,
                    rollout_id=rollout.rollout_id,
                    attempt_id=rollout.attempt.attempt_id,
                    span_id=hashlib.blake2b(place.encode(), digest_size=8).hexdigest(),
                    name=TRAINING_SPAN,
                )
            )
    return spans
