"""Metrics of a weight update, accumulated while it runs."""

from __future__ import annotations

import resource
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_OF_ROLLOUTS = ("groups", "rollouts_left_out", "rollouts_filled")
"""Counts of rollouts and their groups, which are the same for each policy of a run."""
_SUMMED = ("calls", "drift/", "rows", "response_tokens", "optimizer_steps", "skipped_steps", "seconds")
"""Prefixes of the metrics that are summed over policies."""


class StepMetrics:
    """Sums and maxima over the micro-batches of one optimizer step, on the device: adding does not synchronize."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        self.real_tokens = 0
        self.padded_tokens = 0

    def add(self, **sums: Tensor) -> None:
        """Adds sums over tokens; in the report they are divided by the sum called ``tokens``."""
        for name, value in sums.items():
            self.totals[name] = self.totals[name] + value if name in self.totals else value

    def add_max(self, name: str, value: Tensor) -> None:
        """Keeps the largest value."""
        self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value


class UpdateMetrics:
    """Metrics over the optimizer steps of one update; skipped steps are only counted."""

    def __init__(self) -> None:
        self.skipped_steps = 0
        self._optimizer_steps = self._real_tokens = self._padded_tokens = 0
        self._loss = self._grad_norm = 0.0
        names = ("tokens", "clip_fraction", "dual_clip_fraction", "approx_kl", "entropy", "ratio")
        self._totals = defaultdict(float, dict.fromkeys(names, 0.0))
        self._maxima: defaultdict[str, float] = defaultdict(float)

    def add_step(self, step: StepMetrics, loss: float, grad_norm: float) -> None:
        """Adds an optimizer step that changed the weights."""
        self._optimizer_steps += 1
        self._real_tokens += step.real_tokens
        self._padded_tokens += step.padded_tokens
        self._loss += loss
        self._grad_norm += grad_norm
        # One transfer for all values: on a GPU each transfer waits for the device.
        values = torch.stack([t.float() for t in (*step.totals.values(), *step.maxima.values())]).tolist()
        for name, value in zip(step.totals, values, strict=False):
            self._totals[name] += value
        for name, value in zip(step.maxima, values[len(step.totals) :], strict=True):
            self._maxima[name] = max(self._maxima[name], value)

    def report(self, seconds: float) -> dict[str, float]:
        """Returns means over tokens or steps, maxima and costs of this update; without steps, only counts and time."""
        steps, tokens = self._optimizer_steps, max(1.0, self._totals.pop("tokens"))
        means: dict[str, float] = {}
        if steps:  # without steps, zeros would look like measurements
            means = {
                "loss": self._loss / steps,
                "grad_norm": self._grad_norm / steps,
                **{name: total / tokens for name, total in self._totals.items()},
                **self._maxima,
                "tokens_per_s": self._real_tokens / max(seconds, 1e-9),
                "padding_fraction": 1.0 - self._real_tokens / self._padded_tokens,
            }
        return {
            **means,
            "optimizer_steps": float(self._optimizer_steps),
            "skipped_steps": float(self.skipped_steps),
            "seconds": seconds,
        }


def measure_memory(device: str) -> dict[str, float]:
    """Returns peak memory in GB: of this process, and of the GPU since the last step."""
    unit = 1 if sys.platform == "darwin" else 1024
    memory = {"memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9}
    if device.startswith("cuda"):
        memory["gpu_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        torch.cuda.reset_peak_memory_stats(device)
    return memory


def join_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics of several policies, each updated once, as those of one update.

    Counts and seconds are added and extremes kept. Other metrics are averaged, weighted by each policy's
    response tokens, or by seconds for a speed.
    """
    joined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        having = [part for part in parts if name in part]
        values = [part[name] for part in having]
        if name in _OF_ROLLOUTS or name.endswith("_max"):
            joined[name] = max(values)
        elif name.endswith("_min"):
            joined[name] = min(values)
        elif name.startswith(_SUMMED):
            joined[name] = sum(values)
        else:
            weight = "seconds" if name.endswith("_per_s") else "response_tokens"
            weights = [part.get(weight, 0.0) for part in having]
            joined[name] = statistics.fmean(values, weights if any(weights) else None)
    return joined
