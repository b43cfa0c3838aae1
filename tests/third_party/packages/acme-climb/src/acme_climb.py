"""A prompt optimiser that can be killed and resumed: hill climbing over a list of endings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.plugin import Candidate, Component, hookimpl, read_result, run_rollouts
from agentlightning.types import EnqueueRolloutRequest

plugin_interface = 1


class Climb(agl.Algorithm):
    """Tries each ending of a prompt on the validation tasks, and publishes the best prompt after each trial."""

    def __init__(self, *, endings: list[str], prompt: str = "prompt") -> None:
        if not endings:
            raise agl.ConfigError("endings = []: give at least one text to try")
        self.endings, self.prompt = endings, prompt
        self.trials: list[tuple[str, float]] = []

    def save_state(self, directory: Path) -> None:
        (directory / "trials.json").write_text(json.dumps(self.trials))

    def load_state(self, directory: Path) -> None:
        self.trials = [tuple(trial) for trial in json.loads((directory / "trials.json").read_text())]

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store, tasks = self.get_store(), val_dataset or train_dataset
        seed = (self.get_initial_resources() or {}).get(self.prompt)
        if not isinstance(seed, agl.PromptTemplate):
            raise agl.ConfigError(f"prompt = {self.prompt!r}: there is no prompt of this name")
        tried = ["", *self.endings]
        for number, ending in enumerate(tried):
            if number < len(self.trials):
                continue
            prompt = seed.model_copy(update={"template": seed.template + ending})
            candidate = Candidate.of({self.prompt: prompt}, round=number)
            version = await store.add_resources({self.prompt: prompt, "prompt_candidate": candidate})
            requests = [
                EnqueueRolloutRequest(
                    input=task,
                    mode="val",
                    resources_id=version.resources_id,
                    rollout_id=self.context.rollout_id("climb", number, index),
                    metadata={"group": candidate.candidate_id, "step": number},
                )
                for index, task in enumerate(tasks)
            ]
            results = [await read_result(store, rollout) for rollout in await run_rollouts(store, requests)]
            score = sum(result.valid_reward or 0.0 for result in results) / len(results)
            self.trials.append((ending, score))
            self.context.log(number, {"val_reward": score, "progress": (number + 1) / len(tried)})
            self.checkpoint()
        best = max(self.trials, key=lambda trial: trial[1])
        await store.add_resources({self.prompt: seed.model_copy(update={"template": seed.template + best[0]})})


@hookimpl
def components() -> list[Component]:
    return [Component("algorithm", "climb", f"{__name__}:Climb", summary="hill climbing over endings")]
