"""Conformance tests for execution strategies.

Use them like this::

    class TestMyStrategy(StrategyConformance):
        @pytest.fixture
        def make_strategy(self):
            return MyStrategy
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from agentlightning.execution import RUNNERS_FAILED, AlgorithmJob, ExecutionStrategy
from agentlightning.litagent import wrap
from agentlightning.records import AttemptedRollout, EnqueueRolloutRequest
from agentlightning.run.job import LitAgentRunnerJob
from agentlightning.run.thread import StopEvent
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.testing import promised

__all__ = ["StrategyConformance"]


def double(task: int) -> float:
    """The kit's agent."""
    return 2.0 * task


def take_a_second(task: int) -> float:
    """An agent that still works when the algorithm is done."""
    time.sleep(1.0)
    return 1.0


async def until_enqueued(store: LightningStore, *, is_started: bool = False) -> None:
    """Waits until a rollout was enqueued, or one was started."""
    status: Any = ["preparing", "running", "succeeded"] if is_started else None
    while not (await store.query_rollouts(status_in=status, limit=1)).total:  # noqa: ASYNC110 # the store may be remote
        await asyncio.sleep(0.01)


@dataclass(frozen=True)
class CrashingJob:
    """A runner that raises: every one, or only the first, which the file ``once`` remembers."""

    once: Path | None = None

    async def __call__(self, store: LightningStore, worker_id: str, stop: StopEvent) -> bool:
        await until_enqueued(store)
        with contextlib.suppress(FileExistsError):
            if self.once is not None:
                self.once.touch(exist_ok=False)  # a single call
            raise RuntimeError("this runner crashes")
        return await LitAgentRunnerJob(wrap(double), "dummy", max_concurrency=2)(store, worker_id, stop)


class StrategyConformance:
    """Tests that every strategy must pass that runs both halves of a run from one process.

    Subclass it and define one fixture, ``make_strategy``: a function of ``n_runners`` that returns a strategy.
    """

    patience_s: ClassVar[float] = 120.0
    """How long an algorithm of the kit waits for what a strategy must do."""

    def execute(
        self, strategy: ExecutionStrategy, algorithm: AlgorithmJob, runner: Any = None
    ) -> Sequence[AttemptedRollout]:
        """Runs both jobs and returns the rollouts of the run, in the order in which they were enqueued."""
        store = create_store("memory://")
        strategy.execute(algorithm, runner or LitAgentRunnerJob(wrap(double), "dummy", max_concurrency=2), store)

        async def read() -> Sequence[AttemptedRollout]:
            found = (await store.query_rollouts()).items
            await store.close()
            return [rollout for rollout in found if isinstance(rollout, AttemptedRollout)]

        return asyncio.run(read())

    async def collect(self, store: LightningStore, tasks: Sequence[int]) -> None:
        """An algorithm that runs the agent on each task."""
        rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=task) for task in tasks])
        ids = [rollout.rollout_id for rollout in rollouts]
        ended = await store.wait_for_rollouts(ids, timeout=self.patience_s)
        assert len(ended) == len(ids), (
            f"runners work until the algorithm is done: {len(ended)} of {len(ids)} rollouts ended"
        )

    def _expect_all(self, rollouts: Sequence[AttemptedRollout], tasks: Sequence[int]) -> None:
        found = [(rollout.input, rollout.attempt.reward, rollout.attempt.sequence_id) for rollout in rollouts]
        expected = [(task, 2.0 * task, 1) for task in tasks]
        assert found == expected, f"execute runs each rollout once (task, reward, attempts): {found}, not {expected}"

    def test_every_rollout_is_run_once(self, make_strategy: Callable[..., ExecutionStrategy]) -> None:
        strategy, tasks = make_strategy(n_runners=2), list(range(20))
        assert strategy.n_runners == 2, f"n_runners is the number of runners: {strategy.n_runners}, not 2"
        self._expect_all(self.execute(strategy, lambda store: self.collect(store, tasks)), tasks)

    def test_the_others_continue_when_a_runner_crashes(
        self, make_strategy: Callable[..., ExecutionStrategy], tmp_path: Path
    ) -> None:
        tasks, crashing = list(range(6)), CrashingJob(tmp_path / "crashed")
        with promised("execute continues, or replaces the runner, when one of several runners raises"):
            rollouts = self.execute(make_strategy(n_runners=2), lambda store: self.collect(store, tasks), crashing)
        assert (tmp_path / "crashed").exists(), "execute calls runner(store, worker_id, stop)"
        self._expect_all(rollouts, tasks)

    def test_the_algorithm_is_cancelled_when_no_runner_is_left(
        self, make_strategy: Callable[..., ExecutionStrategy]
    ) -> None:
        reasons: list[str] = []

        async def wait(store: LightningStore) -> None:
            await store.enqueue_rollout(1)
            try:
                await asyncio.sleep(self.patience_s)
            except asyncio.CancelledError as cancelled:
                reasons.extend(map(str, cancelled.args))
                raise

        raised = None
        try:
            self.execute(make_strategy(n_runners=1), wait, CrashingJob())
        except Exception as error:  # any error is right
            raised = error
        promise = "when every runner fails, execute cancels the algorithm with RUNNERS_FAILED and raises the reason"
        assert raised is not None, f"{promise}; it returned"
        assert reasons == [RUNNERS_FAILED], f"{promise}; the algorithm was cancelled with {reasons}"

    def test_an_error_of_the_algorithm_is_raised(self, make_strategy: Callable[..., ExecutionStrategy]) -> None:
        async def fail(store: LightningStore) -> None:
            raise LookupError("this algorithm fails")

        raised: BaseException | None = None
        try:
            self.execute(make_strategy(n_runners=1), fail)
        except Exception as error:  # compared below
            raised = error
        assert isinstance(raised, LookupError), f"execute raises whatever the algorithm raised, not {raised!r}"

    def test_running_rollouts_end_before_it_returns(self, make_strategy: Callable[..., ExecutionStrategy]) -> None:
        async def start(store: LightningStore) -> None:
            await store.enqueue_rollout(1)
            async with asyncio.timeout(self.patience_s):
                await until_enqueued(store, is_started=True)

        slow = LitAgentRunnerJob(wrap(take_a_second), "dummy")
        (rollout,) = self.execute(make_strategy(n_runners=1), start, slow)
        promise = "execute sets the stop event when the algorithm is done, and returns when the runners have drained"
        assert rollout.status == "succeeded", f"{promise}; a rollout was {rollout.status}: {rollout.attempt.error}"
