"""Trainings that many tests check. Each runs once, in a separate process, as a user would start it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "algorithms")]  # verl's wheel installs a package `tests`, hiding ours

from glossary import find_unexplained  # noqa: E402 # after the lines above
from tiny_model import save_tiny_model  # noqa: E402 # as above
from tiny_vision_model import save_tiny_vision_model  # noqa: E402 # as above

START_S = 600.0
"""Time for verl to start on a busy machine."""
PATIENCE_S = 300.0
"""Timeout of rollouts. No agent hangs: a rollout that times out fails like one that crashes."""


@dataclass
class Training:
    """Results of a training."""

    directory: Path
    log: str
    metrics: dict[int, dict[str, float]]
    """Metrics by step; of the second try for a step that was repeated."""
    rollouts: list[Any]
    resources: list[Any]
    rows: list[dict[str, Any]]
    """Records of all rows, as written by ``verl_train``."""
    killed_at: float | None = None
    spans: dict[str, list[Any]] = field(default_factory=dict)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("verl-model")
    save_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("verl-vision-model")
    save_tiny_vision_model(directory)
    return directory


def task(kind: str, text: str, turns: int = 1) -> dict[str, Any]:
    return {"kind": kind, "text": text, "turns": turns}


def job(directory: Path, model: Path, train: list[Any], config: dict[str, Any], **more: Any) -> dict[str, Any]:
    common = {
        "data": {"shuffle": False, "max_prompt_length": 250, "max_response_length": 150},
        "actor_rollout_ref": {"model.path": str(model), "actor.optim.lr": 1e-2},
    }
    settings = {"rollout_timeout_s": PATIENCE_S, **more.pop("settings", {})}
    return {"directory": str(directory), "train": train, "config": {**common, **config}, "settings": settings, **more}


def start(jobs: list[dict[str, Any]], log: Path) -> subprocess.Popen[bytes]:
    path = log.with_suffix(".json")
    path.write_text(json.dumps(jobs))
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, str(HERE / "verl_train.py"), str(path)],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run(jobs: list[dict[str, Any]], log: Path, timeout_s: float | None = None) -> None:
    process = start(jobs, log)
    try:
        code = process.wait(timeout_s or START_S * len(jobs))
    finally:
        end(process)
    assert code == 0, log.read_text()[-8000:]


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert process.poll() is None, log.read_text()[-8000:]
        if time.monotonic() > deadline:
            raise TimeoutError(log.read_text()[-8000:])
        time.sleep(0.5)


def read(directory: Path, log: Path) -> Training:
    text = log.read_text()

    async def load() -> Training:
        store = agl.create_store(f"sqlite:///{directory}.db")
        metrics: dict[int, dict[str, float]] = {}
        for record in await store.query_metrics():
            metrics.setdefault(record.step, {}).update(record.values)
        assert find_unexplained(name for values in metrics.values() for name in values) == set()
        rollouts = (await store.query_rollouts()).items
        resources = (await store.query_resources()).items
        spans = {r.rollout_id: (await store.query_spans(r.rollout_id, "latest")).items for r in rollouts}
        await store.close()
        written = directory.with_name(f"{directory.name}-rows.jsonl")
        rows = [json.loads(line) for line in written.read_text().splitlines()]
        return Training(directory, text, metrics, list(rollouts), list(resources), rows, spans=spans)

    return asyncio.run(load())


def has_begun(directory: Path, step: int) -> bool:
    """Returns whether rollouts of a step were queued, which means that the previous step is complete."""
    if not Path(f"{directory}.db").exists():
        return False

    async def look() -> bool:
        store = agl.create_store(f"sqlite:///{directory}.db")
        try:
            rollouts = await store.query_rollouts(metadata={"step": step})
            return any(rollout.mode == "train" for rollout in rollouts)
        finally:
            await store.close()

    return asyncio.run(look())


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Training:
    """Three steps of GRPO with working and failing agents, killed in the third step and resumed."""
    directory = tmp_path_factory.mktemp("verl") / "grpo"
    train = [
        *(task("tool", "say a", 3), task("stream", "say b"), task("crash", "say c"), task("overlong", "too long ")),
        *(task("fresh", "say d", 3), task("stream", "say e", 3), task("nothing", "say f"), task("tool", "say g")),
    ]
    first = job(
        directory,
        model,
        train,
        {
            "trainer": {"total_training_steps": 3, "save_freq": 1, "test_freq": 2, "val_before_train": False},
            "trainer.max_actor_ckpt_to_keep": 3,
            "data.train_batch_size": 4,
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        },
        val=[{**task("tool", "say x", 2), "source": "easy"}, {**task("crash", "say y"), "source": "hard"}],
        settings={"rows": "trajectories"},
    )
    log = directory.with_suffix(".log")
    process = start([first], log)
    try:
        wait_for(lambda: has_begun(directory, 3), process, log)
    finally:
        end(process)
    killed_at = time.time()
    with log.open("a") as file:
        file.write("\n=== killed ===\n")
    run([{**first, "resume": True}], log)
    training = read(directory, log)
    training.killed_at = killed_at
    return training


@pytest.fixture(scope="session")
def variants(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Training]:
    """Trainings of one real step with other settings, and of three with LoRA, of which the first trains on nothing."""
    return run_variants(tmp_path_factory.mktemp("verl-variants"), model)


def run_variants(base: Path, model: Path) -> dict[str, Training]:
    tools = [task("tool", "say a", 3), task("tool", "say b"), task("tool", "say c"), task("tool", "say d")]
    nothing = [task("nothing", "say e"), task("nothing", "say f")]
    configs: dict[str, dict[str, Any]] = {
        "ppo": {"algorithm.adv_estimator": "gae"},
        "rloo": {"algorithm.adv_estimator": "rloo", "actor_rollout_ref.actor.use_kl_loss": True},
        "reinforce": {
            "algorithm.adv_estimator": "reinforce_plus_plus",
            "algorithm.rollout_correction": {
                "bypass_mode": True,
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": "0.5_2.0",
            },
            "trainer.v1.trainer_mode": "colocate_async",
        },
        "credit": {"data.train_batch_size": 4},
        "remax": {"algorithm.adv_estimator": "remax", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2},
        "lora": {
            "actor_rollout_ref.model.lora_rank": 4,
            "algorithm.use_kl_in_reward": True,
            "trainer.total_training_steps": 3,
        },
    }
    one_step = {
        "trainer.total_training_steps": 1,
        "data.train_batch_size": 2,
        "actor_rollout_ref.rollout.n": 3,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
    }
    jobs = [
        job(
            base / name,
            model,
            nothing + tools if name == "lora" else tools,
            {**one_step, **config},
            settings={"rows": "trajectories"} if name == "credit" else {},
            adapter={"name": "triplet", "credit": "discounted"} if name == "credit" else None,
        )
        for name, config in configs.items()
    ]
    log = base / "variants.log"
    run(jobs, log)
    return {name: read(base / name, log) for name in configs}
