"""``baseline``: runs the agent over the data and reports what it earned. The dry run of every other algorithm."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from agentlightning.algorithm.algorithm import FastAlgorithm
from agentlightning.algorithm.context import RunContext
from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import require_least
from agentlightning.resources import LLM
from agentlightning.reward import find_final_reward
from agentlightning.types import (
    AttemptedRollout,
    AttemptFailure,
    Dataset,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    RolloutMode,
    Span,
)

logger = logging.getLogger("agentlightning")
_CONFIG = RolloutConfig(max_attempts=3, retry_condition=["unresponsive"])
"""A rollout whose runner was lost, as by a kill of everything, says nothing about the agent: it is run again."""


class Baseline(FastAlgorithm):
    """Queues every task once per epoch and waits for the results; learns nothing and publishes nothing."""

    def __init__(
        self,
        *,
        n_epochs: int = 1,
        train_split: float = 0.5,
        polling_interval: float = 5.0,
        max_queue_length: int = 4,
        span_verbosity: Literal["keys", "key_values", "none"] = "keys",
    ) -> None:
        """Sets how much is run.

        Args:
            n_epochs: passes over the data.
            train_split: when only one dataset is given, the share of its tasks that runs in mode ``train``; the rest
                runs in mode ``val``.
            polling_interval: seconds between two reports while nothing finishes; results themselves are not polled for.
            max_queue_length: rollouts in flight at once.
            span_verbosity: what the log says of each span: attribute names, names and values, or nothing.

        Raises:
            ConfigError: a value out of range.
        """
        require_least(1, n_epochs=n_epochs, max_queue_length=max_queue_length)
        if not 0.0 <= train_split <= 1.0:
            raise ConfigError(f"train_split = {train_split}: a share from 0 to 1 is needed")
        self.n_epochs = n_epochs
        self.train_split = train_split
        self.polling_interval = polling_interval
        self.max_queue_length = max_queue_length
        self.span_verbosity = span_verbosity
        self._reported: set[tuple[str, str]] = set()

    def check_setup(self, context: RunContext) -> Sequence[LLM]:
        """Refuses a run without data."""
        _require_data(context.train_dataset, context.val_dataset)
        return ()

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Runs all tasks and records, for each epoch, the mean reward, the success rate and the errors by type."""
        _require_data(train_dataset, val_dataset)
        if self.context.adapter is not None:
            unread = type(self.context.adapter).__name__
            logger.warning("the adapter %s has no effect: baseline learns nothing; leave adapter out", unread)
        store = self.get_store()
        for epoch in range(self.n_epochs):
            tasks = self._tasks(train_dataset, val_dataset)
            finished: list[tuple[Rollout, float | None]] = []
            in_flight: set[asyncio.Task[tuple[Rollout, float | None]]] = set()
            try:
                for position, (task, mode) in enumerate(tasks):
                    rollout_id = self.context.rollout_id(mode, epoch, position)
                    request = EnqueueRolloutRequest(input=task, mode=mode, rollout_id=rollout_id, config=_CONFIG)
                    await store.enqueue_many_rollouts([request])
                    in_flight.add(asyncio.create_task(self._result(rollout_id)))
                    if len(in_flight) >= self.max_queue_length:
                        finished += await self._some(in_flight)
                while in_flight:
                    finished += await self._some(in_flight)
            finally:
                for waiting in in_flight:
                    waiting.cancel()
            summary = _summarize(finished)
            await store.add_metrics(epoch + 1, {**summary, "progress": (epoch + 1) / self.n_epochs})
            logger.info("epoch %d of %d: %s", epoch + 1, self.n_epochs, _show(summary))

    def _tasks(
        self, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None
    ) -> Iterator[tuple[Any, RolloutMode]]:
        if train_dataset is not None and val_dataset is not None:
            n_train = len(train_dataset)
        else:
            n_train = round(len(train_dataset or val_dataset or ()) * self.train_split)
        index = 0
        for dataset in (train_dataset, val_dataset):
            for position in range(len(dataset) if dataset is not None else 0):
                yield dataset[position], "train" if index < n_train else "val"  # type: ignore[index] # len 0 if None
                index += 1

    async def _some(
        self, in_flight: set[asyncio.Task[tuple[Rollout, float | None]]]
    ) -> list[tuple[Rollout, float | None]]:
        done: set[asyncio.Task[tuple[Rollout, float | None]]] = set()
        while not done:
            done, _ = await asyncio.wait(in_flight, timeout=self.polling_interval, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                logger.info("waiting for %d rollouts", len(in_flight))
        in_flight -= done
        return [task.result() for task in done]

    async def _result(self, rollout_id: str) -> tuple[Rollout, float | None]:
        store = self.get_store()
        (rollout,) = await store.wait_for_rollouts([rollout_id])
        spans = await store.query_spans(rollout_id, "latest")
        reward = find_final_reward(spans.items, rollout)
        if isinstance(rollout, AttemptedRollout) and rollout.attempt.error is not None:
            self._report(rollout_id, rollout.attempt.error)
        logger.info("%s %s %s: reward %s, %d spans", rollout.mode, rollout_id, rollout.status, reward, len(spans))
        for span in spans.items:
            if self.span_verbosity != "none":
                logger.info("  %s %s", span.name, _describe(span, values=self.span_verbosity == "key_values"))
        return rollout, reward

    def _report(self, rollout_id: str, error: AttemptFailure) -> None:
        """Logs each distinct error once; what a mistake does to one task it does to all of them."""
        if (error.type, error.message) not in self._reported:
            self._reported.add((error.type, error.message))
            logger.warning("rollout %s failed:\n%s", rollout_id, error.traceback.rstrip())


def _require_data(train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None) -> None:
    if train_dataset is None and val_dataset is None:
        raise ConfigError("baseline needs a train_dataset or a val_dataset")


def _describe(span: Span, *, values: bool) -> object:
    return dict(span.attributes) if values else sorted(span.attributes)


def _summarize(results: list[tuple[Rollout, float | None]]) -> dict[str, float]:
    """Statistics of an epoch; a rollout that failed or said no reward counts as 0, as in every algorithm here."""
    rewards = [reward if reward is not None and rollout.status == "succeeded" else 0.0 for rollout, reward in results]
    failed = [rollout for rollout, _ in results if rollout.status != "succeeded"]
    errors = Counter(_error_type(rollout) for rollout in failed)
    by_mode = {
        mode: [reward for (rollout, _), reward in zip(results, rewards, strict=True) if rollout.mode == mode]
        for mode in ("train", "val")
    }
    return {
        "reward": statistics.fmean(rewards) if rewards else 0.0,
        "reward_median": statistics.median(rewards) if rewards else 0.0,
        **{f"{mode}_reward": statistics.fmean(values) for mode, values in by_mode.items() if values},
        "success_rate": 1.0 - len(failed) / len(results) if results else 0.0,
        "rollouts": float(len(results)),
        "rollouts_without_reward": float(sum(reward is None for _, reward in results)),
        **{f"errors/{name}": float(count) for name, count in sorted(errors.items())},
    }


def _error_type(rollout: Rollout) -> str:
    """The type of the error, or how the rollout ended where there is none."""
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    return attempt.error.type if attempt is not None and attempt.error is not None else rollout.status


def _show(summary: dict[str, float]) -> str:
    errors = [f"{value:.0f} x {name.removeprefix('errors/')}" for name, value in summary.items() if "errors/" in name]
    return (
        f"{summary['rollouts']:.0f} rollouts, reward {summary['reward']:.4g} (mean), "
        f"{summary['reward_median']:.4g} (median), {summary['success_rate']:.1%} succeeded"
        + (f", errors: {', '.join(errors)}" if errors else "")
    )
