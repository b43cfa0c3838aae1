"""Signs that training goes wrong, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

_BASE_STEPS: Final = 3
"""Steps whose mean is what later ones are compared with."""
_SOLVED: Final = 0.9
"""A share of successes above which a policy that hardly varies its answers has simply learned."""


class CollapseWatch:
    """Compares each step with the first ones; a warning is given when it begins to hold, not at every step."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._best_val: tuple[float, float] | None = None
        self._active: set[str] = set()

    @property
    def active(self) -> int:
        """How many warnings hold."""
        return len(self._active)

    def observe(self, metrics: Mapping[str, float]) -> list[str]:
        """Takes the numbers of a step, and returns the warnings that begin to hold with it."""
        base: dict[str, float] = {}
        for name in ("entropy", "response_length", "reward"):
            if name in metrics:
                values = self._first.setdefault(name, [])
                if len(values) < _BASE_STEPS:
                    values.append(metrics[name])
                base[name] = sum(values) / len(values)
        if "val_reward" in metrics and (self._best_val is None or metrics["val_reward"] > self._best_val[0]):
            self._best_val = (metrics["val_reward"], metrics.get("reward", 0.0))
        found = {name: text for name, rule in _RULES.items() if (text := rule(metrics, base)) is not None}
        parted = self._rewards_part(metrics)
        if parted is not None:
            found["hacking"] = parted
        # Validation is not measured at every step: what was said of it holds until it is measured again.
        kept = {"hacking"} & self._active if "val_reward" not in metrics else set()
        begun = [text for name, text in found.items() if name not in self._active]
        self._active = set(found) | kept
        return begun

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to keep."""
        return {"first": self._first, "best_val": self._best_val, "active": sorted(self._active)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state`` gave."""
        self._first = {name: list(values) for name, values in state["first"].items()}
        self._best_val = tuple(state["best_val"]) if state["best_val"] else None
        self._active = set(state["active"])

    def _rewards_part(self, metrics: Mapping[str, float]) -> str | None:
        if self._best_val is None or "val_reward" not in metrics or "reward" not in metrics:
            return None
        best, reward_then = self._best_val
        if metrics["val_reward"] < best - 0.1 and metrics["reward"] > reward_then + 0.05:
            return (
                f"the training reward rose from {reward_then:.2f} to {metrics['reward']:.2f} while the validation "
                f"reward fell from {best:.2f} to {metrics['val_reward']:.2f}: a sign of reward hacking or overfitting; "
                "read some rollouts with high reward"
            )
        return None


Rule = Callable[[Mapping[str, float], Mapping[str, float]], "str | None"]


def _entropy_falls(metrics: Mapping[str, float], base: Mapping[str, float]) -> str | None:
    entropy, first = metrics.get("entropy"), base.get("entropy", 0.0)
    if entropy is None or not metrics.get("optimizer_steps") or metrics.get("success", 0.0) >= _SOLVED:
        return None
    if entropy < 0.1 * first:
        return (
            f"entropy collapsed: {entropy:.3g} nats per token, {first:.3g} at the beginning. Groups will soon have no "
            "spread; lower lr, raise clip_high above clip_low, or set entropy_coefficient"
        )
    return None


def _entropy_rises(metrics: Mapping[str, float], base: Mapping[str, float]) -> str | None:
    entropy, first = metrics.get("entropy"), base.get("entropy", 0.0)
    if entropy is not None and first > 0 and entropy > max(3.0 * first, first + 0.5):
        return (
            f"entropy grew from {first:.3g} to {entropy:.3g} nats per token: the policy is becoming noise; lower lr, "
            "or hold it with kl_coefficient"
        )
    return None


def _length_changes(metrics: Mapping[str, float], base: Mapping[str, float]) -> str | None:
    length, first = metrics.get("response_length"), base.get("response_length", 0.0)
    better = metrics.get("reward", 0.0) - base.get("reward", 0.0)
    if length is None or first <= 0 or better > 0.05:
        return None
    if length > 2.0 * first:
        return (
            f"answers grew from {first:.0f} to {length:.0f} tokens without earning more: aggregation token-mean or "
            "seq-mean-token-sum-norm does not favour long wrong answers"
        )
    if length < 0.25 * first:
        return f"answers shrank from {first:.0f} to {length:.0f} tokens without earning more; read some of them"
    return None


def _nothing_to_compare(metrics: Mapping[str, float], base: Mapping[str, float]) -> str | None:
    share = metrics.get("groups_without_spread", 0.0)
    if share < 0.9:
        return None
    reward = metrics.get("reward", 0.0)
    why = (
        "every rollout fails" if reward < 0.1 else "nearly every rollout succeeds" if reward > 0.9 else "all earn alike"
    )
    return (
        f"{share:.0%} of the groups have no spread ({why}), so there is next to nothing to learn from: take tasks of "
        "another difficulty, more rollouts_per_task, or refill_rounds"
    )


def _answers_break_off(metrics: Mapping[str, float], base: Mapping[str, float]) -> str | None:
    share = metrics.get("responses_cut_off", 0.0)
    if share > 0.5:
        return f"{share:.0%} of the answers were cut off at max_tokens; raise it in sampling"
    return None


def _step_too_large(metrics: Mapping[str, float], base: Mapping[str, float]) -> str | None:
    kl, clipped = metrics.get("approx_kl", 0.0), metrics.get("clip_fraction", 0.0)
    if kl > 0.2 or clipped > 0.5:
        return (
            f"one update moved the policy far (approximate KL {kl:.2g}, {clipped:.0%} of the tokens clipped): lower "
            "lr, or take fewer minibatches or epochs"
        )
    return None


def _sampler_differs(metrics: Mapping[str, float], base: Mapping[str, float]) -> str | None:
    gap = metrics.get("logprob_gap_max", 0.0)
    if gap > 1.0 and metrics.get("staleness", 0.0) == 0.0:
        return (
            f"sampler and trainer give some token log-probabilities {gap:.2g} apart: set old_logprobs: trainer with "
            "importance_weights: token, or look for a difference between the two"
        )
    return None


_RULES: Final[Mapping[str, Rule]] = {
    "entropy falls": _entropy_falls,
    "entropy rises": _entropy_rises,
    "length": _length_changes,
    "spread": _nothing_to_compare,
    "cut off": _answers_break_off,
    "step": _step_too_large,
    "sampler": _sampler_differs,
}
