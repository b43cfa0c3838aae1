"""A training as a user would start it, in a process that a test may kill, with records of verl's rows for the test.

python tests/verl/verl_train.py JOB.json
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path
from typing import Any

import agentlightning as agl


def record_advantages(path: Path) -> None:
    """Makes the trainers record key, rewards, mask, advantages and log-probabilities of every row in verl's queue."""
    import transfer_queue

    from agentlightning_algorithms.verl import trainer

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
                        where = {"step": self.global_steps, "life": os.getpid(), "key": key, "padding": padding}
                        file.write(json.dumps({**where, **row, "dtypes": kind}) + "\n")
                return batch

        return Recording

    own = {"sync": trainer.SyncTrainer, "colocate_async": trainer.ColocateAsyncTrainer}
    trainer.TRAINERS.update({name: recording(cls) for name, cls in own.items()})


def start_cluster(nodes: int) -> str:
    """Starts Ray's processes of several nodes, each of which has one GPU for Ray, and returns their address."""
    from ray.cluster_utils import Cluster

    from agentlightning_plugins.shared.processes.ray_start import start_patiently

    resources = {"num_cpus": 8, "num_gpus": 1, "include_dashboard": False}
    cluster = start_patiently(lambda: Cluster(initialize_head=True, head_node_args=dict(resources)))
    for _ in range(nodes - 1):
        start_patiently(lambda: cluster.add_node(**resources))
    atexit.register(cluster.shutdown)
    return str(cluster.address)


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text()):
        run(job)


def run(job: dict[str, Any]) -> None:
    from agentlightning_algorithms.verl.config import compose_config

    directory = Path(job["directory"])
    compose_config({"trainer.device": "cpu"})  # chooses the platform, before verl is imported
    if job.get("shows_images"):
        from vision_agent import agent
        from vision_server import install

        install()
    else:
        from verl_agent import agent
    record_advantages(directory.with_name(f"{directory.name}-rows.jsonl"))
    if "nodes" in job:
        job["config"]["+ray_kwargs.ray_init.address"] = start_cluster(job["nodes"])
    trainer = agl.Trainer(
        algorithm=agl.VERL({"trainer.device": "cpu", **job["config"]}, **job.get("settings", {})),
        store=agl.create_store(f"sqlite:///{directory}.db"),
        adapter=job.get("adapter"),
        run_dir=directory,
        resume=job.get("resume", False),
        trackers="console",
        max_concurrency=32,
    )
    trainer.fit(agent, job["train"], job.get("val"))


if __name__ == "__main__":
    main()
