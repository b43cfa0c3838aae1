"""Settings other than the demo's that also learn the demo's task."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.demo.training import CHECKPOINT, GRPO_SETTINGS

CORRECTED = {"old_logprobs": "trainer", "importance_weights": "token"}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("settings", "update"),
    [
        pytest.param({"staleness": 1}, {}, id="one step off, corrected by the ratio"),
        pytest.param({"staleness": 1}, CORRECTED, id="one step off, corrected by importance weights"),
        pytest.param({"experience": {"rows": "trajectories"}}, {}, id="calls joined to trajectories"),
        pytest.param({"lora": {"rank": 16}}, {"lr": 2e-3}, id="LoRA"),
        pytest.param({}, {"objective": "cispo", "clip_high": 0.28, "lr": 3e-4}, id="CISPO"),
        pytest.param(
            {},
            {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"},
            id="GSPO",
        ),
    ],
)
def test_the_task_is_learned(tmp_path: Path, settings: dict[str, Any], update: dict[str, Any]) -> None:
    store = agl.create_store("memory://")
    algorithm = {
        **GRPO_SETTINGS,
        "model": str(CHECKPOINT),
        "steps": 24,
        "eval_every": 0,
        **settings,
        "update": {**GRPO_SETTINGS["update"], **update},
    }
    trainer = agl.Trainer(algorithm=algorithm, store=store, trackers=[], run_dir=tmp_path / "run", max_concurrency=64)
    trainer.fit(calculator_agent, make_problems("train", 4096), make_problems("val", 96))
    steps = [step.values for step in asyncio.run(store.query_metrics()).items]
    stale = float(settings.get("staleness", 0))
    assert [step["staleness"] for step in steps[1:]] == [0.0, *[stale] * 23]
    assert sum(step["calls_stale"] + step["skipped_steps"] for step in steps[1:]) == 0
    assert steps[0]["val_reward"] <= 0.3
    assert steps[-1]["val_reward"] >= steps[0]["val_reward"] + 0.3
