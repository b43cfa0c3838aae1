"""Weight updates: rows with advantages in, better weights and metrics out."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import ConfigDict
from torch import Tensor

from agentlightning.errors import ConfigError
from agentlightning_algorithms.grpo.checkpoint import (
    atomic_directory,
    random_state,
    recover_directory,
    restore_random_state,
)
from agentlightning_algorithms.grpo.loss import Aggregation, aggregate, clipped_surrogate, loss_normalizer
from agentlightning_algorithms.grpo.policy import Policy, batch_by_tokens, collate, row_length

logger = logging.getLogger("agentlightning")

Schedule = Literal["constant", "linear", "cosine"]
_STATE_FILE = "updater.pt"


@dataclass(frozen=True, slots=True)
class Row:
    """One model call as training data.

    Attributes:
        prompt_ids: tokens the model was shown; at least one.
        response_ids: tokens it sampled, the end token included; at least one.
        logprobs: the sampler's log-probability of each response token, taken after temperature.
        advantage: of the rollout that made the call.
        weight: how many copies of itself the row counts for; 0 is as if it were absent.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    advantage: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """Settings of :class:`Updater`.

    Attributes:
        lr: AdamW's learning rate at its highest.
        betas: AdamW's.
        weight_decay: AdamW's.
        schedule: how the learning rate goes from ``lr`` to ``lr * final_lr_fraction``, by updates, not optimizer steps.
        total_updates: updates the schedule spans; needed for ``linear`` and ``cosine``.
        warmup_updates: updates in which the learning rate climbs linearly to ``lr``.
        final_lr_fraction: of ``lr``, at the last update.
        max_grad_norm: gradients longer than this are scaled down to it.
        epochs: passes over the rows of one update.
        minibatches: optimizer steps per epoch. The number of rows drifts with the number of turns; that of steps must
            not.
        max_tokens_per_microbatch: bound on memory, padding included; has no influence on the result but rounding.
        clip_low: see :func:`~agentlightning_algorithms.grpo.loss.clipped_surrogate`.
        clip_high: see there.
        dual_clip: see there.
        aggregation: see :func:`~agentlightning_algorithms.grpo.loss.aggregate`.
        temperature: that of sampling.
        old_logprobs: the denominator of the ratio. ``sampler``: as recorded when sampling, which is exact and free.
            ``trainer``: recomputed before the first step, for samplers whose numerics differ; costs a forward pass.
        seed: of the order of rows.
    """

    # Where the settings come from a file, pydantic checks them: a key that nobody reads is an error.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    schedule: Schedule = "constant"
    total_updates: int | None = None
    warmup_updates: int = 0
    final_lr_fraction: float = 0.1
    max_grad_norm: float = 1.0
    epochs: int = 1
    minibatches: int = 1
    max_tokens_per_microbatch: int = 8192
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    aggregation: Aggregation = "token-mean"
    temperature: float = 1.0
    old_logprobs: Literal["sampler", "trainer"] = "sampler"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("lr", "max_grad_norm", "temperature", "epochs", "minibatches", "max_tokens_per_microbatch"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}; it must be above 0.")
        for name in ("weight_decay", "warmup_updates", "final_lr_fraction", "clip_low", "clip_high"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}; it must be at least 0.")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip = {self.dual_clip}; it must be above 1, or None for no bound.")

    def lr_at(self, update: int) -> float:
        """Returns the learning rate of the ``update``-th update, counted from 0."""
        if update < self.warmup_updates:
            return self.lr * (update + 1) / self.warmup_updates
        if self.schedule == "constant" or self.total_updates is None:
            return self.lr
        decaying = max(1, self.total_updates - 1 - self.warmup_updates)
        progress = min(1.0, (update - self.warmup_updates) / decaying)
        share = 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.lr * (self.final_lr_fraction + (1.0 - self.final_lr_fraction) * share)


