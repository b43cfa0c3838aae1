"""Asynchronous and synchronous steps: ``python tests/benchmarks/bench_asynchronous.py [--staleness 1 2 4]``.

Trains the demo's agent and model, where one rollout in sixteen takes ``--tail`` seconds longer, as with a slow tool.
All runs have the same numbers of steps and rollouts; the time is measured from the first step to the last, without
evaluation. Rewards are greedy, on held-out tasks; several ``--seeds`` give a mean and a standard deviation.

Target (issue 16): 1.5 times the rollouts per second at equal reward.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.demo.training import CHECKPOINT, GRPO_SETTINGS

SIZE = 8
SLOW_SHARE = 1 / 16


def uneven_agent(task: Mapping[str, Any], llm: agl.LLM, rollout: agl.AttemptedRollout) -> float:
    """Runs the demo's agent, slowed down in some training rollouts."""
    slow = random.Random(rollout.rollout_id).random() < SLOW_SHARE
    if slow and rollout.mode == "train":
        time.sleep(task["tail_s"])
    return calculator_agent(task, llm)


def run(staleness: int, seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Trains and returns the compared figures."""
    store = agl.create_store("memory://")
    settings = {
        **GRPO_SETTINGS,
        "model": str(CHECKPOINT),
        "steps": arguments.steps,
        "tasks_per_step": arguments.tasks,
        "rollouts_per_task": SIZE,
        "staleness": staleness,
        "eval_every": 0,
        "seed": seed,
    }
    train = [{**task, "tail_s": arguments.tail} for task in make_problems("train", 4096)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = agl.Trainer(
            algorithm=settings, store=store, trackers=[], run_dir=Path(folder) / "run", max_concurrency=256
        )
        trainer.fit(uneven_agent, train, make_problems("val", 192))
    steps = [step.values for step in asyncio.run(store.query_metrics()).items]
    seconds = sum(values["seconds"] for values in steps[1:])
    return {
        "rollouts/s": sum(values["rollouts"] for values in steps[1:]) / seconds,
        "step s": seconds / arguments.steps,
        "reward before": steps[0]["val_reward"],
        "reward after": steps[-1]["val_reward"],
        "mean staleness": sum(values["staleness"] for values in steps[1:]) / arguments.steps,
        "groups dropped": sum(values.get("groups_dropped", 0.0) for values in steps[1:]),
        "calls of mixed versions": sum(values.get("calls_of_mixed_versions", 0.0) for values in steps[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--tasks", type=int, default=8, help="tasks of a step")
    parser.add_argument("--tail", type=float, default=6.0, help="seconds that slow rollouts take longer")
    parser.add_argument("--staleness", type=int, nargs="+", default=[4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    found: dict[int, list[dict[str, float]]] = {0: [], **{staleness: [] for staleness in arguments.staleness}}
    for seed in arguments.seeds:
        for staleness, runs in found.items():
            runs.append(run(staleness, seed, arguments))
            rounded = {name: round(value, 3) for name, value in runs[-1].items()}
            print(f"seed {seed}, staleness {staleness}:", rounded, flush=True)
    synchronous = statistics.mean(values["rollouts/s"] for values in found[0])
    for staleness, runs in found.items():
        rewards = [values["reward after"] for values in runs]
        ratio = statistics.mean(values["rollouts/s"] for values in runs) / synchronous
        spread = f"reward {statistics.mean(rewards):.3f} ± {statistics.pstdev(rewards):.3f}"
        print(f"staleness {staleness}: {spread}, {ratio:.2f} times the rollouts/s (target 1.5)")


if __name__ == "__main__":
    main()
