"""The result of a run so far, as the dashboard and the report of a run show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from agentlightning.store.protocol import LightningStore
from agentlightning.types import Metrics, Run
from agentlightning_plugins.shared.monitoring.metrics import estimate_left, judge, make_series, read_metrics, sum_phases
from agentlightning_plugins.shared.monitoring.runs import count_rollouts, describe_run, find_run

_UNITS: Final = {
    "best_score": "", "beam_score_mean": "", "tokens": "", "entropy": "nats per token", "response_length": "tokens",
    "success_rate": "", "grad_norm": "before clipping", "logprob_gap_max": "largest, between sampler and trainer",
    "clip_fraction": "share of tokens", "groups_without_spread": "share", "responses_cut_off": "share",
    "calls_per_rollout": "mean", "tokens_per_s": "",
}  # fmt: skip
"""The metrics that are drawn, and their units."""
_REWARDS: Final = ("reward", "val_reward", "test_reward")


def find_curve(steps: Sequence[Metrics]) -> list[dict[str, float]]:
    """Returns the rewards by step that stand for a run: in training, else in validation."""
    return make_series(steps, "reward") or make_series(steps, "train_reward") or make_series(steps, "val_reward")


async def read_result(store: LightningStore, metric: str = "") -> dict[str, Any]:
    """Returns the reward, health, time by phase and metrics of a store's run, as plain JSON values.

    Args:
        store: the store, scoped to the run.
        metric: a metric that is drawn before the others, if the run has it.
    """
    run = await find_run(store) or Run(run_id=store.run_id, name=store.run_id)
    steps = await read_metrics(store)
    names = list(dict.fromkeys(name for each in steps for name in each.values))
    reward: dict[str, Any] = {name: make_series(steps, name) for name in _REWARDS if name in names}
    if "reward" not in reward and "train_reward" in names:
        reward["train_reward"] = make_series(steps, "train_reward")
    drawn = [metric] * (metric in names) + [name for name in _UNITS if name in names and name != metric]
    counts = await count_rollouts(store)
    return {
        "run": describe_run(run),
        "rollouts": counts,
        "total": sum(counts.values()),
        "step": steps[-1].step if steps else None,
        "last": dict(steps[-1].values) if steps else {},
        "reward": reward,
        "has_ledger": any(name.startswith("outcome/") for name in names),
        "health": [health._asdict() for health in judge(steps)],
        "phases": sum_phases(steps),
        "progress": estimate_left(run, steps, store.now()),
        "metrics": {name: make_series(steps, name) for name in drawn},
        "units": {name: _UNITS.get(name, "") for name in drawn},
        "metric_names": [name for name in names if name not in (*_REWARDS, "train_reward")],
    }
