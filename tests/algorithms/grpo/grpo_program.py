"""A small training on disk, for tests that kill it; arguments: RUN_DIR STEPS [STALENESS].

The first start begins the run, every further one resumes it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.demo.training import CHECKPOINT


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


def main(directory: Path, steps: int, staleness: int = 0) -> None:
    resume = (directory / "run.json").is_file()
    store = agl.create_store(f"sqlite:///{directory}/../{directory.name}.db")
    algorithm = settings(steps, staleness=staleness)
    trainer = agl.Trainer(algorithm=algorithm, store=store, trackers=[], run_dir=directory, resume=resume)
    trainer.fit(calculator_agent, make_problems("train", 8), make_problems("val", 4))
    asyncio.run(store.close())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