class Updater:
    """Trains a policy's weights in place.

    Attributes:
        policy: whose weights are trained.
        updates: how many updates were made.
    """

    def __init__(self, policy: Policy, settings: UpdateSettings | None = None) -> None:
        self.policy = policy
        self.settings = settings = settings or UpdateSettings()
        if settings.schedule != "constant" and settings.total_updates is None:
            raise ConfigError(f"schedule = {settings.schedule!r} needs total_updates, the number of updates it spans.")
        self.updates = 0
        self._parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        self._order = torch.Generator().manual_seed(settings.seed)

    def update(self, rows: Sequence[Row]) -> dict[str, float]:
        """Makes ``epochs * minibatches`` optimizer steps on ``rows``; fewer when there are fewer rows, none without.

        A minibatch whose loss or gradient is not finite is left out with a warning, and counted in ``skipped_steps``.

        Returns:
            Means over the tokens or steps of this update: ``loss``, ``clip_fraction``, ``dual_clip_fraction``,
            ``approx_kl`` (of the weights that sampled from those being trained), ``entropy`` in nats, ``grad_norm``
            before clipping, ``lr``. Counts: ``rows``, ``response_tokens``, ``optimizer_steps``, ``skipped_steps``.
            ``logprob_gap_max``: the largest difference between the sampler's log-probability and the trainer's under
            the same weights, over the rows of the first minibatch, or over all rows where ``old_logprobs`` is
            ``trainer``. Cost: ``seconds``, ``tokens_per_s`` (prompts included), ``padding_fraction``.

        Raises:
            ValueError: a row that is empty, out of step with its log-probabilities, too long, or without a finite
                advantage.
        """
        start = time.perf_counter()
        settings = self.settings
        self._check(rows)
        lr = settings.lr_at(self.updates)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        tally = _Tally()
        old_logprobs: Sequence[Sequence[float]] = [row.logprobs for row in rows]
        if settings.old_logprobs == "trainer" and rows:
            old_logprobs = self.policy.score(rows, settings.temperature, max_tokens=settings.max_tokens_per_microbatch)
            tally.gap = max(
                abs(old - sampled)
                for row, olds in zip(rows, old_logprobs, strict=True)
                for old, sampled in zip(olds, row.logprobs, strict=True)
            )
        for epoch in range(settings.epochs):
            order = torch.randperm(len(rows), generator=self._order).tolist()
            count = min(settings.minibatches, len(rows))
            for k in range(count):
                chosen = order[k * len(rows) // count : (k + 1) * len(rows) // count]
                fresh = epoch == 0 and k == 0 and settings.old_logprobs == "sampler"
                self._step([rows[i] for i in chosen], [old_logprobs[i] for i in chosen], tally, measure_gap=fresh)
        self.updates += 1
        return {
            **tally.report(time.perf_counter() - start),
            "lr": lr,
            "rows": float(len(rows)),
            "response_tokens": float(sum(len(row.response_ids) for row in rows)),
        }

    def save(self, directory: Path) -> None:
        """Writes a checkpoint: model and tokenizer for ``from_pretrained``, optimizer, step and all random state.

        It appears under its name only when it is whole.
        """
        with atomic_directory(directory) as scratch:
            self.policy.save(scratch)
            state = {
                "updates": self.updates,
                "optimizer": self._optimizer.state_dict(),
                "order": self._order.get_state(),
                "random": random_state(),
            }
            torch.save(state, scratch / _STATE_FILE)

    def load(self, directory: Path) -> None:
        """Continues exactly where :meth:`save` was called, the process's random generators included.

        Raises:
            ConfigError: no checkpoint there, or that of another model.
        """
        directory = recover_directory(directory)
        file = directory / _STATE_FILE
        if not file.is_file():
            raise ConfigError(f"no checkpoint in {str(directory)!r}: {_STATE_FILE} is missing.")
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        self.policy.load_weights(directory)
        self._optimizer.load_state_dict(state["optimizer"])
        self._order.set_state(state["order"])
        self.updates = state["updates"]
        restore_random_state(state["random"])

    def _step(
        self, rows: Sequence[Row], old_logprobs: Sequence[Sequence[float]], tally: _Tally, *, measure_gap: bool
    ) -> None:
        """Accumulates the gradient of one minibatch, micro-batch by micro-batch, and moves the weights."""
        normalizer = _normalizer(rows, self.settings.aggregation)
        if normalizer == 0:
            return
        sums = _Sums()
        for indices in batch_by_tokens([row_length(row) for row in rows], self.settings.max_tokens_per_microbatch):
            self._accumulate([rows[i] for i in indices], [old_logprobs[i] for i in indices], normalizer, sums)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.max_grad_norm, foreach=True))
        loss = float(sums.totals["loss"])
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._optimizer.step()
            tally.add_step(sums, loss, grad_norm)
            if measure_gap:
                tally.gap = float(sums.gap)
        else:
            tally.skipped_steps += 1
            logger.warning(
                "update %d: a minibatch of %d rows was skipped, its loss is %s and its gradient norm %s",
                self.updates, len(rows), loss, grad_norm,
            )  # fmt: skip
        self._optimizer.zero_grad(set_to_none=True)

    def _accumulate(
        self, rows: Sequence[Row], old_logprobs: Sequence[Sequence[float]], normalizer: float, sums: _Sums
    ) -> None:
        """Adds one micro-batch's share of the minibatch's gradient and metrics."""
        settings, device = self.settings, self.policy.device
        batch = collate(rows, device)
        mask_BT = batch.mask_BT
        old_N = torch.tensor([value for logprobs in old_logprobs for value in logprobs], device=device)
        old_BT = torch.zeros(mask_BT.shape, device=device).masked_scatter(mask_BT, old_N)
        advantage_B = torch.tensor([row.advantage for row in rows], device=device)
        weight_B = torch.tensor([row.weight for row in rows], device=device)

        logprob_BT, entropy_BT = self.policy.token_logprobs(batch, settings.temperature)
        surrogate = clipped_surrogate(
            logprob_BT,
            old_BT,
            advantage_B[:, None],
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
        )
        loss = aggregate(
            surrogate.loss_BT, mask_BT.float(), settings.aggregation, weight_B=weight_B, normalizer=normalizer
        )
        loss.backward()

        counted_BT = mask_BT * weight_B[:, None]
        sums.add("loss", loss.detach())
        sums.add("tokens", counted_BT.sum())
        sums.add("clip_fraction", (surrogate.clipped_BT * counted_BT).sum())
        sums.add("dual_clip_fraction", (surrogate.dual_clipped_BT * counted_BT).sum())
        sums.add("approx_kl", (-surrogate.log_ratio_BT * counted_BT).sum())
        sums.add("entropy", (entropy_BT * counted_BT).sum())
        sums.gap = torch.maximum(sums.gap, ((logprob_BT.detach() - old_BT).abs() * mask_BT).max().cpu())
        sums.real_tokens += sum(row_length(row) for row in rows)
        sums.padded_tokens += batch.input_BL.numel()

    def _check(self, rows: Sequence[Row]) -> None:
        for i, row in enumerate(rows):
            n_prompt, n_response = len(row.prompt_ids), len(row.response_ids)
            if not n_prompt or not n_response:
                raise ValueError(
                    f"row {i} has {n_prompt} prompt and {n_response} response tokens; both need at least one."
                )
            if len(row.logprobs) != n_response:
                raise ValueError(f"row {i} has {n_response} response tokens but {len(row.logprobs)} log-probabilities.")
            if n_prompt + n_response > self.policy.max_length:
                raise ValueError(
                    f"row {i} has {n_prompt + n_response} tokens; the model has {self.policy.max_length} positions."
                )
            if not (math.isfinite(row.advantage) and math.isfinite(row.weight) and row.weight >= 0):
                raise ValueError(
                    f"row {i} has advantage {row.advantage} and weight {row.weight}; both must be finite numbers."
                )


