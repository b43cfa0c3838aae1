"""Finished rollouts with their rewards and model calls, and metrics of a batch of them."""

from __future__ import annotations

import logging
import math
import random
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentlightning import semconv
from agentlightning.adapter.adapter import TraceAdapter, reading
from agentlightning.errors import AdapterError
from agentlightning.reward import count_failed, find_final_reward, find_reward_spans, get_rewards_from_span
from agentlightning.store.lifecycle import MODEL_ERROR
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Dataset, Rollout, Span, Triplet
from agentlightning_algorithms.grpo.sampling import FIXED, flatten
from agentlightning_algorithms.grpo.settings import GRPOSettings
from agentlightning_algorithms.shared.policy.training_row import Distribution

logger = logging.getLogger("agentlightning")


@dataclass(frozen=True)
class Episode:
    """A finished rollout with its reward and model calls."""

    rollout: Rollout
    reward: float | None
    """The agent's final reward; None when it failed or reported none."""
    triplets: Sequence[Triplet] = ()
    error: str = ""
    """Type of the error that the rollout failed with."""
    distributions: Mapping[str, Distribution] = field(default_factory=dict)
    """The distributions that the gateway recorded, by response id; also of calls that are not in ``triplets``."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named dimensions of the rollout's rewards; the last value of each counts."""
    call_seconds: Sequence[float] = ()
    """Durations of the model calls, as measured by the gateway."""
    calls_without_penalties: int = 0
    """Calls whose penalties, ``min_p`` or ``logit_bias`` the gateway removed."""
    unreadable: str | None = None
    """Why the spans cannot be used."""

    @property
    def outcome(self) -> tuple[float | None, str | None]:
        """The reward, and the error if the rollout failed, as ``RewardCheck`` takes them."""
        if self.rollout.status == "succeeded":
            return self.reward if self.unreadable is None else None, self.unreadable
        attempt = self.rollout.attempt if isinstance(self.rollout, AttemptedRollout) else None
        failure = attempt.error if attempt is not None else None
        return None, self.rollout.status if failure is None else f"{failure.type}: {failure.message}"

    @property
    def group(self) -> str:
        """Key shared by the rollouts of the same task in the same step."""
        return str((self.rollout.metadata or {}).get("group", self.rollout.rollout_id))

    def distribution_of(self, call: Triplet) -> Distribution | None:
        """Returns the distribution of one of its calls; None if it is not known."""
        response_id = call.metadata.get("response_id")
        return None if response_id is None else self.distributions.get(str(response_id))

    @property
    def source(self) -> str | None:
        """The value of the task's key ``source``, if it has one."""
        task = self.rollout.input
        return str(task["source"]) if isinstance(task, Mapping) and "source" in task else None

    @property
    def seconds(self) -> float | None:
        """Time from the start to the end of its last attempt."""
        attempt = self.rollout.attempt if isinstance(self.rollout, AttemptedRollout) else None
        return None if attempt is None or attempt.end_time is None else max(0.0, attempt.end_time - attempt.start_time)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version of the weights that sampled its calls; None if it is not known."""
        versions = [call.metadata.get("weight_version") for call in self.triplets]
        return min((version for version in versions if isinstance(version, int)), default=None)

    @property
    def queue_wait_s(self) -> float | None:
        """Time in the queue before a runner claimed the rollout."""
        rollout = self.rollout
        if not isinstance(rollout, AttemptedRollout) or rollout.attempt.sequence_id != 1:
            return None
        return max(0.0, rollout.attempt.start_time - rollout.start_time)


async def gather_episodes(
    store: LightningStore,
    adapter: TraceAdapter[Sequence[Triplet]],
    rollout_ids: Sequence[str],
    flush: Callable[[], Awaitable[None]],
    *,
    addressed_at: Mapping[str, float],
) -> list[Episode]:
    """Waits until rollouts have finished, and reads their spans after ``flush``.

    Rollouts that failed in an attempt begun before ``addressed_at``, when their resources got the address of this
    process, are run again, because no server answered their calls.
    """
    again = [
        rollout.rollout_id
        for rollout in await store.wait_for_rollouts(rollout_ids)
        if rollout.status == "failed"
        and isinstance(rollout, AttemptedRollout)
        and rollout.attempt.start_time < addressed_at.get(rollout.resources_id or "", 0.0)
    ]
    for rollout_id in again:
        await store.retry_rollout(rollout_id)
    if again:
        await store.wait_for_rollouts(again)
    await flush()
    episodes = []
    for rollout_id in rollout_ids:
        rollout = await store.get_rollout_by_id(rollout_id)
        if rollout is not None:
            spans = await store.query_spans(rollout_id, "latest")
            episodes.append(read_episode(rollout, spans.items, adapter))
    unreadable = [episode.unreadable for episode in episodes if episode.unreadable is not None]
    if unreadable:
        text = "%d of %d rollouts have nothing to train on; the first: %s"
        logger.warning(text, len(unreadable), len(episodes), unreadable[0])
    return episodes


def read_episode(rollout: Rollout, spans: Sequence[Span], adapter: TraceAdapter[Sequence[Triplet]]) -> Episode:
    """Reads a finished rollout; if its spans cannot be used, ``error`` and ``unreadable`` say so."""
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    error = attempt.error.type if attempt is not None and attempt.error is not None else ""
    reward = find_final_reward(spans, rollout) if rollout.status == "succeeded" else None
    try:
        with reading(spans):
            triplets = adapter.adapt(spans) if attempt is None else adapter.adapt_attempt(attempt, spans)
            named = [named for span in find_reward_spans(spans) for named in get_rewards_from_span(span)]
            calls = [span for span in spans if semconv.is_gateway_call(span)]
            distributions = _read_distributions(calls)
    except AdapterError as adapter_error:
        return Episode(rollout, reward, error="AdapterError", unreadable=f"AdapterError: {adapter_error}")
    if triplets is None:
        return Episode(rollout, reward, error="SpansDropped")
    rewards = {name: value for name, value in named if name != "primary"}
    seconds = [call.end_time - call.start_time for call in calls if call.start_time and call.end_time]
    removed = [FIXED & {*(call.attributes.get(semconv.GATEWAY_REPLACED) or ())} for call in calls]
    return Episode(
        rollout, reward, triplets, error, distributions, rewards, seconds,
        calls_without_penalties=sum(map(bool, removed)),
    )  # fmt: skip


def _read_distributions(calls: Sequence[Span]) -> dict[str, Distribution]:
    found = {}
    for span in calls:
        attributes = span.attributes
        temperature, top_p, top_k = (attributes.get(f"gen_ai.request.{name}") for name in Distribution._fields)
        response_id = str(attributes.get(semconv.GEN_AI_RESPONSE_ID))
        found[response_id] = Distribution(
            1.0 if temperature is None else float(temperature),
            1.0 if top_p is None else float(top_p),
            max(0, int(top_k or 0)),
        )
    return found


def fill_rewards(episodes: Sequence[Episode], failed_reward: float | None) -> list[float | None]:
    """Returns the rewards of a batch, in which a rollout without one never counts above the rest of its group.

    It counts as ``failed_reward`` or, if that is lower, as the lowest reward of its group, or of the batch if the group
    has none. Its reward stays None if ``failed_reward`` is None, or if its model failed.
    """
    groups: dict[str, list[float]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).extend([] if episode.reward is None else [episode.reward])
    every = [reward for rewards in groups.values() for reward in rewards]

    def fill(episode: Episode) -> float | None:
        if episode.reward is not None or failed_reward is None or episode.error == MODEL_ERROR:
            return episode.reward
        return count_failed(groups[episode.group] or every, failed_reward)

    return [*map(fill, episodes)]


def describe_episodes(
    episodes: Sequence[Episode], *, success_threshold: float = 1.0, failed_reward: float | None = 0.0
) -> dict[str, float]:
    """Returns rewards, turns, lengths and queueing times of a batch.

    A rollout without a reward is never a success, and counts as ``failed_reward`` or, if that is lower, as the lowest
    reward of the batch. If ``failed_reward`` is None, or if its model failed, the reward metrics exclude it; they are
    absent if nothing is left. Named rewards are means over the same rollouts: one that lacks a name counts like one
    without a reward.
    """
    failed = None if failed_reward is None else count_failed((episode.reward for episode in episodes), failed_reward)
    rewards = [
        failed if episode.reward is None and episode.error != MODEL_ERROR else episode.reward for episode in episodes
    ]
    counted = [(episode, r) for episode, r in zip(episodes, rewards, strict=True) if r is not None]
    rewards_R = [reward for _, reward in counted]
    errors = Counter(episode.error for episode in episodes if episode.error)
    seconds = [spent for episode in episodes if (spent := episode.seconds) is not None]
    waits = [wait for episode in episodes if (wait := episode.queue_wait_s) is not None]
    sources: dict[str, list[float]] = {}
    for episode, reward in counted:
        if episode.source is not None:
            sources.setdefault(episode.source, []).append(reward)
    named: dict[str, list[float]] = {}
    for name in {name for episode in episodes for name in episode.rewards}:
        own = [None if episode.reward is None else episode.rewards.get(name) for episode, _ in counted]
        lowest = count_failed(own, failed_reward or 0.0)
        named[name] = [lowest if value is None else value for value in own]
    return {
        **({"reward": _mean(rewards_R), "reward_std": statistics.pstdev(rewards_R)} if rewards_R else {}),
        "success_rate": _mean([float(e.reward is not None and e.reward >= success_threshold) for e in episodes]),
        "failure_rate": _mean([float(episode.reward is None) for episode in episodes]),
        "rollouts": float(len(episodes)),
        "rollouts_without_reward": float(sum(episode.reward is None for episode in episodes)),
        **describe_calls(episodes),
        **_spread("call_s", [spent for episode in episodes for spent in episode.call_seconds]),
        **_spread("rollout_s", seconds),
        "queue_wait_s": _mean(waits),
        "queue_wait_max_s": max(waits, default=0.0),
        **{f"rewards/{name}": _mean(values) for name, values in sorted(named.items()) if values},
        **{f"reward/{source}": _mean(values) for source, values in sorted(sources.items())},
        **{f"errors/{name}": float(count) for name, count in errors.items()},
    }


def describe_calls(episodes: Sequence[Episode]) -> dict[str, float]:
    """Returns metrics of the calls per rollout and of their lengths."""
    calls = [triplet for episode in episodes for triplet in episode.triplets]
    cut_off = sum(triplet.metadata.get("finish_reason") == "length" for triplet in calls)
    idle = [not (episode.triplets or episode.error) for episode in episodes]
    return {
        **_spread("calls_per_rollout", [len(episode.triplets) for episode in episodes]),
        **_spread("prompt_length", [len(ids) for call in calls if (ids := call.prompt.get("token_ids"))]),
        **_spread("response_length", [len(ids) for call in calls if (ids := call.response.get("token_ids"))]),
        "rollouts_without_calls": sum(idle) / len(idle) if idle else 0.0,
        "responses_cut_off": cut_off / len(calls) if calls else 0.0,
        "calls_without_penalties": float(sum(episode.calls_without_penalties for episode in episodes)),
    }


def count_staleness(episodes: Sequence[Episode], version: int) -> dict[str, float]:
    """Returns the number of calls by the age of the weights that sampled them; ``version`` has age 0."""
    versions = [call.metadata.get("weight_version") for episode in episodes for call in episode.triplets]
    # A resumed run may use calls sampled by weights that it has not reached again.
    counts = Counter(max(0, version - found) for found in versions if isinstance(found, int))
    return {f"staleness/{age}": float(count) for age, count in sorted(counts.items())}


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns mean, median, 95th percentile (by nearest rank) and maximum."""
    ranked = sorted(values) or [0.0]
    p50, p95 = (ranked[math.ceil(share * len(ranked)) - 1] for share in (0.5, 0.95))
    found = {"": _mean(values), "_p50": p50, "_p95": p95, "_max": ranked[-1]}
    return {f"{name}{suffix}": float(value) for suffix, value in found.items()}


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


