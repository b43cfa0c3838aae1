"""A service to learn from, for the tests of live learning: the quality of its answers is written in its prompt.

Nothing in it is drawn by chance that differs from run to run: rewards depend on the task, versions on a seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import agentlightning as agl
from agentlightning.types import Rollout

GOOD, WORSE = "quality 0.95", "quality 0.2"
BEGIN = "quality 0.6"
GOLDEN = 0.6180339887498949
"""Its multiples spread evenly over [0, 1), wherever one begins to count."""


@agl.rollout
async def answer(task: dict[str, Any], prompt: agl.PromptTemplate) -> float | None:
    """Earns 1 on the share of tasks that its prompt names, 0 on the others; ``late`` tasks say nothing yet."""
    if "broken" in prompt.template:
        raise RuntimeError("no such tool")
    if task.get("late"):
        return None
    quality = float(prompt.template.split()[1])
    return float(task["n"] * GOLDEN % 1 < quality)


class Service:
    """Serves tasks one after the other, asking ``live`` for the version of each."""

    def __init__(
        self, store: agl.LightningStore, live: agl.LiveResources, runner: agl.LitAgentRunner[Any], pause_s: float
    ) -> None:
        self.store = store
        self.live = live
        self.served: Counter[str] = Counter()
        """How many tasks were given to each version."""
        self._runner = runner
        self._pause_s = pause_s
        self._numbers = itertools.count()

    async def serve(self, n: int | None = None, **task: Any) -> list[Rollout]:
        """Serves ``n`` tasks, or goes on until it is cancelled."""
        rollouts = []
        for _ in itertools.count() if n is None else range(n):
            choice = self.live.pick()
            self.served[choice.resources_id or ""] += 1
            rollout = await self._runner.step(
                {"n": next(self._numbers) % 40, **task}, resources_id=choice.resources_id, metadata=choice.metadata
            )
            if n is not None:
                rollouts.append(rollout)
            await asyncio.sleep(self._pause_s)
        return rollouts


@contextlib.asynccontextmanager
async def serving(store: agl.LightningStore, pause_s: float = 0.002, **settings: Any) -> AsyncIterator[Service]:
    """A service over a store, in this process."""
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=answer, store=store):
        async with agl.LiveResources(store, **{"refresh_s": 0.2, "seed": 1, **settings}) as live:
            yield Service(store, live, runner, pause_s)


@contextlib.asynccontextmanager
async def running(*work: Any) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Has coroutines run in the background until the block ends; what one of them raised is raised then."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for what no event tells of."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 # as the docstring says
            await asyncio.sleep(0.02)


async def run_checks(store: agl.LightningStore) -> None:
    """A runner, for the rollouts of offline checks."""
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=answer, store=store, worker_id="checker"):
        await runner.iter()