def _normalizer(rows: Sequence[Row], aggregation: Aggregation) -> float:
    length_B = torch.tensor([[float(len(row.response_ids))] for row in rows], dtype=torch.float64)
    weight_B = torch.tensor([row.weight for row in rows], dtype=torch.float64)
    return float(loss_normalizer(length_B, aggregation, weight_B))


class _Sums:
    """What the micro-batches of one minibatch add up to; on the device, so that adding waits for nothing."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.gap = torch.zeros(())
        self.real_tokens = 0
        self.padded_tokens = 0

    def add(self, name: str, value: Tensor) -> None:
        self.totals[name] = self.totals[name] + value if name in self.totals else value


class _Tally:
    """What the minibatches of one update report; those that were skipped are only counted."""

    def __init__(self) -> None:
        self.gap = 0.0
        self.skipped_steps = 0
        self._optimizer_steps = 0
        self._real_tokens = 0
        self._padded_tokens = 0
        self._totals = dict.fromkeys(
            ("loss", "grad_norm", "tokens", "clip_fraction", "dual_clip_fraction", "approx_kl", "entropy"), 0.0
        )

    def add_step(self, sums: _Sums, loss: float, grad_norm: float) -> None:
        self._optimizer_steps += 1
        self._real_tokens += sums.real_tokens
        self._padded_tokens += sums.padded_tokens
        values = {**{name: float(value) for name, value in sums.totals.items()}, "loss": loss, "grad_norm": grad_norm}
        for name, value in values.items():
            self._totals[name] += value

    def report(self, seconds: float) -> dict[str, float]:
        totals, steps, tokens = dict(self._totals), max(1, self._optimizer_steps), max(1.0, self._totals["tokens"])
        del totals["tokens"]
        means = {name: total / (steps if name in ("loss", "grad_norm") else tokens) for name, total in totals.items()}
        return {
            **means,
            "logprob_gap_max": self.gap,
            "optimizer_steps": float(self._optimizer_steps),
            "skipped_steps": float(self.skipped_steps),
            "seconds": seconds,
            "tokens_per_s": self._real_tokens / max(seconds, 1e-9),
            "padding_fraction": 1.0 - self._real_tokens / self._padded_tokens if self._padded_tokens else 0.0,
        }