@dataclass(frozen=True)
class TaskHistory:
    """The training set and its past, as a task sampler sees them."""

    data: Dataset[Any]
    position: int
    """Tasks drawn so far."""
    step: int
    """Updates made so far."""
    seed: int
    rewards: Mapping[int, Sequence[float | None]] = field(default_factory=dict)
    """By index of a task: the mean reward of each time it was rolled out, oldest first; None: no rollout had one."""

    def newest(self, index: int) -> float | None:
        """Returns the newest mean reward of a task; None if it is not known."""
        return next((reward for reward in reversed(self.rewards.get(index, ())) if reward is not None), None)


def shuffled(count: int, history: TaskHistory) -> list[int]:
    """The task sampler ``shuffled``: an endless sequence of shuffled epochs, read from the position on."""
    orders: dict[int, list[int]] = {}
    chosen = []
    size = len(history.data)
    for place in range(history.position, history.position + count):
        epoch, offset = divmod(place, size)
        if epoch not in orders:
            orders[epoch] = random.Random(f"{history.seed}-{epoch}").sample(range(size), size)
        chosen.append(orders[epoch][offset])
    return chosen


def undecided(count: int, history: TaskHistory) -> list[int]:
    """The task sampler ``undecided``: from twice as many shuffled tasks, those whose last mean reward is nearest 0.5.

    Tasks that have not been tried count as 0.5. Groups of tasks that always or never succeed teach nothing.
    """
    pool = list(dict.fromkeys(shuffled(2 * count, replace(history, position=2 * history.position))))
    known = {index: history.newest(index) for index in pool}
    pool.sort(key=lambda index: 0.0 if (reward := known[index]) is None else abs(reward - 0.5))
    return [pool[i % len(pool)] for i in range(count)]


