"""Weight updates: rows with advantages in, better weights and metrics out."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from agentlightning.errors import ConfigError
from agentlightning_algorithms.grpo.learning.correction import importance_weights, trusted_tokens
from agentlightning_algorithms.grpo.learning.loss import (
    Surrogate,
    aggregate,
    clipped_surrogate,
    clipped_weight_surrogate,
    kl_penalty,
    loss_normalizer,
    sequence_surrogate,
)
from agentlightning_algorithms.grpo.learning.row import Row, check_rows
from agentlightning_algorithms.grpo.learning.setting import UpdateSettings
from agentlightning_algorithms.grpo.learning.tally import Sums, Tally
from agentlightning_algorithms.grpo.model.checkpoint import (
    atomic_directory,
    random_state,
    recover_directory,
    restore_random_state,
)
from agentlightning_algorithms.grpo.model.policy import Policy, batch_by_tokens, collate, row_length
from agentlightning_algorithms.grpo.model.reference import Reference

logger = logging.getLogger("agentlightning")

_STATE_FILE = "updater.pt"


class Updater:
    """Trains a policy's weights in place.

    Attributes:
        policy: whose weights are trained; of them those that require a gradient.
        updates: how many updates were made.
        reference: what the policy is not to leave; None where nothing holds it.
    """

    def __init__(self, policy: Policy, settings: UpdateSettings | None = None, *, autocast: bool = False) -> None:
        """Makes the optimizer.

        Args:
            policy: whose weights are trained.
            settings: how.
            autocast: compute in bfloat16 where that is safe, with the weights as they are.

        Raises:
            ConfigError: a schedule without an end.
        """
        self.policy = policy
        self.settings = settings = settings or UpdateSettings()
        if settings.schedule != "constant" and settings.total_updates is None:
            raise ConfigError(f"schedule = {settings.schedule!r} needs total_updates, the number of updates it spans.")
        self.updates = 0
        self._autocast = autocast
        self._parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        self._order = torch.Generator().manual_seed(settings.seed)
        self.reference = Reference(self._parameters, settings.reference_decay) if settings.kl_coefficient else None
        if settings.gradient_checkpointing:
            _checkpoint_gradients(policy)

    def update(self, rows: Sequence[Row]) -> dict[str, float]:
        """Makes ``epochs * minibatches`` optimizer steps on ``rows``; fewer when there are fewer rows, none without.

        A minibatch whose loss or gradient is not finite is left out with a warning, and counted in ``skipped_steps``.

        Returns:
            Means over the tokens or steps of this update: ``loss``, ``clip_fraction``, ``dual_clip_fraction``,
            ``approx_kl`` (of the weights that sampled from those being trained), ``ratio``, ``entropy`` in nats,
            ``grad_norm`` before clipping, ``lr``. ``reference_kl`` where there is a reference;
            ``importance_weight`` with ``_max`` and ``_held`` (the share that was truncated or dropped), and
            ``trusted_fraction``, where there is a correction. Counts:
            ``rows``, ``response_tokens``, ``optimizer_steps``, ``skipped_steps``. ``logprob_gap_max``: the largest
            difference between the sampler's log-probability and the trainer's under the same weights, over the rows
            of the first minibatch, or over all rows where ``old_logprobs`` is ``trainer``. Cost: ``seconds``,
            ``tokens_per_s`` (prompts included), ``padding_fraction``.

        Raises:
            ValueError: a row that is empty, out of step with its log-probabilities, too long, or without a finite
                advantage.
        """
        start = time.perf_counter()
        settings = self.settings
        check_rows(rows, self.policy.max_length)
        lr = settings.lr_at(self.updates)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        tally = Tally()
        lots = self._prepare(rows, tally)
        for epoch in range(settings.epochs):
            minibatches = self._cut(lots)
            for k, minibatch in enumerate(minibatches):
                fresh = epoch == 0 and k == 0 and settings.old_logprobs == "sampler"
                self._step(minibatch, tally, measure_gap=fresh)
        self.updates += 1
        if self.reference is not None:
            self.reference.follow()
        return {
            **tally.report(time.perf_counter() - start),
            **self._report_correction(lots),
            "lr": lr,
            "rows": float(len(rows)),
            "response_tokens": float(sum(row.n_sampled for row in rows)),
        }

    def reference_kl(self, rows: Sequence[Row]) -> list[list[float]]:
        """Returns the divergence from the reference at every response token, by the sampler's log-probabilities.

        Where the token was given, it is 0.
        """
        scores = self._score_reference(rows)
        divergences = []
        for row, reference in zip(rows, scores, strict=True):
            kl_T = kl_penalty(torch.tensor(row.logprobs), torch.tensor(reference), self.settings.kl_estimator)
            if row.mask is not None:
                kl_T = kl_T * torch.tensor(row.mask)
            divergences.append(kl_T.tolist())
        return divergences

    def save(self, directory: Path, caller: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint: model and tokenizer for ``from_pretrained``, optimizer, step and all random state.

        Of a model with LoRA the additions are written. It appears under its name only when it is whole.

        Args:
            directory: what is there is replaced.
            caller: what the caller has to keep, of plain values.
        """
        with atomic_directory(directory) as scratch:
            self.policy.save_trained(scratch)
            state = {
                "updates": self.updates,
                "optimizer": self._optimizer.state_dict(),
                "order": self._order.get_state(),
                "reference": None if self.reference is None else self.reference.state(),
                "random": random_state(),
                "caller": dict(caller or {}),
            }
            torch.save(state, scratch / _STATE_FILE)

    def load(self, directory: Path) -> dict[str, Any]:
        """Continues exactly where :meth:`save` was called, the process's random generators included.

        Returns:
            What the caller gave to keep.

        Raises:
            ConfigError: no checkpoint there, or that of another model.
        """
        directory = recover_directory(directory)
        file = directory / _STATE_FILE
        if not file.is_file():
            raise ConfigError(f"no checkpoint in {str(directory)!r}: {_STATE_FILE} is missing.")
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        self.policy.load_trained(directory)
        if self.reference is not None and state.get("reference") is not None:
            self.reference.restore(state["reference"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._order.set_state(state["order"])
        self.updates = state["updates"]
        restore_random_state(state["random"])
        return dict(state["caller"])

    def _prepare(self, rows: Sequence[Row], tally: Tally) -> list[_Lot]:
        """Computes what the weights of the beginning say of each row."""
        settings = self.settings
        olds: Sequence[Sequence[float]] = [row.logprobs for row in rows]
        if settings.old_logprobs == "trainer" and rows:
            with self._precision():
                olds = self.policy.score(rows, settings.temperature, max_tokens=settings.max_tokens_per_microbatch)
        holding = self.reference is not None and settings.kl_in == "loss"
        references = self._score_reference(rows) if holding else [None] * len(rows)
        lots = [
            _Lot(row, torch.tensor(row.sampled(old)), None if ref is None else torch.tensor(row.sampled(ref)))
            for row, old, ref in zip(rows, olds, references, strict=True)
        ]
        if settings.old_logprobs == "trainer":
            for lot in lots:
                self._correct(lot, tally)
        lengths: dict[object, float] = {}
        for i, lot in enumerate(lots):
            key = i if lot.row.rollout is None else ("rollout", lot.row.rollout)
            lot.key = key
            lengths[key] = lengths.get(key, 0.0) + lot.row.weight * float(lot.kept_T.sum())
        for lot in lots:
            lot.rollout_length = lengths[lot.key]
        return lots

    def _correct(self, lot: _Lot, tally: Tally) -> None:
        """Compares the sampler with the trainer, and gives the row's tokens weights and a mask for it."""
        settings = self.settings
        log_ratio_T = lot.old_T - torch.tensor(lot.row.sampled(lot.row.logprobs))
        gap = float(log_ratio_T.abs().max())
        if math.isfinite(gap):
            tally.largest["logprob_gap_max"] = max(tally.largest["logprob_gap_max"], gap)
        mask_1T = torch.ones(1, len(log_ratio_T))
        if settings.trust_mask is not None:
            lot.kept_T = trusted_tokens(
                log_ratio_T[None], mask_1T, settings.trust_mask, lower=settings.trust_lower, upper=settings.trust_upper
            )[0]
        if settings.importance_weights is not None:
            lot.importance_T = importance_weights(
                log_ratio_T[None],
                mask_1T,
                settings.importance_weights,
                upper=settings.importance_upper,
                lower=settings.importance_lower,
            )[0]

    def _report_correction(self, lots: Sequence[_Lot]) -> dict[str, float]:
        report: dict[str, float] = {}
        if lots and self.settings.trust_mask is not None:
            report["trusted_fraction"] = float(torch.cat([lot.kept_T for lot in lots]).mean())
        if lots and self.settings.importance_weights is not None:
            weight_N = torch.cat([lot.importance_T for lot in lots])
            held_N = (weight_N >= self.settings.importance_upper) | (weight_N == 0)
            report["importance_weight"] = float(weight_N.mean())
            report["importance_weight_max"] = float(weight_N.max())
            report["importance_weight_held"] = float(held_N.float().mean())
        return report

    def _cut(self, lots: Sequence[_Lot]) -> list[list[_Lot]]:
        """Deals shuffled rows into minibatches; whole rollouts where the loss is a mean over those."""
        if self.settings.aggregation == "rollout-mean":
            rollouts: dict[object, list[_Lot]] = {}
            for lot in lots:
                rollouts.setdefault(lot.key, []).append(lot)
            pieces = list(rollouts.values())
        else:
            pieces = [[lot] for lot in lots]
        order = torch.randperm(len(pieces), generator=self._order).tolist()
        count = min(self.settings.minibatches, len(pieces))
        return [
            [lot for i in order[k * len(order) // count : (k + 1) * len(order) // count] for lot in pieces[i]]
            for k in range(count)
        ]

    def _step(self, lots: Sequence[_Lot], tally: Tally, *, measure_gap: bool) -> None:
        """Accumulates the gradient of one minibatch, micro-batch by micro-batch, and moves the weights."""
        normalizer = self._normalizer(lots)
        if normalizer == 0:
            return
        sums = Sums()
        for indices in batch_by_tokens([row_length(lot.row) for lot in lots], self.settings.max_tokens_per_microbatch):
            self._accumulate([lots[i] for i in indices], normalizer, sums, measure_gap=measure_gap)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.max_grad_norm, foreach=True))
        loss = float(sums.totals.pop("loss"))
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._optimizer.step()
            tally.add_step(sums, loss, grad_norm)
        else:
            tally.skipped_steps += 1
            logger.warning(
                "update %d: a minibatch of %d rows was skipped, its loss is %s and its gradient norm %s",
                self.updates, len(lots), loss, grad_norm,
            )  # fmt: skip
        self._optimizer.zero_grad(set_to_none=True)

    def _accumulate(self, lots: Sequence[_Lot], normalizer: float, sums: Sums, *, measure_gap: bool) -> None:
        """Adds one micro-batch's share of the minibatch's gradient and metrics."""
        settings, device = self.settings, self.policy.device
        batch = collate([lot.row for lot in lots], device)
        given_BT = batch.mask_BT

        def spread(values: Sequence[Tensor]) -> Tensor:
            return torch.zeros(given_BT.shape, device=device).masked_scatter(
                given_BT, torch.cat(list(values)).to(device)
            )

        mask_BT = spread([lot.kept_T for lot in lots])
        old_BT = spread([lot.old_T for lot in lots])
        advantage_BT = spread([lot.advantage_T for lot in lots])
        weight_B = torch.tensor([lot.row.weight for lot in lots], device=device)
        length_B = torch.tensor([lot.rollout_length for lot in lots], device=device)

        def mean(value_BT: Tensor) -> Tensor:
            return aggregate(
                value_BT, mask_BT, settings.aggregation, weight_B=weight_B, normalizer=normalizer,
                rollout_length_B=length_B,
            )  # fmt: skip

        with self._precision():
            logprob_BT, entropy_BT = self.policy.token_logprobs(
                batch, settings.temperature, entropy_gradient=settings.entropy_coefficient != 0
            )
        surrogate = self._surrogate(logprob_BT, old_BT, advantage_BT, mask_BT)
        loss_BT = surrogate.loss_BT
        counted_BT = mask_BT * weight_B[:, None]
        if settings.importance_weights is not None:
            loss_BT = loss_BT * spread([lot.importance_T for lot in lots])
        if lots[0].reference_T is not None:
            reference_BT = spread([lot.reference_T for lot in lots if lot.reference_T is not None])
            kl_BT = kl_penalty(logprob_BT, reference_BT, settings.kl_estimator)
            loss_BT = loss_BT + settings.kl_coefficient * kl_BT
            sums.add("reference_kl", (kl_BT.detach() * counted_BT).sum())
        if settings.entropy_coefficient:
            loss_BT = loss_BT - settings.entropy_coefficient * entropy_BT
        loss = mean(loss_BT)
        loss.backward()

        ratio_BT = surrogate.log_ratio_BT.clamp(-20.0, 20.0).exp()
        sums.add("loss", loss.detach())
        sums.add("tokens", counted_BT.sum())
        sums.add("clip_fraction", (surrogate.clipped_BT * counted_BT).sum())
        sums.add("dual_clip_fraction", (surrogate.dual_clipped_BT * counted_BT).sum())
        sums.add("approx_kl", (-surrogate.log_ratio_BT * counted_BT).sum())
        sums.add("ratio", (ratio_BT * counted_BT).sum())
        sums.add("entropy", (entropy_BT.detach() * counted_BT).sum())
        sums.raise_to("ratio_max", (ratio_BT * counted_BT.sign()).max())
        if measure_gap:
            sums.raise_to("logprob_gap_max", ((logprob_BT.detach() - old_BT).abs() * mask_BT).max())
        sums.real_tokens += sum(row_length(lot.row) for lot in lots)
        sums.padded_tokens += batch.input_BL.numel()

    def _surrogate(self, logprob_BT: Tensor, old_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Surrogate:
        s = self.settings
        if s.objective == "gspo":
            return sequence_surrogate(
                logprob_BT, old_BT, advantage_BT, mask_BT, clip_low=s.clip_low, clip_high=s.clip_high
            )
        if s.objective == "cispo":
            return clipped_weight_surrogate(
                logprob_BT, old_BT, advantage_BT, clip_low=s.clip_low, clip_high=s.clip_high
            )
        return clipped_surrogate(
            logprob_BT, old_BT, advantage_BT, clip_low=s.clip_low, clip_high=s.clip_high, dual_clip=s.dual_clip
        )

    def _normalizer(self, lots: Sequence[_Lot]) -> float:
        n_kept_B1 = torch.stack([lot.kept_T.sum() for lot in lots])[:, None].double()
        return float(
            loss_normalizer(
                n_kept_B1,
                self.settings.aggregation,
                torch.tensor([lot.row.weight for lot in lots], dtype=torch.float64),
                rollout_length_B=torch.tensor([lot.rollout_length for lot in lots], dtype=torch.float64),
                horizon=self.settings.horizon or 1,
            )
        )

    def _score_reference(self, rows: Sequence[Row]) -> list[list[float]]:
        assert self.reference is not None
        with self.reference.in_place(), self._precision():
            return self.policy.score(
                rows, self.settings.temperature, max_tokens=self.settings.max_tokens_per_microbatch
            )

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.policy.device.type, torch.bfloat16) if self._autocast else nullcontext()


class _Lot:
    """A row with what the weights of the beginning say of its T sampled tokens."""

    __slots__ = ("advantage_T", "importance_T", "kept_T", "key", "old_T", "reference_T", "rollout_length", "row")

    def __init__(self, row: Row, old_T: Tensor, reference_T: Tensor | None) -> None:
        self.row = row
        self.old_T = old_T.float()
        self.reference_T = reference_T
        self.advantage_T = torch.tensor(row.advantages, dtype=torch.float32)
        self.kept_T = torch.ones(len(old_T))
        self.importance_T = self.kept_T
        self.key: object = None
        self.rollout_length = 1.0


def _checkpoint_gradients(policy: Policy) -> None:
    """Switches recomputation on, which transformers does in training mode only; dropout stays off."""
    model: Any = policy.model
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    layers = [module for module in policy.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"gradient_checkpointing: {type(policy.model).__name__} has no layers that support it.")
    for layer in layers:
        layer.training = True  # of this module alone: its parts stay in eval mode
