"""Two steps of ``grpo`` with a tiny model in an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.environment import Environment
from tests.algorithms.server_thread import threads_for_servers
from tests.algorithms.tiny_model import save_tiny_model


def train_two_steps(
    environment: Environment, folder: Path, tasks: list[Any] | None = None, *, tasks_per_step: int = 2, **options: Any
) -> None:
    """Trains with all rollouts of the environment, none of which may fail or be without a reward."""
    save_tiny_model(folder / "model", max_length=2048)
    algorithm = agl.GRPO(
        model=str(folder / "model"),
        steps=2,
        tasks_per_step=tasks_per_step,
        rollouts_per_task=2,
        sampling={"max_tokens": 4},
    )
    with threads_for_servers():
        run: Any = agl.Trainer(algorithm=algorithm, strategy="shm", trackers=[]).fit(environment, tasks, **options)
    assert run.status == "succeeded"
    assert run.scores["rollouts"] == 2.0 * tasks_per_step
    assert run.scores["rollouts_without_reward"] == 0.0
