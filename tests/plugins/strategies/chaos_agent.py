"""The agent and algorithm of the chaos test; their results depend only on their inputs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig

N_TASKS = 6


def agent(task: dict[str, int], prompt: agl.PromptTemplate) -> float:
    """Runs for a while and returns a reward that depends on the task and on the prompt learned so far."""
    agl.emit_annotation({"task": task["n"]})
    time.sleep(0.05 + task["n"] * 0.03)
    return worth(task["n"], prompt.template)


def worth(n: int, prompt: str) -> float:
    return float((sum(map(ord, prompt)) * (n + 1)) % 97)


def next_prompt(prompt: str, rewards: list[float]) -> str:
    return f"{prompt.split('|')[0]}|{sum(rewards):.0f}"


class Accumulator(agl.Algorithm):
    """Runs every task in each step with the current prompt and derives the next prompt from the rewards."""

    def __init__(self, *, steps: int) -> None:
        self.steps = steps
        self.step = 0
        self.prompt = "seed|0"

    def save_state(self, directory: Path) -> None:
        (directory / "state.json").write_text(json.dumps({"step": self.step, "prompt": self.prompt}))

    def load_state(self, directory: Path) -> None:
        state = json.loads((directory / "state.json").read_text())
        self.step, self.prompt = state["step"], state["prompt"]

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        config = RolloutConfig(max_attempts=100, retry_condition=["unresponsive"], unresponsive_seconds=10)
        while self.step < self.steps:
            resources = await store.add_resources({"prompt": self.prompt})
            requests = [
                EnqueueRolloutRequest(
                    input=task,
                    mode="train",
                    resources_id=resources.resources_id,
                    config=config,
                    metadata={"step": self.step},
                    rollout_id=self.context.rollout_id("train", self.step, index),
                )
                for index, task in enumerate(train_dataset)
            ]
            queued = await store.enqueue_many_rollouts(requests)
            ended = await store.wait_for_rollouts([rollout.rollout_id for rollout in queued])
            assert [rollout.status for rollout in ended] == ["succeeded"] * len(requests)
            rewards = []
            for rollout in ended:
                reward = agl.find_final_reward((await store.query_spans(rollout.rollout_id, "latest")).items)
                assert reward is not None, f"{rollout.rollout_id} succeeded and has no reward"
                rewards.append(reward)
            self.prompt = next_prompt(self.prompt, rewards)
            self.step += 1
            self.checkpoint()
            await self.context.log(self.step, {"reward": sum(rewards), "progress": self.step / self.steps})
        await store.add_resources({"prompt": self.prompt})


def undisturbed(steps: int) -> str:
    """Returns the final prompt of a run without kills."""
    prompt = "seed|0"
    for _ in range(steps):
        prompt = next_prompt(prompt, [worth(n, prompt) for n in range(N_TASKS)])
    return prompt
