"""Rejection fine-tuning (RAFT, arXiv:2304.06767): ``python examples/raft/raft.py runs/raft`` starts or resumes it."""

import sys
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning_algorithms.grpo.settings import GRPOSettings, UpdateSettings
from agentlightning_algorithms.grpo.training_session import TrainingSession
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.demo.training import CHECKPOINT

settings = GRPOSettings(
    model=str(CHECKPOINT), steps=6, tasks_per_step=16, rollouts_per_task=4, eval_every=3, train_threads=1,
    sampling={"max_tokens": 32}, update=UpdateSettings(lr=1e-3),
)  # fmt: skip


@agl.algo
async def raft(context: Any, train_dataset: Any, val_dataset: Any) -> None:
    """Trains on the best answer to each task, if it is right."""
    async with TrainingSession.open(context, settings, train_dataset, val_dataset) as session:
        async for _ in session.steps():
            groups = await session.rollouts()
            best = [max(group, key=lambda episode: episode.reward or 0.0) for group in groups]
            rows = session.rows(episode for episode in best if episode.reward == 1.0)
            await session.forward_backward(rows, "cross_entropy")
            session.log({"chosen": len(rows), **await session.optim_step()})


def main(directory: Path) -> None:
    """Trains, or continues a training that was stopped."""
    trainer = agl.Trainer(algorithm=raft, run_dir=directory, resume=(directory / "run.json").is_file(), seed=0)
    trainer.fit(calculator_agent, make_problems("train", 256), make_problems("val", 64))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
