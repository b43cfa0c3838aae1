"""From finished rollouts to rows with advantages: what one step learns from, and what it leaves out and why.

R   rollouts of a batch
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.errors import AdapterError
from agentlightning.reward import find_final_reward
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, Rollout, Span, Triplet
from agentlightning_algorithms.grpo.advantage import Estimator, group_scales, zero_spread_groups
from agentlightning_algorithms.grpo.row import Row

logger = logging.getLogger("agentlightning")

TRAINING_SPAN = "agentlightning.training"
"""Name of the span that tells what a model call was worth; one for each row, in the rollout's own trace."""


@dataclass(frozen=True)
class Episode:
    """A finished rollout and what it gives to learn from."""

    rollout: Rollout
    reward: float | None
    """The agent's final reward; None when it failed or said none."""
    triplets: Sequence[Triplet] = ()
    error: str = ""
    """Type of the error it failed with."""

    @property
    def group(self) -> str:
        """Rollouts of the same task in the same step share one."""
        return str((self.rollout.metadata or {}).get("group", self.rollout.rollout_id))


@dataclass
class Experience:
    """The rows of one step, the rollout each came from, and the numbers to report."""

    rows: list[Row] = field(default_factory=list)
    sources: list[tuple[Episode, Triplet]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


async def gather_episodes(
    store: LightningStore,
    adapter: TraceAdapter[Sequence[Triplet]],
    requests: Sequence[EnqueueRolloutRequest],
    flush: Any,
) -> list[Episode]:
    """Enqueues rollouts, waits for all, and reads what came of them.

    Args:
        store: where runners take them from.
        adapter: turns the spans of one attempt into triplets.
        requests: what to enqueue.
        flush: awaited between the last end and the first read, so that the gateway's spans are there.
    """
    enqueued = await store.enqueue_many_rollouts(requests)
    await store.wait_for_rollouts([rollout.rollout_id for rollout in enqueued])
    await flush()
    episodes = []
    for rollout_id in [rollout.rollout_id for rollout in enqueued]:
        rollout = await store.get_rollout_by_id(rollout_id)
        if rollout is not None:
            spans = await store.query_spans(rollout_id, "latest")
            episodes.append(read_episode(rollout, spans.items, adapter))
    return episodes


def read_episode(rollout: Rollout, spans: Sequence[Span], adapter: TraceAdapter[Sequence[Triplet]]) -> Episode:
    """Reads a finished rollout; one whose spans cannot be used says so in ``error`` and the log."""
    error = ""
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    if attempt is not None and attempt.error is not None:
        error = attempt.error.type
    reward = find_final_reward(spans) if rollout.status == "succeeded" else None
    try:
        triplets = adapter.adapt(spans) if attempt is None else adapter.adapt_attempt(attempt, spans)
    except AdapterError as adapter_error:
        logger.warning("rollout %s is left out: %s", rollout.rollout_id, adapter_error)
        return Episode(rollout, reward, error="AdapterError")
    if triplets is None:
        return Episode(rollout, None, error="SpansDropped")
    return Episode(rollout, reward, triplets, error)


def build_experience(
    episodes: Sequence[Episode],
    *,
    estimator: Estimator = "grpo",
    failed_reward: float | None = 0.0,
    max_length: int,
) -> Experience:
    """Gives every model call of a batch the advantage of its rollout within the rollout's group.

    Where the adapter has a credit rule, each call has a reward of its own (``Triplet.reward``). A rollout then counts
    with the mean of its calls' rewards, and each call gets its own advantage on the scale of its rollout's group.

    Args:
        episodes: finished rollouts.
        estimator: the formula of the advantages.
        failed_reward: what a rollout without a reward counts as; None leaves it out, also of its group's mean.
        max_length: tokens, prompt and response, that the trainer takes; longer calls are left out after the advantages.
    """
    scored_R = [
        (episode, failed_reward if episode.reward is None else _mean_credit(episode))
        for episode in episodes
        if (episode.reward is not None or failed_reward is not None) and episode.error not in _UNUSABLE
    ]
    rewards_R = [float(reward) for _, reward in scored_R if reward is not None]
    groups_R = [episode.group for episode, _ in scored_R]
    flat = zero_spread_groups(rewards_R, groups_R)
    scales_R = group_scales(rewards_R, groups_R, estimator)
    experience = Experience()
    counts = {"calls": 0, "calls_without_tokens": 0, "calls_too_long": 0}
    for (episode, _), reward, (mean, factor) in zip(scored_R, rewards_R, scales_R, strict=True):
        for triplet in episode.triplets:
            counts["calls"] += 1
            worth = triplet.reward if _has_credit(triplet) and triplet.reward is not None else reward
            row = triplet_to_row(triplet, (worth - mean) * factor)
            if row is None:
                counts["calls_without_tokens"] += 1
            elif len(row.prompt_ids) + len(row.response_ids) > max_length:
                counts["calls_too_long"] += 1
            elif episode.group not in flat:
                experience.rows.append(row)
                experience.sources.append((episode, triplet))
    n_groups = len(set(groups_R))
    experience.metrics = {
        **reward_metrics(episodes),
        "groups_without_spread": len(flat) / n_groups if n_groups else 0.0,
        "rollouts_left_out": float(len(episodes) - len(scored_R)),
        **{name: float(count) for name, count in counts.items()},
    }
    return experience


def _mean_credit(episode: Episode) -> float | None:
    """What a rollout counts as: the mean of its calls where a credit rule says what they are worth, else its reward."""
    worth = [t.reward for t in episode.triplets if _has_credit(t) and t.reward is not None]
    return statistics.fmean(worth) if worth else episode.reward


def _has_credit(triplet: Triplet) -> bool:
    """Whether ``Triplet.reward`` is a credit rule's; else it is whatever was emitted after this very call."""
    return "credit" in triplet.metadata


_UNUSABLE = frozenset({"SpansDropped", "AdapterError"})


def reward_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean, spread and success of a batch; a rollout without a reward counts as 0."""
    rewards_R = [episode.reward or 0.0 for episode in episodes]
    errors: dict[str, float] = {}
    for episode in episodes:
        if episode.error:
            errors[f"errors/{episode.error}"] = errors.get(f"errors/{episode.error}", 0.0) + 1.0
    turns = [len(episode.triplets) for episode in episodes]
    return {
        "reward": statistics.fmean(rewards_R) if rewards_R else 0.0,
        "reward_std": statistics.pstdev(rewards_R) if rewards_R else 0.0,
        "rollouts": float(len(episodes)),
        "rollouts_without_reward": float(sum(episode.reward is None for episode in episodes)),
        "calls_per_rollout": statistics.fmean(turns) if turns else 0.0,
        **errors,
    }


def triplet_to_row(triplet: Triplet, advantage: float) -> Row | None:
    """Makes training data of one model call; None when its tokens or log-probabilities were not recorded."""
    prompt, response = triplet.prompt, triplet.response
    prompt_ids, response_ids = prompt.get("token_ids"), response.get("token_ids")
    logprobs = response.get("logprobs")
    if not prompt_ids or not response_ids or not logprobs or len(logprobs) != len(response_ids):
        return None
    return Row(prompt_ids, response_ids, logprobs, advantage)


def training_spans(experience: Experience, step: int) -> list[Span]:
    """Says, in the trace of each rollout, what its calls were trained with."""
    spans = []
    for row, (episode, triplet) in zip(experience.rows, experience.sources, strict=True):
        rollout = episode.rollout
        if isinstance(rollout, AttemptedRollout):
            attributes: Mapping[str, Any] = {
                "agentlightning.training.step": step,
                "agentlightning.training.advantage": row.advantage,
                "agentlightning.training.tokens": len(row.response_ids),
                "gen_ai.response.id": triplet.metadata.get("response_id") or "",
            }
            spans.append(
                Span.from_attributes(
                    attributes=attributes,
                    rollout_id=rollout.rollout_id,
                    attempt_id=rollout.attempt.attempt_id,
                    name=TRAINING_SPAN,
                )
            )
    return spans
