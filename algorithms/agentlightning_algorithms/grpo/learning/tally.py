"""The numbers of one update, summed while it runs."""

from __future__ import annotations

import torch
from torch import Tensor


class Sums:
    """What the micro-batches of one minibatch add up to; on the device, so that adding waits for nothing."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.largest: dict[str, Tensor] = {}
        self.real_tokens = 0
        self.padded_tokens = 0

    def add(self, name: str, value: Tensor) -> None:
        """Adds a sum over tokens; ``tokens`` is what they are divided by in the end."""
        self.totals[name] = self.totals[name] + value if name in self.totals else value

    def raise_to(self, name: str, value: Tensor) -> None:
        """Keeps the largest."""
        self.largest[name] = torch.maximum(self.largest[name], value) if name in self.largest else value


class Tally:
    """What the minibatches of one update report; those that were skipped are only counted."""

    def __init__(self) -> None:
        self.skipped_steps = 0
        self.largest: dict[str, float] = {"logprob_gap_max": 0.0, "ratio_max": 0.0}
        self._optimizer_steps = 0
        self._real_tokens = 0
        self._padded_tokens = 0
        self._steps = {"loss": 0.0, "grad_norm": 0.0, "tokens": 0.0}
        self._totals = dict.fromkeys(("clip_fraction", "dual_clip_fraction", "approx_kl", "entropy", "ratio"), 0.0)

    def add_step(self, sums: Sums, loss: float, grad_norm: float) -> None:
        """Counts a minibatch that moved the weights."""
        self._optimizer_steps += 1
        self._real_tokens += sums.real_tokens
        self._padded_tokens += sums.padded_tokens
        names = [*sums.totals, *sums.largest]
        # One transfer for all: on a GPU each would wait for the device.
        values = torch.stack([t.float() for t in (*sums.totals.values(), *sums.largest.values())]).tolist()
        read = dict(zip(names, values, strict=True))
        self._steps["loss"] += loss
        self._steps["grad_norm"] += grad_norm
        self._steps["tokens"] += read["tokens"]
        for name in sums.totals:
            if name not in self._steps:
                self._totals[name] = self._totals.get(name, 0.0) + read[name]
        for name in sums.largest:
            self.largest[name] = max(self.largest.get(name, 0.0), read[name])

    def report(self, seconds: float) -> dict[str, float]:
        """Means over the tokens or steps of this update, extremes and costs."""
        steps, tokens = max(1, self._optimizer_steps), max(1.0, self._steps["tokens"])
        return {
            "loss": self._steps["loss"] / steps,
            "grad_norm": self._steps["grad_norm"] / steps,
            **{name: total / tokens for name, total in self._totals.items()},
            **self.largest,
            "optimizer_steps": float(self._optimizer_steps),
            "skipped_steps": float(self.skipped_steps),
            "seconds": seconds,
            "tokens_per_s": self._real_tokens / max(seconds, 1e-9),
            "padding_fraction": 1.0 - self._real_tokens / self._padded_tokens if self._padded_tokens else 0.0,
        }
