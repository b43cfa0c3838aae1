"""A search in a process that a test kills; arguments are the run's directory and the endpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import agentlightning as agl
from tests.algorithms import prompt_lab


def search(directory: Path, endpoint: str) -> tuple[str, list[list[Any]]]:
    """Starts or resumes the search and returns the best prompt and the lineage with scores."""
    from openai import AsyncOpenAI

    apo = agl.APO(
        AsyncOpenAI(base_url=endpoint, api_key="any", max_retries=0),
        gradient_model="critic",
        apply_edit_model="editor",
        beam_width=2,
        branch_factor=4,
        beam_rounds=3,
        val_batch_size=4,
        perfect_score=None,
    )
    directory.parent.mkdir(exist_ok=True)
    trainer = agl.Trainer(
        algorithm=apo,
        store=agl.SqliteLightningStore(directory.parent / "store.db"),
        strategy="shm",
        tracer="dummy",
        trackers=[],
        run_dir=directory,
        resume=(directory / "run.json").exists(),
        initial_resources={"prompt": prompt_lab.SEED},
    )
    slow = [{**task, "seconds": 0.02} for task in prompt_lab.TRAIN]
    trainer.fit(prompt_lab.agent, slow, [{**task, "seconds": 0.02} for task in prompt_lab.VAL])
    lineage = [[each.candidate_id, each.parent_id, each.batch_score, each.full_score] for each in apo.history]
    return apo.get_best_prompt().template, lineage


if __name__ == "__main__":
    search(Path(sys.argv[1]), sys.argv[2])
