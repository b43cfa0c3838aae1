"""A service for tests of live learning: its prompt states the quality of its answers.

It is repeatable: rewards depend on the task, and the choice of versions depends on a seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import agentlightning as agl
from agentlightning.types import Rollout

GOOD, WORSE = "quality 0.95", "quality 0.2"
FADING = "quality 0.95 0.1"
BEGIN = "quality 0.6"
GOLDEN = 0.6180339887498949
"""A number whose multiples modulo 1 spread evenly over [0, 1) from any start."""


@agl.rollout
async def answer(task: dict[str, Any], prompt: agl.PromptTemplate) -> float | None:
    """Earns 1 on the share of tasks that its prompt states and 0 on the rest; ``late`` tasks get no reward yet.

    A prompt with "penalty" earns 1 less, and a prompt with "unrated" gets no reward. For ``worn`` tasks the last number
    of the prompt counts.
    """
    if "broken" in prompt.template:
        raise RuntimeError("no such tool")
    if task.get("late") or "unrated" in prompt.template:
        return None
    quality = float(prompt.template.split()[-1 if task.get("worn") else 1])
    return float(task["n"] * GOLDEN % 1 < quality) - ("penalty" in prompt.template)


class Service:
    """Serves tasks one after another, each with the version that ``live`` picks."""

    def __init__(
        self, store: agl.LightningStore, live: agl.LiveResources, runner: agl.LitAgentRunner[Any], pause_s: float
    ) -> None:
        self.store = store
        self.live = live
        self.served: Counter[str] = Counter()
        """Number of served tasks by version."""
        self._runner = runner
        self._pause_s = pause_s
        self._numbers = itertools.count()

    async def serve(self, n: int | None = None, **task: Any) -> list[Rollout]:
        """Serves ``n`` tasks, or until it is cancelled."""
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
    """Runs a service over a store in this process."""
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=answer, store=store):
        async with agl.LiveResources(store, **{"refresh_s": 0.2, "seed": 1, **settings}) as live:
            yield Service(store, live, runner, pause_s)


@contextlib.asynccontextmanager
async def running(*work: Any) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Runs coroutines in the background until the block ends, and then raises their errors."""
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


async def run_checks(store: agl.LightningStore) -> None:
    """Runs a runner for the rollouts of offline checks."""
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=answer, store=store, worker_id="checker"):
        await runner.iter()
