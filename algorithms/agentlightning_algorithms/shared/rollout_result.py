"""Runs rollouts through the store and reads their results."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Final

from agentlightning.errors import ConflictError, LightningError
from agentlightning.reward import count_failed, find_final_reward
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, AttemptFailure, EnqueueRolloutRequest, Rollout, RolloutConfig, Span


def retry_lost(timeout_s: float | None = None, *, max_attempts: int = 3) -> RolloutConfig:
    """Retries rollouts whose runner was lost, which is not the agent's fault; other failures are final."""
    return RolloutConfig(timeout_seconds=timeout_s, max_attempts=max_attempts, retry_condition=["unresponsive"])


@dataclass(frozen=True)
class RolloutResult:
    """A rollout that has ended."""

    rollout: Rollout
    spans: Sequence[Span]
    """Spans of the latest attempt."""
    reward: float | None
    """The final reward that the agent emitted, even if the agent failed afterwards."""

    @property
    def valid_reward(self) -> float | None:
        """The reward; None when the rollout failed or has no reward."""
        return self.reward if self.rollout.status == "succeeded" else None

    @property
    def failure(self) -> AttemptFailure | None:
        """The exception that the agent raised."""
        return self.rollout.attempt.error if isinstance(self.rollout, AttemptedRollout) else None

    @property
    def error_type(self) -> str | None:
        """The type of the agent's exception, or else the rollout's status; None if the rollout succeeded."""
        if self.rollout.status == "succeeded":
            return None
        return self.rollout.status if self.failure is None else self.failure.type

    @property
    def outcome(self) -> tuple[float | None, str | None]:
        """The reward, and the error if the rollout failed, as ``RewardCheck`` takes them."""
        failure = f"{self.failure.type}: {self.failure.message}" if self.failure is not None else self.error_type
        return self.reward, None if self.rollout.status == "succeeded" else failure


_ENOUGH: Final = 16
"""Size from which a first batch is conclusive; fewer rollouts may all fail by chance."""


@dataclass
class RewardCheck:
    """Ends a run without rewards after its second batch of rollouts, or after its first batch if this has at least 16.

    Every algorithm that needs rewards passes the rollouts of the run to ``add``, in order.
    """

    lowest: float = math.inf
    """Lowest reward of the run."""

    _outcomes: list[tuple[float | None, str | None]] = field(default_factory=list)
    _batches: int = 0
    is_passed: bool = False
    """Whether a rollout succeeded with a reward."""

    def add(self, outcomes: Iterable[tuple[float | None, str | None]], *, is_last: bool = False) -> None:
        """Adds a batch of rollouts."""
        outcomes = list(outcomes)
        self.lowest = count_failed((reward for reward, error in outcomes if error is None), self.lowest)
        if self.is_passed:
            return
        self._outcomes += outcomes
        self._batches += 1
        self.is_passed = any(reward is not None and error is None for reward, error in self._outcomes)
        if self.is_passed:
            self._outcomes.clear()
        elif self._outcomes and (is_last or self._batches > 1 or len(self._outcomes) >= _ENOUGH):
            raise LightningError(_describe_missing(self._outcomes))


def _describe_missing(outcomes: Sequence[tuple[float | None, str | None]]) -> str:
    errors = Counter(error for _, error in outcomes if error is not None)
    shown = ", ".join(f"{count} x {shorten(error, 200)}" for error, count in errors.most_common(3))
    if errors.total() == len(outcomes):
        return f"all of the first {len(outcomes)} rollouts failed: {shown}"
    return (
        f"none of the first {len(outcomes)} rollouts has a reward: return a number from the agent, call "
        "agl.emit_reward, or give a reward function" + (f"; failed: {shown}" if errors else "")
    )


async def read_result(store: LightningStore, rollout: Rollout) -> RolloutResult:
    """Reads the spans and the reward of a rollout that has ended."""
    spans = (await store.query_spans(rollout.rollout_id, "latest")).items
    return RolloutResult(rollout, spans, find_final_reward(spans, rollout))


async def run_rollouts(
    store: LightningStore, requests: Sequence[EnqueueRolloutRequest], *, timeout_s: float | None = None
) -> list[Rollout]:
    """Enqueues rollouts, waits until all have ended, and returns them in the order of the requests.

    A rollout whose id is already in the store is not run again. Rollouts that are still open after ``timeout_s``, for
    all together, are cancelled.
    """
    if not requests:
        return []
    ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
    ended = {rollout.rollout_id: rollout for rollout in await store.wait_for_rollouts(ids, timeout=timeout_s)}
    if late := [rollout_id for rollout_id in ids if rollout_id not in ended]:
        await cancel_rollouts(store, late)
        ended.update({rollout.rollout_id: rollout for rollout in await store.wait_for_rollouts(late)})
    return [ended[rollout_id] for rollout_id in ids]


async def cancel_rollouts(store: LightningStore, rollout_ids: Sequence[str]) -> None:
    """Cancels rollouts, except the ones that have ended by now."""
    for rollout_id in rollout_ids:
        with contextlib.suppress(ConflictError):
            await store.cancel_rollout(rollout_id)
