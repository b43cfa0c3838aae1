"""verl's modes ``colocate_async`` and ``sync``.

    python tests/benchmarks/environments/bench_verl_modes.py [--steps 8] [--tail 4]

Trains the demo's agent and model on a CPU, in the environment of docs/verl.md. One rollout in sixteen takes ``--tail``
seconds longer, as with a slow tool; with ``--tail 0`` none does. Each mode trains in a separate process, from the same
weights and seed, for the same number of steps. Time is measured from the end of the first step to the end of the last;
the reward is the mean training reward of the last quarter of the steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.event import Event, StepFinished
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.demo.training import CHECKPOINT

TASKS, SIZE = 8, 4
SLOW_SHARE = 1 / 16
MODES = ("sync", "colocate_async")


def uneven_agent(task: Mapping[str, Any], llm: agl.LLM, rollout: agl.AttemptedRollout) -> float:
    """Runs the demo's agent, slowed down in some rollouts."""
    if random.Random(rollout.rollout_id).random() < SLOW_SHARE:
        time.sleep(task["tail_s"])
    return calculator_agent(task, llm)


class Steps:
    """A tracker that records the end, reward and drift of each step."""

    def __init__(self) -> None:
        self.ended: list[float] = []
        self.rewards: list[float] = []
        self.drift: list[float] = []

    def start(self, run: agl.Run, directory: Path | None) -> None:
        pass

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepFinished) and "reward" in event.values:
            self.ended.append(time.monotonic())
            self.rewards.append(float(str(event.values["reward"])))
            self.drift.append(float(str(event.values.get("drift", 0.0))))

    def close(self) -> None:
        pass


def train(mode: str, steps: int, tail_s: float) -> dict[str, float]:
    """Trains and returns the compared figures."""
    config = {
        "actor_rollout_ref": {"model.path": str(CHECKPOINT), "actor.optim.lr": 1e-3, "rollout.n": SIZE},
        "actor_rollout_ref.actor.ppo_mini_batch_size": TASKS,
        "data": {"train_batch_size": TASKS, "max_prompt_length": 128, "max_response_length": 128},
        "trainer": {"device": "cpu", "total_training_steps": steps, "v1.trainer_mode": mode},
    }
    tasks = [{**task, "tail_s": tail_s} for task in make_problems("train", 4096)]
    tracker = Steps()
    with tempfile.TemporaryDirectory() as folder:
        trainer = agl.Trainer(
            algorithm=agl.VERL(config), trackers=[tracker], run_dir=Path(folder) / "run", max_concurrency=128, seed=0
        )
        trainer.fit(uneven_agent, tasks)
    seconds = tracker.ended[-1] - tracker.ended[0]
    return {
        "rollouts/s": (len(tracker.ended) - 1) * TASKS * SIZE / seconds,
        "step s": seconds / (len(tracker.ended) - 1),
        "reward": statistics.mean(tracker.rewards[-max(1, steps // 4) :]),
        "drift": statistics.mean(tracker.drift),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tail", type=float, default=4.0, help="seconds that slow rollouts take longer")
    parser.add_argument("--mode", choices=MODES, help="train only in this mode, in this process")
    arguments = parser.parse_args()
    if arguments.mode:
        print(json.dumps(train(arguments.mode, arguments.steps, arguments.tail)))
        return
    found: dict[str, dict[str, float]] = {}
    for mode in MODES:
        command = [sys.executable, __file__, "--mode", mode]
        command += ["--steps", str(arguments.steps), "--tail", str(arguments.tail)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found[mode] = json.loads(output.splitlines()[-1])
        print(f"{mode}:", {name: round(value, 3) for name, value in found[mode].items()}, flush=True)
    ratio = found["colocate_async"]["rollouts/s"] / found["sync"]["rollouts/s"]
    print(f"colocate_async: {ratio:.2f} times the rollouts/s of sync")


if __name__ == "__main__":
    main()
