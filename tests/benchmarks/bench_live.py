"""Slowdown of a service while live learning runs, compared with the same process without learning.

    python tests/benchmarks/bench_live.py [--steps 200] [--rounds 6]

One process serves tasks, one after the other and eight concurrently, with an agent that waits 30 ms for its model; its
store is an SQLite file. Rounds without and with learning alternate. Learning means: the router chooses each version, a
learner in another process follows a trial that never ends, and every rollout has a reward.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import agentlightning as agl

REPO = Path(__file__).parents[2]
ENDLESS = ("margin=0", "risk=1e-300", "max_treated=1000000000")
"""Settings of a trial that never ends."""


@agl.rollout
async def thinking(task: int, prompt: agl.PromptTemplate) -> float:
    await asyncio.sleep(0.03)
    return 1.0


@dataclass
class Block:
    """Measurements of tasks that were served in one block."""

    seconds: list[float]
    """Seconds from each task to its finished rollout."""
    cpu_s: float
    """CPU seconds per task of all threads of the serving process."""

    def quantile(self, share: float) -> float:
        return statistics.quantiles(self.seconds, n=100)[round(share * 100) - 1]


@dataclass
class Found:
    """Blocks without and with learning, which alternated."""

    without: list[Block] = field(default_factory=list)
    learning: list[Block] = field(default_factory=list)

    def quietest(self, share: float) -> tuple[float, float]:
        """Returns a quantile, such as 0.95, without and with learning, each of the least disturbed block."""
        without, learning = (min(block.quantile(share) for block in blocks) for blocks in (self.without, self.learning))
        return without, learning

    def added_cpu(self) -> float:
        """Returns the CPU seconds that learning adds to one task."""
        without, learning = (min(block.cpu_s for block in blocks) for blocks in (self.without, self.learning))
        return learning - without

    def is_close(self, limit: float) -> bool:
        """Returns whether both the median time and the CPU time grow by at most ``limit`` of the median time."""
        without, learning = self.quietest(0.5)
        return learning <= (1 + limit) * without and self.added_cpu() <= limit * without


@contextlib.asynccontextmanager
async def learner(url: str) -> AsyncIterator[None]:
    program = ["-m", "tests.algorithms.live_learner", url, "quality 1.0 too", *ENDLESS]
    process = await asyncio.create_subprocess_exec(sys.executable, *program, cwd=REPO)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def serve(runner: agl.LitAgentRunner[Any], live: agl.LiveResources | None, n_steps: int, at_once: int) -> Block:
    numbers = itertools.count()
    seconds: list[float] = []
    cpu_began = time.process_time()

    async def user() -> None:
        while (number := next(numbers)) < n_steps:
            began = time.perf_counter()
            if live is None:
                await runner.step(number)
            else:
                choice = live.pick()
                await runner.step(number, resources_id=choice.resources_id, metadata=choice.metadata)
            seconds.append(time.perf_counter() - began)

    await asyncio.gather(*(user() for _ in range(at_once)))
    return Block(seconds, (time.process_time() - cpu_began) / n_steps)


async def measure(n_steps: int, at_once: int, rounds: int, limit: float | None = None) -> Found:
    """Measures up to ``rounds`` rounds, until they show that learning adds no more than ``limit``."""
    found = Found()
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'store.db'}"
        store = agl.create_store(url)
        await store.update_resources("tuned", {"prompt": "quality 1.0"})
        runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.OtelTracer())
        with runner.run_context(agent=thinking, store=store):
            await serve(runner, None, 20, at_once)
            for _ in range(rounds):
                found.without.append(await serve(runner, None, n_steps, at_once))
                async with learner(url), agl.LiveResources(store, refresh_s=1.0) as live:
                    while live.trial is None:
                        await serve(runner, live, at_once, at_once)
                    found.learning.append(await serve(runner, live, n_steps, at_once))
                if limit is not None and found.is_close(limit):
                    break
        await store.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    for at_once in (1, 8):
        found = asyncio.run(measure(given.steps * at_once, at_once, given.rounds))
        for name, share in (("p50", 0.5), ("p95", 0.95)):
            without, with_it = found.quietest(share)
            print(
                f"{at_once} at once, {name}: {with_it * 1e3:.1f} ms with learning = {with_it / without:.3f} "
                f"of {without * 1e3:.1f} ms without"
            )
        print(f"{at_once} at once, CPU: {found.added_cpu() * 1e3:+.2f} ms a task with learning")


if __name__ == "__main__":
    main()
