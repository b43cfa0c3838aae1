"""Warnings about training that goes wrong: collapse, divergence, reward hacking."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

_BASE_STEPS: Final = 3
"""Number of first steps; later steps are compared with their mean."""
_MAX_GAP: Final = {True: 1e-3, False: 1.0}
"""Largest difference of log-probabilities that rounding explains: in float32, and in other precisions."""
_IDLE: Final = 0.5
"""Share of the sampling time that the policy server may idle before a hint is given."""
_SOLVED: Final = 0.9
"""Success rate above which low entropy means that the task has been learned."""


class TrainingMonitor:
    """Compares each step with the first ones; a warning is returned when it begins to hold, not at every step."""

    def __init__(self, *, is_exact: bool = True) -> None:
        """``is_exact``: sampler and trainer compute in float32, so their log-probabilities differ by rounding only."""
        self._max_gap = _MAX_GAP[is_exact]
        self._first: dict[str, list[float]] = {}
        self._best_val: tuple[float, float | None] | None = None
        self._active: set[str] = set()
        self._has_hinted = False

    @property
    def active(self) -> int:
        """Number of warnings that hold now."""
        return len(self._active)

    def observe(self, metrics: Mapping[str, float]) -> list[str]:
        """Takes the metrics of a step and returns the warnings that begin to hold with it."""
        base = {"entropy": 0.0, "response_length": 0.0, "reward": 0.0}
        for name in base:
            if name in metrics:
                values = self._first.setdefault(name, [])
                if len(values) < _BASE_STEPS:
                    values.append(metrics[name])
                base[name] = sum(values) / len(values)
        if "val_reward" in metrics and (self._best_val is None or metrics["val_reward"] > self._best_val[0]):
            self._best_val = (metrics["val_reward"], metrics.get("reward"))
        found = {**_check_policy(metrics, base), **_check_update(metrics, self._max_gap)}
        found |= self._check_validation(metrics, base["reward"])
        # A warning about the validation reward holds until the reward is measured again.
        kept = {"hacking"} & self._active if "val_reward" not in metrics else set()
        begun = [text for name, text in found.items() if name not in self._active]
        self._active = set(found) | kept
        return begun

    def idle_hint(self, metrics: Mapping[str, float]) -> str | None:
        """Returns a hint, once, if the policy server idles while rollouts wait for a runner."""
        idle, queued_s = metrics.get("sampler/idle_fraction", 0.0), metrics.get("queue_wait_s", 0.0)
        if self._has_hinted or idle <= _IDLE or queued_s <= metrics.get("rollout_s", math.inf):
            return None
        self._has_hinted = True
        return (
            f"the policy server was idle for {idle:.0%} of the sampling while rollouts waited {queued_s:.1f} s for a "
            "runner: raise max_concurrency if agents wait for tools, or n_runners if they compute and cores are free"
        )

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"first": self._first, "best_val": self._best_val, "active": sorted(self._active)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self._first = {name: list(values) for name, values in state["first"].items()}
        self._best_val = tuple(state["best_val"]) if state["best_val"] else None
        self._active = set(state["active"])

    def _check_validation(self, metrics: Mapping[str, float], first: float) -> dict[str, str]:
        """``first`` is the reward of the first steps, which a validation before them is compared with."""
        if self._best_val is None or "val_reward" not in metrics or "reward" not in metrics:
            return {}
        best, known = self._best_val
        reward_then = first if known is None else known
        if metrics["val_reward"] >= best - 0.1 or metrics["reward"] <= reward_then + 0.05:
            return {}
        return {
            "hacking": f"the training reward rose from {reward_then:.2f} to {metrics['reward']:.2f} while the "
            f"validation reward fell from {best:.2f} to {metrics['val_reward']:.2f}: a sign of reward hacking or "
            "overfitting; read some rollouts with high reward"
        }


def _check_policy(metrics: Mapping[str, float], base: Mapping[str, float]) -> dict[str, str]:
    """Compares entropy and response length with the first steps; finds rollouts without model calls."""
    found = {}
    entropy, first = metrics.get("entropy"), base["entropy"]
    if entropy is not None:
        solved = metrics.get("success_rate", 0.0) >= _SOLVED
        if metrics.get("optimizer_steps") and not solved and entropy < 0.1 * first:
            found["entropy falls"] = (
                f"entropy collapsed: {entropy:.3g} nats per token, {first:.3g} at the beginning. Groups will soon have "
                "no spread; lower lr, raise clip_high above clip_low, or set entropy_coefficient"
            )
        if first > 0 and entropy > max(3.0 * first, first + 0.5):
            found["entropy rises"] = (
                f"entropy grew from {first:.3g} to {entropy:.3g} nats per token: the policy is becoming noise; lower "
                "lr, or set kl_coefficient"
            )
    if share := metrics.get("rollouts_without_calls"):
        found["no calls"] = (
            f"{share:.0%} of the rollouts ended without a model call that can be trained on: the agent answers from a "
            "cache, calls another endpoint than llm.endpoint, or agent_match selects no agent; `agl doctor` tells which"
        )
    length, first = metrics.get("response_length"), base["response_length"]
    improved = metrics.get("reward", 0.0) - base["reward"] > 0.05
    if length is not None and first > 0 and not improved:
        if length > 2.0 * first:
            found["length"] = (
                f"answers grew from {first:.0f} to {length:.0f} tokens without a higher reward: set aggregation to "
                "token-mean or seq-mean-token-sum-norm, which do not favour long wrong answers"
            )
        if length < 0.25 * first:
            found["length"] = (
                f"answers shrank from {first:.0f} to {length:.0f} tokens without a higher reward; read some of them"
            )
    return found


def _check_update(metrics: Mapping[str, float], max_gap: float) -> dict[str, str]:
    """Checks the batch and the step that was made with it."""
    found = {}
    flat = metrics.get("groups_without_spread", 0.0)
    if flat >= 0.9:
        why = f"equal rewards within each, {metrics.get('reward', 0.0):.3g} on average"
        if metrics.get("success_rate", 0.0) >= _SOLVED:
            why = "nearly every rollout succeeds"
        elif metrics.get("failure_rate", 0.0) >= _SOLVED:
            why = "nearly every rollout fails"
        found["spread"] = (
            f"{flat:.0%} of the groups have no spread ({why}), so there is next to nothing to learn from: use tasks of "
            "another difficulty, more rollouts_per_task, or refill_rounds"
        )
    if metrics.get("advantage_failed", 0.0) > 0:
        found["failures"] = (
            f"{metrics.get('failure_rate', 0.0):.0%} of the rollouts failed or have no reward, and their mean "
            f"advantage is {metrics['advantage_failed']:+.2g}: the policy learns to fail; lower "
            "experience.failed_reward, or check reward_shaping"
        )
    cut_off = metrics.get("responses_cut_off", 0.0)
    if cut_off > 0.5:
        found["cut off"] = f"{cut_off:.0%} of the answers were cut off at max_tokens; raise it in sampling"
    kl, clipped = metrics.get("approx_kl", 0.0), metrics.get("clip_fraction", 0.0)
    if kl > 0.2 or clipped > 0.5:
        found["step"] = (
            f"one update moved the policy far (approximate KL {kl:.2g}, {clipped:.0%} of the tokens clipped): lower "
            "lr, or use fewer minibatches or epochs"
        )
    gap = metrics.get("logprob_gap_max", 0.0)
    if gap > max_gap and metrics.get("staleness", 0.0) == 0.0:
        found["sampler"] = f"log-probabilities of sampler and trainer differ by up to {gap:.2g}: {_cause(metrics)}"
    return found


def _cause(metrics: Mapping[str, float]) -> str:
    """Returns the likely cause of different log-probabilities under the same weights."""
    others = metrics.get("calls_of_other_sampling", 0.0)
    if others:
        return (
            f"{others:.0f} calls were sampled with a temperature, top_p or top_k other than the run's; leave "
            "sampling.force on, or set it to false to train each call with its own values"
        )
    return (
        "the calls were sampled with the run's parameters, so either the server computes the model differently "
        "(precision, kernels, or weights that it did not reload) or the agent constrains decoding, for example by "
        "response_format; set old_logprobs: trainer with importance_weights: token"
    )
