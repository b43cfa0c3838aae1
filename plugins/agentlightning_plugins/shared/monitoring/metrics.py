"""The metrics of a run: series for charts, time by phase, time left, and health in words."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from agentlightning.store.protocol import LightningStore
from agentlightning.types import Metrics, Run

MAX_STEPS: Final = 2_000
"""Number of newest steps that a page reads."""
_MAX_POINTS: Final = 300
_PHASES: Final = {
    "sampling": ("wait_s", "timing_s/gen"),
    "preparing": (
        "prepare_s", "timing_s/reward", "timing_s/old_log_prob", "timing_s/ref", "timing_s/values", "timing_s/adv",
    ),
    "training": ("train_s", "timing_s/update_critic", "timing_s/update_actor"),
    "publishing weights": ("publish_s", "timing_s/update_weights"),
    "validating": ("val_s", "timing_s/testing"),
    "testing": ("test_s",),
    "writing records": ("record_s",),
    "waiting for checkpoints": ("checkpoint_wait_s", "timing_s/save_checkpoint"),
}  # fmt: skip
"""The metrics of ``grpo`` and ``verl`` that measure parts of a step; no two of them cover the same time."""
_TOTAL_STEPS: Final = ("steps", "n_steps", "max_steps", "total_training_steps", "rounds", "beam_rounds")
_PAUSE: Final = 20
"""A longer gap between two steps, in medians, counts as time when the run was stopped, unless phases explain it."""


class Health(NamedTuple):
    """One judgement about a run."""

    name: str
    level: str
    """``good``, ``watch`` or ``bad``."""
    words: str


async def read_metrics(store: LightningStore, most: int = MAX_STEPS) -> Sequence[Metrics]:
    """Returns the metrics of the newest steps, in the order of the steps."""
    total = (await store.query_metrics(limit=0)).total
    return (await store.query_metrics(offset=max(0, total - most))).items


def make_series(metrics: Sequence[Metrics], name: str) -> list[dict[str, float]]:
    """Returns the values of a metric by step, with an interval where one is known; at most 300 points."""
    points = []
    for each in metrics:
        value = each.values.get(name)
        if value is None:
            continue
        point = {"step": each.step, "value": value}
        if f"{name}_low" in each.values and f"{name}_high" in each.values:
            point |= {"low": each.values[f"{name}_low"], "high": each.values[f"{name}_high"]}
        elif f"{name}_std" in each.values:
            count = each.values.get("rollouts", 0.0) - each.values.get("rollouts_left_out", 0.0)
            if count > 1:
                margin = 1.96 * each.values[f"{name}_std"] / math.sqrt(count)
                point |= {"low": value - margin, "high": value + margin}
        points.append(point)
    stride = max(1, math.ceil(len(points) / _MAX_POINTS))
    return points[::-1][::stride][::-1]


def sum_phases(metrics: Sequence[Metrics]) -> list[dict[str, Any]]:
    """Returns the time that each phase took in all steps, its share of the total, and the share in whole percent.

    The percentages add up to 100.
    """
    sums = dict.fromkeys(_PHASES, 0.0)
    for each in metrics:
        for name, keys in _PHASES.items():
            sums[name] += sum(each.values.get(key, 0.0) for key in keys)
        if "wait_s" not in each.values:  # the user's own training loop waits while it samples
            sums["sampling"] += each.values.get("sample_s", 0.0)
    total = sum(sums.values())
    phases = {name: spent for name, spent in sums.items() if spent > 0}
    ends = [round(100 * spent / total) for spent in itertools.accumulate(phases.values())]
    return [
        {"name": name, "seconds": spent, "share": spent / total, "percent": end - before}
        for (name, spent), before, end in zip(phases.items(), [0, *ends], ends, strict=False)
    ]


def estimate_left(run: Run, metrics: Sequence[Metrics], now: float) -> dict[str, Any] | None:
    """Returns a run's progress and remaining time by the store's clock; None if the amount of work is not known."""
    if not metrics:
        return None
    last = metrics[-1]
    algorithm = run.config.get("algorithm")
    settings = algorithm if isinstance(algorithm, Mapping) else {}
    steps = next((settings[name] for name in _TOTAL_STEPS if isinstance(settings.get(name), int)), None)
    share = last.values.get("progress", last.step / steps if steps else None)
    if share is None or not 0 < share <= 1:
        return None
    left = max(0.0, _working_time(run, metrics) * (1 - share) / share - (now - last.time))
    return {"share": share, "steps": steps, "seconds_left": left if run.status == "running" and share < 1 else None}


def _working_time(run: Run, metrics: Sequence[Metrics]) -> float:
    """Returns the seconds that the steps so far took, without the time when the run was stopped.

    Uses the mean of all steps that contain no pause, because a median would ignore validations.
    """
    pairs = [(a, b) for a, b in itertools.pairwise(metrics) if b.step > a.step and b.time > a.time]
    taken = [(b.time - a.time) / (b.step - a.step) for a, b in pairs]
    if not taken:
        return metrics[-1].time - run.created_at
    longest = _PAUSE * statistics.median(taken)
    explained = [2 * sum(b.values.get(key, 0.0) for keys in _PHASES.values() for key in keys) for _, b in pairs]
    worked = [seconds for seconds, limit in zip(taken, explained, strict=True) if seconds <= max(longest, limit)]
    return statistics.fmean(worked) * metrics[-1].step


def judge(metrics: Sequence[Metrics]) -> list[Health]:
    """Judges a run's health in words, from the metrics of its last and first steps; the worst judgements come first."""
    if not metrics:
        return []
    last: dict[str, float] = {}
    for each in metrics[-5:]:
        last |= each.values
    limits = [
        Health(name, "bad" if last[key] >= bad else "watch" if last[key] >= watch else "good", words.format(last[key]))
        for key, name, watch, bad, words in _LIMITS
        if key in last
    ]
    found = [*_judge_policy(metrics, last), *limits, *_judge_validation(metrics)]
    return sorted(found, key=lambda health: ("bad", "watch", "good").index(health.level))


