"""Strategies with a planted mistake, each of which fails the conformance test that is named next to it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any, ClassVar

import pytest

from agentlightning.execution import RUNNERS_FAILED, ExecutionStrategy
from agentlightning.testing.strategy import StrategyConformance
from tests.planted import assert_each_test_finds_one, assert_found


class OneLoop(ExecutionStrategy):
    """A correct strategy: everything in one event loop."""

    shares_process = True
    reason: str | None = RUNNERS_FAILED

    def __init__(self, n_runners: int = 1) -> None:
        self.n_runners = n_runners

    def execute(self, algorithm: Any, runner: Any, store: Any) -> None:
        asyncio.run(self.run(algorithm, runner, store))

    async def run(self, algorithm: Any, runner: Any, store: Any) -> None:
        stop = threading.Event()
        runners = [asyncio.create_task(runner(store, f"r{n}", stop)) for n in range(self.n_runners)]
        work = asyncio.create_task(algorithm(store))
        watch = asyncio.create_task(self.watch(runners, work))
        await asyncio.wait([work])
        watch.cancel()
        stop.set()
        results = await self.drain(runners)
        if work.cancelled():
            raise next(result for result in results if isinstance(result, Exception))
        self.finish(work)

    async def watch(self, runners: Any, work: Any) -> None:
        await asyncio.wait(runners)  # not gather, which would cancel them when it is cancelled
        if all(runner.exception() for runner in runners):
            work.cancel(self.reason)

    async def drain(self, runners: Any) -> Any:
        return await asyncio.gather(*runners, return_exceptions=True)

    def finish(self, work: Any) -> None:
        work.result()


class TestOneLoop(StrategyConformance):
    @pytest.fixture
    def make_strategy(self) -> type[OneLoop]:
        return OneLoop


class Impatient(TestOneLoop):
    patience_s: ClassVar[float] = 0.5


class HasOneRunner(OneLoop):
    def __init__(self, n_runners: int = 1) -> None:
        super().__init__(1)


class RunsTheAlgorithmTwice(OneLoop):
    async def run(self, algorithm: Any, runner: Any, store: Any) -> None:
        await super().run(algorithm, runner, store)
        await super().run(algorithm, runner, store)


class StopsTooEarly(OneLoop):
    """Stops the runners when it has started the algorithm."""

    async def watch(self, runners: Any, work: Any) -> None:
        for runner in runners:
            runner.cancel()


class EndsWithTheFirstCrash(OneLoop):
    async def watch(self, runners: Any, work: Any) -> None:
        await asyncio.wait(runners, return_when=asyncio.FIRST_EXCEPTION)
        work.cancel(self.reason)


class WaitsForEver(OneLoop):
    async def watch(self, runners: Any, work: Any) -> None: ...


class GivesNoReason(OneLoop):
    reason = None


class SwallowsErrors(OneLoop):
    def finish(self, work: Any) -> None:
        with contextlib.suppress(LookupError):
            work.result()


class WrapsErrors(OneLoop):
    def finish(self, work: Any) -> None:
        if work.exception():
            raise RuntimeError("the algorithm failed")


class KillsItsRunners(OneLoop):
    async def drain(self, runners: Any) -> Any:
        for runner in runners:
            runner.cancel()
        return await super().drain(runners)


PLANTED = [
    (HasOneRunner, "test_every_rollout_is_run_once", "n_runners is the number of runners"),
    (RunsTheAlgorithmTwice, "test_every_rollout_is_run_once", "execute runs each rollout once"),
    (StopsTooEarly, "test_every_rollout_is_run_once", "runners work until the algorithm is done"),
    (EndsWithTheFirstCrash, "test_the_others_continue_when_a_runner_crashes", "it raised RuntimeError"),
    (WaitsForEver, "test_the_algorithm_is_cancelled_when_no_runner_is_left", "it returned"),
    (GivesNoReason, "test_the_algorithm_is_cancelled_when_no_runner_is_left", "was cancelled with []"),
    (SwallowsErrors, "test_an_error_of_the_algorithm_is_raised", "not None"),
    (WrapsErrors, "test_an_error_of_the_algorithm_is_raised", "not RuntimeError"),
    (KillsItsRunners, "test_running_rollouts_end_before_it_returns", "when the runners have drained"),
]


@pytest.mark.parametrize(("strategy", "test", "message"), PLANTED, ids=[planted[0].__name__ for planted in PLANTED])
def test_the_kit_finds_a_planted_mistake(
    strategy: type[OneLoop], test: str, message: str, request: pytest.FixtureRequest
) -> None:
    kit = Impatient if strategy in (StopsTooEarly, WaitsForEver) else TestOneLoop
    assert_found(kit, test, request, message, make_strategy=strategy)


def test_every_test_of_the_kit_finds_a_mistake() -> None:
    assert_each_test_finds_one(StrategyConformance, [test for _, test, _ in PLANTED])
