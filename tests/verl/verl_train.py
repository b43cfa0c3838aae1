"""A training as a user would start it, in a process that a test may kill; what verl did is written down for the test.

python tests/verl/verl_train.py JOB.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import agentlightning as agl


def record_advantages(path: Path) -> None:
    """Makes the trainers write, for every row, its key, reward, mask and advantages, as verl left them in its queue."""
    import transfer_queue

    from agentlightning_algorithms.verl import training

    def recording(cls: Any) -> Any:
        class Recording(cls):
            def _compute_advantage(self, batch: Any, metrics: Any) -> Any:
                batch = super()._compute_advantage(batch, metrics)
                fields = ["rm_scores", "response_mask", "advantages", "rollout_log_probs", "old_log_probs"]
                rows = transfer_queue.kv_batch_get(batch.keys, batch.partition_id, fields)
                with path.open("a") as file:
                    for position, key in enumerate(batch.keys):
                        row = {name: rows[name][position].tolist() for name in fields}
                        padding = bool(batch.tags[position].get("is_padding"))
                        kind = {name: str(rows[name].dtype) for name in ("rm_scores",)}
                        file.write(
                            json.dumps(
                                {"step": self.global_steps, "key": key, "padding": padding, **row, "dtypes": kind}
                            )
                            + "\n"
                        )
                return batch

        return Recording

    training.TRAINERS.update({name: recording(cls) for name, cls in training.TRAINERS.items()})


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    directory = Path(job["directory"])
    algorithm = agl.VERL({"trainer.device": "cpu", **job["config"]}, **job.get("settings", {}))
    from agentlightning_algorithms.verl.environment import start_ray

    start_ray(algorithm.config)
    record_advantages(directory.parent / f"{directory.name}-rows.jsonl")
    from verl_agent import agent

    trainer = agl.Trainer(
        algorithm=algorithm,
        store=agl.create_store(f"sqlite:///{directory.parent}/{directory.name}.db"),
        run_dir=directory,
        resume=job.get("resume", False),
        trackers="console",
        max_concurrency=32,
    )
    trainer.fit(agent, job["train"], job.get("val"))


if __name__ == "__main__":
    main()