def _judge_policy(metrics: Sequence[Metrics], last: Mapping[str, float]) -> list[Health]:
    found = []
    entropies = [each.values["entropy"] for each in metrics if "entropy" in each.values]
    if entropies:
        now, first = entropies[-1], entropies[0]
        level, words = "good", "The policy still explores."
        if now < 0.1 * first:
            level, words = "bad", "The policy has nearly stopped exploring; groups will have no spread."
        elif now < 0.3 * first or now > max(3 * first, first + 0.5):
            level, words = "watch", "It has changed a lot since the first step."
        found.append(Health("Entropy", level, f"{now:.3g} nats per token, {first:.3g} at the start. {words}"))
    kl, clipped = last.get("approx_kl"), last.get("clip_fraction")
    if kl is not None or clipped is not None:
        far, cut = kl or 0.0, clipped or 0.0
        level = "bad" if far > 0.2 or cut > 0.5 else "watch" if far > 0.05 or cut > 0.25 else "good"
        words = "Updates are small." if level == "good" else "One update moves the policy far; lower the learning rate."
        found.append(Health("Update size", level, f"KL {far:.2g}, {cut:.0%} of the tokens clipped. {words}"))
    norms = [each.values["grad_norm"] for each in metrics if "grad_norm" in each.values]
    if norms:
        usual = statistics.median(norms)
        level = "watch" if usual > 0 and norms[-1] > 10 * usual else "good"
        words = "Usual." if level == "good" else "More than ten times the usual."
        found.append(Health("Gradient norm", level, f"{norms[-1]:.3g}, median {usual:.3g}. {words}"))
    return found


_LIMITS: Final = (
    ("logprob_gap_max", "Sampler gap", 0.1, 1.0, "At most {:.2g} between log-probabilities of sampler and trainer."),
    ("staleness", "Staleness", 5.0, math.inf, "Rollouts are {:.0f} updates old."),
    ("groups_without_spread", "Flat groups", 0.6, 0.9, "{:.0%} of the groups have no spread, so they teach nothing."),
    ("responses_cut_off", "Truncation", 0.1, 0.5, "{:.0%} of the answers are cut off at the token limit."),
    (
        "sampler/tool_calls_unparsed",
        "Tool calls",
        1,
        math.inf,
        "{:.0f} tool calls of the step are text, because they are malformed or inside of a thought.",
    ),
    ("failure_rate", "Failures", 0.1, 0.5, "{:.0%} of the rollouts failed."),
)
"""Metrics with the value from which to watch them, the value that is bad, and what a value means."""


def _judge_validation(metrics: Sequence[Metrics]) -> list[Health]:
    validated = [each for each in metrics if "val_reward" in each.values]
    if len(validated) < 2:
        return []
    best, now = max(validated, key=lambda each: each.values["val_reward"]), validated[-1]
    top, value = best.values["val_reward"], now.values["val_reward"]
    if value >= top - 0.05:
        return [Health("Validation", "good", f"{value:.3g} at step {now.step}, the best so far is {top:.3g}.")]
    words = f"{value:.3g} at step {now.step}, {top:.3g} at step {best.step}. Read rollouts with a high reward."
    return [Health("Validation", "watch" if value >= top - 0.15 else "bad", words)]
