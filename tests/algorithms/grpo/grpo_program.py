"""A small training on disk, which a test may let kill its own process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import agentlightning as agl
from agentlightning.run import directory as run_directory
from agentlightning_algorithms.grpo import algorithm as _algorithm  # noqa: F401 # loads the heavy packages before a fork
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.demo.training import CHECKPOINT
from tests.algorithms.server_thread import threads_for_servers
from tests.waiting import blocking_until, until

HELD = {"rollouts": ("1-0-2", "5", "6", "7", "8"), "checkpoint": ("2-0-0", "2-0-1", "2-0-2")}
"""Groups whose rollouts do not end before the kill: too many for the next step of either kind of training."""


def settings(steps: int, **more: Any) -> dict[str, Any]:
    return {
        "name": "grpo",
        "model": str(CHECKPOINT),
        "steps": steps,
        "tasks_per_step": 3,
        "rollouts_per_task": 4,
        "eval_every": 2,
        "sampling": {"temperature": 1.0, "max_tokens": 32},
        "update": {"lr": 1e-4, "minibatches": 2},
        "train_threads": 1,
        **more,
    }


def main(directory: Path, steps: int, staleness: int = 0, agent: Any = calculator_agent) -> None:
    """Begins the run, or resumes it."""
    resume = (directory / "run.json").is_file()
    store = agl.create_store(f"sqlite:///{directory}/../{directory.name}.db")
    trainer = agl.Trainer(
        algorithm=settings(steps, staleness=staleness), store=store, strategy="shm", trackers=[], run_dir=directory,
        resume=resume,
    )  # fmt: skip
    trainer.fit(agent, make_problems("train", 8), make_problems("val", 4))
    asyncio.run(store.close())


async def is_recorded(directory: Path, held: Sequence[str]) -> bool:
    """Whether the first checkpoint, and all rollouts that are not held with all their calls, are on disk."""
    if not (directory / "checkpoint" / "updater.pt").is_file():
        return False
    store = agl.create_store(f"sqlite:///{directory}/../{directory.name}.db")
    try:
        for rollout in (await store.query_rollouts()).items:
            if (rollout.metadata or {}).get("group") not in held:
                spans = (await store.query_spans(rollout.rollout_id)).items
                calls, recorded = (
                    {span.attributes.get("gen_ai.response.id") for span in chosen} - {None}
                    for chosen in (spans, filter(agl.semconv.is_gateway_call, spans))
                )
                if rollout.status != "succeeded" or calls != recorded:
                    return False
        return True
    finally:
        await store.close()


async def has_queued(directory: Path, group: str) -> bool:
    """Whether the rollouts of a group are in the store."""
    store = agl.create_store(f"sqlite:///{directory}/../{directory.name}.db")
    try:
        return any((each.metadata or {}).get("group") == group for each in (await store.query_rollouts()).items)
    finally:
        await store.close()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main_until_killed(
    log: Path, directory: Path, steps: int, staleness: int, dies: Literal["rollouts", "checkpoint"]
) -> None:
    """Dies during the rollouts after the first checkpoint, or while it writes one beside the next rollouts."""
    with log.open("ab") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())

    async def mortal_agent(task: Any, llm: agl.LLM, rollout: agl.Rollout) -> float:
        if (rollout.metadata or {}).get("group") in HELD[dies]:
            await until(lambda: dies == "rollouts" and is_recorded(directory, HELD[dies]))
            die()
        return await asyncio.to_thread(calculator_agent, task, llm)

    write = run_directory._fsync

    def mortal_write(path: Path) -> None:
        if dies == "checkpoint" and ".checkpoint." in str(path):
            # A resumed run finds them queued, with the address of this process.
            blocking_until(lambda: asyncio.run(has_queued(directory, "2-0-2")))
            die()
        write(path)

    run_directory._fsync = mortal_write
    with threads_for_servers():
        main(directory, steps, staleness, mortal_agent)
