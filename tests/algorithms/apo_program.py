"""A search in a process of its own, which a test kills: arguments are the run's directory and the endpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import agentlightning as agl
from tests.algorithms import prompt_lab


def main(directory: Path, endpoint: str) -> None:
    from openai import AsyncOpenAI

    apo = agl.APO(
        AsyncOpenAI(base_url=endpoint, api_key="any", max_retries=0),
        gradient_model="critic",
        apply_edit_model="editor",
        beam_width=2,
        branch_factor=4,
        beam_rounds=3,
        val_batch_size=4,
    )
    directory.parent.mkdir(exist_ok=True)
    trainer = agl.Trainer(
        algorithm=apo,
        store=agl.SqliteLightningStore(directory.parent / "store.db", lease_s=2.0),  # seen as dead soon after a kill
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
    print(json.dumps({"best": apo.get_best_prompt().template, "lineage": lineage}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
