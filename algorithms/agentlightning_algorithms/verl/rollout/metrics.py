"""What the rollouts of a step were like, as numbers."""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning import semconv
from agentlightning.types import AttemptedRollout, Rollout, Span
from agentlightning_algorithms.verl.rollout.batch_row import Rows, drift


@dataclass(frozen=True)
class Outcome:
    """One finished rollout."""

    mode: str
    error: str
    """Type of the error it failed with, empty for none."""
    reward: float
    is_scored: bool
    calls: int
    rows: int
    tokens: int
    """That the model sampled and that are trained on."""
    drift: float
    """Versions of the weights between the calls and the step that the rollout was for."""
    queue_s: float
    run_s: float
    call_s: tuple[float, ...] = ()
    """How long each call took at the gateway, pauses for new weights included."""
    dropped: Counter[str] = field(default_factory=Counter)
    mismatches: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(
        cls,
        mode: str,
        rollout: Rollout,
        error: str,
        reward: float | None,
        built: Rows,
        spans: Sequence[Span],
        *,
        step: int,
        failed_reward: float,
    ) -> Outcome:
        """Sums up a rollout; one without a reward counts as ``failed_reward``."""
        began = rollout.attempt.start_time if isinstance(rollout, AttemptedRollout) else rollout.start_time
        ended = rollout.end_time if rollout.end_time is not None else began
        return cls(
            mode=mode,
            error=error,
            reward=failed_reward if reward is None else reward,
            is_scored=reward is not None,
            calls=built.calls,
            rows=len(built.rows),
            tokens=sum(sum(row.mask) for row in built.rows),
            # a step of training samples from the weights of the step before it
            drift=drift(built.rows, step - 1 if mode == "train" else step),
            queue_s=max(0.0, began - rollout.start_time),
            run_s=max(0.0, ended - began),
            call_s=tuple(
                span.end_time - span.start_time
                for span in spans
                if semconv.is_gateway_call(span) and span.start_time is not None and span.end_time is not None
            ),
            dropped=built.dropped,
            mismatches=built.mismatches,
        )


class RolloutMetrics:
    """Collects outcomes from several threads until somebody takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: dict[str, list[Outcome]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, outcome: Outcome) -> None:
        """Notes a finished rollout."""
        with self._lock:
            self._outcomes.setdefault(outcome.mode, []).append(outcome)

    def count(self, name: str) -> None:
        """Notes something else that happened."""
        with self._lock:
            self._counts[name] += 1

    def take(self, mode: str) -> dict[str, float]:
        """The numbers of all rollouts of a mode that ended since they were last taken; empty when none did."""
        with self._lock:
            outcomes = self._outcomes.pop(mode, [])
            counts, self._counts = self._counts, Counter()
        return {**summarize(outcomes), **{name: float(count) for name, count in counts.items()}}


def summarize(outcomes: list[Outcome]) -> dict[str, float]:
    """Means over rollouts, and counts of what went wrong by kind."""
    if not outcomes:
        return {}
    rewards = [outcome.reward for outcome in outcomes]
    numbers: dict[str, float] = {
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "reward_median": statistics.median(rewards),
        "rollouts": float(len(outcomes)),
        "rollouts_without_reward": float(sum(not outcome.is_scored for outcome in outcomes)),
        "rollouts_without_rows": float(sum(not outcome.rows for outcome in outcomes)),
        "valid_ratio": statistics.fmean(bool(outcome.rows and outcome.is_scored) for outcome in outcomes),
        "calls": float(sum(outcome.calls for outcome in outcomes)),
        "rows": float(sum(outcome.rows for outcome in outcomes)),
        "sampled_tokens": float(sum(outcome.tokens for outcome in outcomes)),
        "calls_per_rollout": _mean(outcomes, "calls"),
        "calls_per_rollout_max": float(max(outcome.calls for outcome in outcomes)),
        "drift": _mean([outcome for outcome in outcomes if outcome.rows], "drift"),
        "queue_s": _mean(outcomes, "queue_s"),
        "queue_s_max": max(outcome.queue_s for outcome in outcomes),
        "run_s": _mean(outcomes, "run_s"),
        "run_s_max": max(outcome.run_s for outcome in outcomes),
    }
    call_s = [seconds for outcome in outcomes for seconds in outcome.call_s]
    if call_s:
        numbers["call_s"] = statistics.fmean(call_s)
        numbers["call_s_median"] = statistics.median(call_s)
        numbers["call_s_max"] = max(call_s)
    for prefix, counted in (
        ("errors", Counter(outcome.error for outcome in outcomes if outcome.error)),
        ("dropped", sum((outcome.dropped for outcome in outcomes), Counter())),
        ("mismatches", sum((outcome.mismatches for outcome in outcomes), Counter())),
    ):
        numbers.update({f"{prefix}/{name}": float(count) for name, count in counted.items()})
    return numbers


def _mean(outcomes: list[Outcome], name: str) -> float:
    values: list[Any] = [getattr(outcome, name) for outcome in outcomes]
    return statistics.fmean(values) if values else 0.0