def finished(episodes: Sequence[Episode], settings: GRPOSettings) -> Sequence[Episode]:
    """The rollout filter ``finished``: only rollouts that did not fail and in which no answer was cut off."""
    return [
        episode
        for episode in episodes
        if episode.reward is not None
        and not any(call.metadata.get("finish_reason") == "length" for call in episode.triplets)
    ]


def soft_overlong(episode: Episode, group: Sequence[Episode], settings: GRPOSettings) -> float | None:
    """The reward shaping ``soft_overlong`` (DAPO, arXiv:2503.14476): penalises answers in the last fifth of max_tokens.

    The reward falls linearly by up to 1 with the length of the longest answer.
    """
    sampling = flatten(settings.sampling or {})
    limit = sampling.get("max_tokens") or sampling.get("max_completion_tokens")
    if episode.reward is None or not limit:
        return episode.reward
    longest = max((len(triplet.response.get("token_ids") or ()) for triplet in episode.triplets), default=0)
    margin = max(1.0, limit / 5)
    return float(episode.reward - min(1.0, max(0.0, (longest - (limit - margin)) / margin)))


def pass_at_k(episodes: Sequence[Episode], threshold: float = 1.0) -> dict[str, float]:
    """The metrics ``pass_at_k``: the chance that at least one of k rollouts of a task succeeds, for k = 1, 2, 4, ...

    Unbiased over the n rollouts of each task (Chen et al. 2021, arXiv:2107.03374): 1 - C(n - c, k) / C(n, k).
    """
    groups: dict[object, list[bool]] = {}
    for episode in episodes:
        task = (episode.rollout.metadata or {}).get("task_id", episode.group)
        groups.setdefault(task, []).append(episode.reward is not None and episode.reward >= threshold)
    if not groups:
        return {}
    least = min(map(len, groups.values()))

    def estimate(k: int) -> float:
        return sum(1 - math.comb(len(g) - sum(g), k) / math.comb(len(g), k) for g in groups.values()) / len(groups)

    return {f"pass@{k}": estimate(k) for k in (2**i for i in range(least.bit_length()))}
