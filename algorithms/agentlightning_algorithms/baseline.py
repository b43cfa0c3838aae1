"""``baseline``: runs the agent over the data and reports its rewards: a dry run for every other algorithm."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentlightning.algorithm.algorithm import FastAlgorithm, RunContext
from agentlightning.errors import ConfigError, LightningError
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.plugin.settings import require_least
from agentlightning.resources import LLM
from agentlightning.reward import count_failed
from agentlightning.types import Dataset, EnqueueRolloutRequest, RolloutMode
from agentlightning_algorithms.shared.rollout_result import RewardCheck, RolloutResult, read_result, retry_lost
from agentlightning_plugins.shared.rendering.text import show_error

logger = logging.getLogger("agentlightning")


@dataclass(eq=False, repr=False, kw_only=True)
class Baseline(FastAlgorithm):
    """Runs every task once per epoch; learns nothing and publishes nothing."""

    n_epochs: int = 1
    """Passes over the data."""
    train_split: float = 0.5
    """When only one dataset is given, the share of its tasks that runs in mode ``train``; the rest runs in ``val``."""
    polling_interval: float = 5.0
    """Seconds between two log lines while no rollout ends. Results arrive without polling."""
    max_queue_length: int = 4
    """Maximum number of rollouts in flight at the same time."""
    span_verbosity: Literal["keys", "key_values", "none"] = "keys"
    """Detail of spans in the log: attribute names, names and values, or none."""

    def __post_init__(self) -> None:
        require_least(1, n_epochs=self.n_epochs, max_queue_length=self.max_queue_length)
        if not 0.0 <= self.train_split <= 1.0:
            raise ConfigError(f"train_split = {self.train_split}: a share from 0 to 1 is needed")
        self._reported: set[tuple[str, str]] = set()

    def check_setup(self, context: RunContext) -> Sequence[LLM]:
        """Refuses a run without data."""
        if context.train_dataset is None and context.val_dataset is None:
            raise ConfigError("baseline needs a train_dataset or a val_dataset")
        return ()

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Runs all tasks and records, for each epoch, the mean reward, the success rate and the errors by type."""
        if self.context.adapter is not None:
            adapter = type(self.context.adapter).__name__
            logger.warning("the adapter %s has no effect: baseline learns nothing; leave adapter out", adapter)
        store = self.get_store()
        for epoch in range(self.n_epochs):
            results: list[RolloutResult] = []
            in_flight: set[asyncio.Task[RolloutResult]] = set()
            try:
                for position, (task, mode) in enumerate(self._tasks(train_dataset, val_dataset)):
                    rollout_id = self.context.rollout_id(mode, epoch, position)
                    request = EnqueueRolloutRequest(
                        input=task, mode=mode, rollout_id=rollout_id, config=retry_lost(), metadata={"step": epoch + 1}
                    )
                    await store.enqueue_many_rollouts([request])
                    in_flight.add(asyncio.create_task(self._wait_for_result(rollout_id)))
                    if len(in_flight) >= self.max_queue_length:
                        results += await self._take_finished(in_flight)
                while in_flight:
                    results += await self._take_finished(in_flight)
            finally:
                for waiting in in_flight:
                    waiting.cancel()
            summary = _summarize(results)
            await store.add_metrics(epoch + 1, {**summary, "progress": (epoch + 1) / self.n_epochs})
            text = ", ".join(f"{name} {value:.4g}" for name, value in summary.items())
            logger.info("epoch %d of %d: %s", epoch + 1, self.n_epochs, text)
            if epoch == 0:
                _warn_without_rewards(results)

    def _tasks(
        self, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None
    ) -> Iterator[tuple[Any, RolloutMode]]:
        datasets = [dataset for dataset in (train_dataset, val_dataset) if dataset is not None]
        n_train = len(datasets[0])
        if len(datasets) == 1:
            n_train = round(n_train * self.train_split)
        index = 0
        for dataset in datasets:
            for position in range(len(dataset)):
                yield dataset[position], "train" if index < n_train else "val"
                index += 1

    async def _take_finished(self, in_flight: set[asyncio.Task[RolloutResult]]) -> list[RolloutResult]:
        """Waits for at least one result and removes finished tasks from ``in_flight``."""
        done: set[asyncio.Task[RolloutResult]] = set()
        while not done:
            done, _ = await asyncio.wait(in_flight, timeout=self.polling_interval, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                logger.info("waiting for %d rollouts", len(in_flight))
        in_flight -= done
        return [task.result() for task in done]

    async def _wait_for_result(self, rollout_id: str) -> RolloutResult:
        store = self.get_store()
        (rollout,) = await store.wait_for_rollouts([rollout_id])
        result = await read_result(store, rollout)
        failure, spans = result.failure, result.spans
        if failure is not None and (failure.type, failure.message) not in self._reported:  # each error once
            self._reported.add((failure.type, failure.message))
            logger.warning("rollout %s failed: %s", rollout_id, show_error(f"{failure.type}: {failure.message}"))
            logger.debug("rollout %s:\n%s", rollout_id, failure.traceback.rstrip())
        logger.info(
            "%s %s %s: reward %s, %d spans", rollout.mode, rollout_id, rollout.status, result.reward, len(spans)
        )
        if self.span_verbosity != "none":
            for span in spans:
                shown = dict(span.attributes) if self.span_verbosity == "key_values" else sorted(span.attributes)
                logger.info("  %s %s", span.name, shown)
        return result


def _warn_without_rewards(results: list[RolloutResult]) -> None:
    """Logs a warning where other algorithms would end the run: baseline learns nothing, so it needs no rewards."""
    if all(result.failure is not None for result in results):  # their errors are in the log already
        return
    try:
        RewardCheck().add((result.outcome for result in results), is_last=True)
    except LightningError as error:
        logger.warning("%s", error)


def _summarize(results: list[RolloutResult]) -> dict[str, float]:
    """Statistics of an epoch; rollouts that failed or have no reward count as ``count_failed``."""
    failed = count_failed(result.valid_reward for result in results)
    scores = [failed if result.valid_reward is None else result.valid_reward for result in results]
    by_mode: dict[str, list[float]] = {}
    for result, score in zip(results, scores, strict=True):
        by_mode.setdefault(str(result.rollout.mode), []).append(score)
    errors = Counter(result.error_type for result in results if result.error_type is not None)
    return {
        "reward": statistics.fmean(scores) if scores else 0.0,
        "reward_median": statistics.median(scores) if scores else 0.0,
        **{f"{mode}_reward": statistics.fmean(values) for mode, values in by_mode.items() if values},
        "failure_rate": errors.total() / len(results) if results else 0.0,
        "rollouts": float(len(results)),
        "rollouts_without_reward": float(sum(result.reward is None for result in results)),
        **{f"errors/{name}": float(count) for name, count in sorted(errors.items())},
    }


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_algorithms.baseline:Baseline"
    return [Component("algorithm", "baseline", target, summary="runs the agent over the data")]
