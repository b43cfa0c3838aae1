"""A trial: a candidate's rollouts on some tasks, and what came of them."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.errors import AdapterError, ConflictError
from agentlightning.reward import find_final_reward
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, Rollout, RolloutConfig, RolloutMode, Span
from agentlightning_algorithms.prompt_search.budget import Usage, read_usage
from agentlightning_plugins.chat_history.adapter import ChatHistory, TraceToMessages


@dataclass(frozen=True)
class RolloutResult:
    """What a critic is told of one rollout."""

    rollout_id: str
    task: Any
    status: str
    """Of the rollout, or ``timeout``."""
    reward: float | None
    messages: Sequence[ChatHistory] = ()
    """The chat of each model call."""
    error: str | None = None
    usage: Sequence[Usage] = ()

    @property
    def score(self) -> float:
        """The reward; 0 for a rollout that failed, took too long or said none."""
        return self.reward if self.reward is not None and self.status == "succeeded" else 0.0


def mean_score(results: Sequence[RolloutResult]) -> float:
    """Mean reward over all rollouts; those that failed, took too long or said no reward count as 0."""
    return statistics.fmean(result.score for result in results) if results else 0.0


async def run_trial(
    store: LightningStore,
    requests: Sequence[EnqueueRolloutRequest],
    *,
    timeout_s: float,
    adapter: TraceToMessages | None,
) -> list[RolloutResult]:
    """Runs rollouts at once and reads their results, in order.

    Args:
        store: where runners find them.
        requests: what to run. With the ids of an earlier life of the run, what has finished is not run again.
        timeout_s: seconds for all of them; what is not done by then is cancelled and counts as timed out.
        adapter: reads the chats; None leaves them out.
    """
    queued = await store.enqueue_many_rollouts(requests)
    ids = [rollout.rollout_id for rollout in queued]
    done = {rollout.rollout_id: rollout for rollout in await store.wait_for_rollouts(ids, timeout=timeout_s)}
    for rollout_id in ids:
        if rollout_id not in done:
            with contextlib.suppress(ConflictError):  # it has just ended
                await store.cancel_rollout(rollout_id)
    for rollout in await store.wait_for_rollouts([rollout_id for rollout_id in ids if rollout_id not in done]):
        done[rollout.rollout_id] = rollout
    return list(await asyncio.gather(*(read_result(store, done[rollout_id], adapter) for rollout_id in ids)))


def make_requests(
    tasks: Mapping[str, Any], *, resources_id: str, mode: RolloutMode, metadata: Mapping[str, Any]
) -> list[EnqueueRolloutRequest]:
    """Requests for tasks by the id of their rollout. A rollout whose worker is lost is run again."""
    config = RolloutConfig(max_attempts=3, retry_condition=["unresponsive"])
    return [
        EnqueueRolloutRequest(
            input=task,
            mode=mode,
            resources_id=resources_id,
            config=config,
            metadata=dict(metadata),
            rollout_id=rollout_id,
        )
        for rollout_id, task in tasks.items()
    ]


async def read_result(store: LightningStore, rollout: Rollout, adapter: TraceToMessages | None) -> RolloutResult:
    """What came of a rollout that has ended; without an adapter, without its chats."""
    spans: Sequence[Span] = (await store.query_spans(rollout.rollout_id, "latest")).items
    status: str = "timeout" if rollout.status == "cancelled" else rollout.status
    error = None
    if isinstance(rollout, AttemptedRollout):
        if rollout.status == "failed" and rollout.attempt.status == "timeout":
            status = "timeout"
        if rollout.attempt.error is not None:
            error = f"{rollout.attempt.error.type}: {rollout.attempt.error.message}"
    messages: Sequence[ChatHistory] = ()
    usage: Sequence[Usage] = ()
    try:
        messages = adapter.adapt(spans) if adapter is not None else ()
        usage = read_usage(spans)
    except AdapterError as problem:
        error = error or str(problem)
    return RolloutResult(
        rollout.rollout_id,
        rollout.input,
        status,
        find_final_reward(spans, rollout),
        tuple(messages),
        error,
        tuple(usage),
    )
