"""Weight updates of the policy from training rows.

B   rows of a micro-batch
T   sampled tokens of a row, padded to the longest
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from agentlightning.errors import ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning.run.directory import atomic_directory, recover_directory
from agentlightning_algorithms.shared.policy.loss import LossBatch, Surrogate, aggregate, find_factors, kl_penalty
from agentlightning_algorithms.shared.policy.model import Policy, batch_by_tokens, collate
from agentlightning_algorithms.shared.policy.prepared_row import (
    PreparedRow,
    RowUse,
    StepMetrics,
    UpdateMetrics,
    describe_correction,
    prepare_rows,
)
from agentlightning_algorithms.shared.policy.settings import UpdateSettings, naming_part
from agentlightning_algorithms.shared.policy.training_row import TrainingRow, check_rows

logger = logging.getLogger("agentlightning")

Objective = Callable[..., Surrogate]
"""A component of the kind ``policy_loss``."""

_STATE_FILE = "updater.pt"
_LARGE = 500_000_000
"""Number of weights from which activations are recomputed by default."""


class Updater:
    """Trains the weights of a policy that require a gradient, in place."""

    def __init__(self, policy: Policy, settings: UpdateSettings | None = None, *, autocast: bool = False) -> None:
        """Makes the optimizer; with ``autocast``, computes in bfloat16 where that is safe.

        Raises:
            PluginError: an ``objective`` that no plugin offers.
            ConfigError: an ``objective`` that fails on made rows, a schedule without ``total_updates``, or a model
                without gradient checkpointing.
        """
        self.policy = policy
        self.settings = settings = settings or UpdateSettings()
        for name in ("schedule", "kl_schedule", "entropy_schedule"):
            if getattr(settings, name) != "constant" and settings.total_updates is None:
                raise ConfigError(
                    f"{name} = {getattr(settings, name)!r} needs total_updates, the number of updates it spans."
                )
        self._objective: Objective = get_manager().create("policy_loss", settings.objective)
        _try_objective(self._objective, settings)
        if settings.total_updates is not None and settings.warmup_updates > settings.total_updates:
            logger.warning(
                "warmup_updates = %d: the training has %d updates, so the learning rate ends at %g and never reaches "
                "lr = %g", settings.warmup_updates, settings.total_updates, settings.lr_at(settings.total_updates - 1),
                settings.lr,
            )  # fmt: skip
        for update in (settings.warmup_updates, (settings.total_updates or 1) - 1):
            settings.lr_at(update)
            settings.coefficients_at(update)
        self.updates = 0  # made so far
        self.uses: list[RowUse] = []  # uses of the rows in the last update
        self._open_step: tuple[StepMetrics, list[PreparedRow]] = StepMetrics(), []  # added, but not yet applied
        self._autocast = autocast
        self._parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            _group_parameters(self._parameters, settings.weight_decay), lr=settings.lr, betas=settings.betas, fused=True
        )
        self._order = torch.Generator().manual_seed(settings.seed)
        self._reference = [p.detach().clone() for p in self._parameters] if settings.kl_coefficient else None
        checkpointing = settings.gradient_checkpointing
        if checkpointing is None:
            checkpointing = policy.model.num_parameters() >= _LARGE and bool(_checkpointing_layers(policy))
        if checkpointing:
            _enable_gradient_checkpointing(policy)

    def update(self, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """Makes ``epochs * minibatches`` optimizer steps on ``rows``; fewer if there are fewer rows than minibatches.

        Without rows it makes no step and returns no means. A minibatch whose loss or gradient is not finite is skipped
        with a warning.

        Returns:
            Means over the tokens or steps of this update: ``loss``, ``clip_fraction``, ``dual_clip_fraction``,
            ``approx_kl`` (between the weights that sampled and those being trained), ``ratio``, ``entropy`` in nats,
            ``grad_norm`` before clipping, ``reference_kl``, ``importance_weight`` with ``_max`` and ``_held`` (the
            share that was truncated or dropped), ``trusted_fraction``. Counts: ``rows``, ``response_tokens``,
            ``optimizer_steps``, ``skipped_steps``. ``logprob_gap_max``: the largest difference between the sampler's
            log-probability and the trainer's under the same weights, over the rows of the first minibatch, or over
            all rows where ``old_logprobs`` is ``trainer``. Cost: ``seconds``, ``tokens_per_s`` (prompts included),
            ``padding_fraction``. Also ``lr``.

        Raises:
            ValueError: as :func:`check_rows`.
        """
        start = time.perf_counter()
        settings = self.settings
        check_rows(rows, self.policy.max_length)
        lr = self._set_lr()
        metrics = UpdateMetrics()
        prepared = self._prepare(rows)
        for epoch in range(settings.epochs):
            for k, minibatch in enumerate(self._split(prepared)):
                fresh = epoch == 0 and k == 0 and settings.old_logprobs == "sampler"
                step = StepMetrics()
                self._add_gradient(minibatch, step, self._objective, measure_gap=fresh)
                self._apply_gradient(minibatch, step, metrics)
                if epoch == 0:
                    for row in minibatch:
                        row.minibatch = 0 if settings.old_logprobs == "trainer" else k
        self.updates += 1
        self.uses = [row.describe_use() for row in prepared]
        return {
            **metrics.report(time.perf_counter() - start),
            **describe_correction(prepared, settings),
            "lr": lr,
            "rows": float(len(rows)),
            "response_tokens": float(sum(row.n_sampled for row in rows)),
        }

    def save(self, directory: Path, caller: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint of :meth:`state`, atomically."""
        with atomic_directory(directory) as scratch:
            self.write(scratch, self.state(caller))

    def state(self, caller: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns optimizer, step and random state; its tensors are the optimizer's, not copies.

        ``caller`` is further state of plain values, which :meth:`load` returns.
        """
        return {
            "updates": self.updates,
            "optimizer": self._optimizer.state_dict(),
            "order": self._order.get_state(),
            "reference": self._reference,
            "random": _random_state(),
            "caller": dict(caller or {}),
        }

    def write(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Writes model (or LoRA adapters), tokenizer and ``state``; none of them may change until the call returns."""
        self.policy.save(directory, merge=False)
        torch.save(dict(state), directory / _STATE_FILE)

    def load(self, directory: Path) -> dict[str, Any]:
        """Restores what :meth:`save` wrote, the process's random generators included, and returns ``caller``.

        Raises:
            ConfigError: the directory has no checkpoint, or one of another model.
        """
        directory = recover_directory(directory)
        file = directory / _STATE_FILE
        if not file.is_file():
            raise ConfigError(f"no checkpoint in {str(directory)!r}: {_STATE_FILE} is missing.")
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        self.policy.load_weights(directory)
        if self._reference is not None and state["reference"] is not None:
            self._reference = [value.to(self.policy.device) for value in state["reference"]]
        self._optimizer.load_state_dict(state["optimizer"])
        self._order.set_state(state["order"])
        self.updates = state["updates"]
        _restore_random_state(state["random"])
        return dict(state["caller"])

    def _prepare(self, rows: Sequence[TrainingRow]) -> list[PreparedRow]:
        settings = self.settings
        old: Sequence[Sequence[float]] = [row.logprobs for row in rows]
        if settings.old_logprobs == "trainer" and rows:
            old = self.score(rows)
        reference = None
        if self._reference is not None:
            with _swapped(self._parameters, self._reference):
                reference = self.score(rows)
        return prepare_rows(rows, old, reference, settings)

    def _split(self, rows: Sequence[PreparedRow]) -> list[list[PreparedRow]]:
        """Splits shuffled rows into minibatches; keeps rollouts whole where the loss is a mean over rollouts."""
        pieces: dict[object, list[PreparedRow]] = {}
        for i, row in enumerate(rows):
            pieces.setdefault(row.rollout if self.settings.aggregation == "rollout-mean" else i, []).append(row)
        shuffled = list(pieces.values())
        order = torch.randperm(len(shuffled), generator=self._order).tolist()
        count = min(self.settings.minibatches, len(shuffled))
        return [
            [row for i in order[k * len(order) // count : (k + 1) * len(order) // count] for row in shuffled[i]]
            for k in range(count)
        ]

    def forward_backward(
        self, rows: Sequence[TrainingRow], objective: str | Mapping[str, Any] | Objective | None = None
    ) -> Mapping[str, float]:
        """Adds the gradient of the loss of ``rows``, without an optimizer step; returns ``loss`` and ``rows``.

        ``objective`` is a function with the signature of a ``policy_loss`` component, or the name of a component;
        default: ``objective`` of the settings.

        Raises:
            PluginError: an ``objective`` that no plugin offers.
            ValueError: as :func:`check_rows`.
        """
        check_rows(rows, self.policy.max_length)
        found: Objective | None = (
            get_manager().create("policy_loss", objective) if isinstance(objective, (str, Mapping)) else objective
        )
        step, added = self._open_step
        before = float(step.totals.get("loss", torch.zeros(())))
        prepared = self._prepare(rows)
        self._add_gradient(prepared, step, found or self._objective)
        added += prepared
        return {"loss": float(step.totals.get("loss", torch.zeros(()))) - before, "rows": float(len(rows))}

    def optim_step(self) -> dict[str, float]:
        """Makes an optimizer step with the gradients added since the last one, and counts as an update.

        Returns metrics like :meth:`update`, without ``logprob_gap_max``: other weights may have sampled the
        rows. Without a gradient, the weights do not change.
        """
        (step, rows), self._open_step = self._open_step, (StepMetrics(), [])
        metrics, start = UpdateMetrics(), time.perf_counter()
        lr = self._set_lr()
        self._apply_gradient(rows, step, metrics)
        self.updates += 1
        return {**metrics.report(time.perf_counter() - start), "lr": lr, "rows": float(len(rows))}

    def _add_gradient(
        self, rows: Sequence[PreparedRow], step: StepMetrics, objective: Objective, *, measure_gap: bool = False
    ) -> None:
        """Adds the gradient of one minibatch, over micro-batches."""
        normalizer = self._normalizer(rows) if rows else 0.0
        if normalizer == 0:
            return
        if hasattr(objective, "begin"):
            batch = self._gather(rows)
            with self._naming(objective):
                objective.begin(batch, self.settings)
        for indices in batch_by_tokens([row.row.n_tokens for row in rows], self.settings.max_tokens_per_microbatch):
            self._accumulate([rows[i] for i in indices], normalizer, step, objective, measure_gap=measure_gap)

    def _apply_gradient(self, rows: Sequence[PreparedRow], step: StepMetrics, metrics: UpdateMetrics) -> None:
        if not step.totals:
            return
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.max_grad_norm, foreach=True))
        loss = float(step.totals.pop("loss"))
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._optimizer.step()
            metrics.add_step(step, loss, grad_norm)
        else:
            metrics.skipped_steps += 1
            for row in rows:
                row.is_skipped = True
            logger.warning(
                "update %d: a minibatch of %d rows was skipped, its loss is %s and its gradient norm %s",
                self.updates, len(rows), loss, grad_norm,
            )  # fmt: skip
        self._optimizer.zero_grad(set_to_none=True)

    def _set_lr(self) -> float:
        lr = self.settings.lr_at(self.updates)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _accumulate(
        self,
        rows: Sequence[PreparedRow],
        normalizer: float,
        step: StepMetrics,
        objective: Objective,
        *,
        measure_gap: bool,
    ) -> None:
        """Adds one micro-batch's share of the minibatch's gradient and metrics."""
        settings, device = self.settings, self.policy.device
        kl_coefficient, entropy_coefficient = settings.coefficients_at(self.updates)
        batch = collate([row.row for row in rows], device)
        sampled_BT = batch.mask_BT

        def pad(values: Sequence[Tensor]) -> Tensor:
            flat_N = torch.cat(list(values)).to(device)
            return torch.zeros(sampled_BT.shape, device=device).masked_scatter(sampled_BT, flat_N)

        mask_BT = pad([row.kept_T for row in rows])
        old_BT = pad([row.old_T for row in rows])
        advantage_BT = pad([row.advantage_T for row in rows])
        weight_B = torch.tensor([row.row.weight for row in rows], device=device)
        length_B = torch.tensor([row.rollout_length for row in rows], device=device)
        with self._precision():
            logprob_BT, entropy_BT = self.policy.token_logprobs(
                batch, settings.temperature, entropy_gradient=entropy_coefficient != 0
            )
        if rows[0].first_T is None:
            self._keep_logprobs(rows, logprob_BT.detach(), sampled_BT)
        with self._naming(objective):
            surrogate = objective(logprob_BT, old_BT, advantage_BT, mask_BT, settings)
        loss_BT = surrogate.loss_BT
        counted_BT = mask_BT * weight_B[:, None]
        if settings.importance_weights is not None:
            loss_BT = loss_BT * pad([row.importance_T for row in rows])
        if rows[0].reference_T is not None:
            reference_BT = pad([row.reference_T for row in rows if row.reference_T is not None])
            kl_BT = kl_penalty(logprob_BT, reference_BT, settings.kl_estimator)
            loss_BT = loss_BT + kl_coefficient * kl_BT
            step.add(reference_kl=(kl_BT.detach() * counted_BT).sum())
        if entropy_coefficient:
            loss_BT = loss_BT - entropy_coefficient * entropy_BT
        loss = aggregate(
            loss_BT, mask_BT, settings.aggregation, weight_B=weight_B, normalizer=normalizer,
            rollout_length_B=length_B, horizon=settings.horizon or 1,
        )  # fmt: skip
        loss.backward()

        ratio_BT = surrogate.log_ratio_BT.clamp(-20.0, 20.0).exp()
        step.add(
            loss=loss.detach(),
            tokens=counted_BT.sum(),
            clip_fraction=(surrogate.clipped_BT * counted_BT).sum(),
            dual_clip_fraction=(surrogate.dual_clipped_BT * counted_BT).sum(),
            approx_kl=(-surrogate.log_ratio_BT * counted_BT).sum(),
            ratio=(ratio_BT * counted_BT).sum(),
            entropy=(entropy_BT.detach() * counted_BT).sum(),
        )
        step.add_max("ratio_max", (ratio_BT * counted_BT.sign()).max())
        if measure_gap:
            step.add_max("logprob_gap_max", ((logprob_BT.detach() - old_BT).abs() * mask_BT).max())
        step.real_tokens += sum(row.row.n_tokens for row in rows)
        step.padded_tokens += batch.input_BL.numel()

    def _naming(self, objective: Objective) -> AbstractContextManager[None]:
        return naming_part("policy_loss", self.settings.objective if objective is self._objective else objective)

    def _gather(self, rows: Sequence[PreparedRow]) -> LossBatch:
        """Returns the tokens of a minibatch that count, with their log-probabilities under the current weights."""
        kept = [row.kept_T > 0 for row in rows]
        scores = self.score([row.row for row in rows])
        new = [torch.tensor(row.row.sampled(values)) for row, values in zip(rows, scores, strict=True)]

        def join(values: Sequence[Tensor]) -> Tensor:
            flat_N = torch.cat([value_T[kept_T] for value_T, kept_T in zip(values, kept, strict=True)])
            return flat_N.to(self.policy.device)

        return LossBatch(
            join(new),
            join([row.old_T for row in rows]),
            join([row.advantage_T for row in rows]),
            join([torch.full_like(row.kept_T, row.row.weight) for row in rows]),
            join([torch.full_like(row.kept_T, index, dtype=torch.long) for index, row in enumerate(rows)]),
            self.updates,
        )

    def _keep_logprobs(self, rows: Sequence[PreparedRow], logprob_BT: Tensor, sampled_BT: Tensor) -> None:
        """Keeps the trainer's log-probabilities of rows for the training records."""
        if self.settings.old_logprobs == "trainer":
            for row in rows:
                row.first_T = row.old_T
            return
        flat_N = logprob_BT[sampled_BT].float().cpu()
        for row, values_T in zip(rows, flat_N.split([row.row.n_sampled for row in rows]), strict=True):
            row.first_T = values_T

    def _normalizer(self, rows: Sequence[PreparedRow]) -> float:
        n_kept_B1 = torch.stack([row.kept_T.sum() for row in rows])[:, None].double()
        weight_B = torch.tensor([row.row.weight for row in rows], dtype=torch.float64)
        length_B = torch.tensor([row.rollout_length for row in rows], dtype=torch.float64)
        settings = self.settings
        found = find_factors(n_kept_B1, settings.aggregation, weight_B, length_B, settings.horizon or 1)
        return float(found.divisor)

    def score(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        """Returns the log-probability of every response token under the current weights; 0 for given tokens."""
        settings = self.settings
        with self._precision():
            return self.policy.score(rows, settings.temperature, max_tokens=settings.max_tokens_per_microbatch)

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.policy.device.type, torch.bfloat16) if self._autocast else nullcontext()


def _group_parameters(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Groups parameters for the optimizer: norms and biases, which are vectors, do not decay."""
    if not weight_decay:
        return [{"params": list(parameters), "weight_decay": 0.0}]
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _checkpointing_layers(policy: Policy) -> list[GradientCheckpointingLayer]:
    return [module for module in policy.model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _enable_gradient_checkpointing(policy: Policy) -> None:
    """Enables recomputation of activations, which transformers does in training mode only, and keeps dropout off."""
    model: Any = policy.model
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    layers = _checkpointing_layers(policy)
    if not layers:
        raise ConfigError(f"gradient_checkpointing: {type(policy.model).__name__} has no layers that support it.")
    for layer in layers:
        layer.training = True  # only this module: its submodules stay in eval mode


def _try_objective(objective: Objective, settings: UpdateSettings) -> None:
    """Calls a loss with two made rows, the second one shorter, so that a mistake shows before the first rollout.

    Raises:
        ConfigError: it raises, or its result is not a :class:`Surrogate` of finite losses with a gradient.
    """
    logprob_BT = torch.full((2, 3), -1.0, requires_grad=True)
    mask_BT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    advantage_BT = torch.tensor([[1.0], [-1.0]]) * mask_BT
    old_BT = torch.full((2, 3), -1.1)
    try:
        if hasattr(objective, "begin"):
            objective.begin(LossBatch.of_rows(logprob_BT, old_BT, advantage_BT, mask_BT), settings)
        found = objective(logprob_BT, old_BT, advantage_BT, mask_BT, settings)
        shapes = {name: tuple(getattr(found, name).shape) for name in Surrogate._fields}
        if set(shapes.values()) != {(2, 3)}:
            raise ValueError(f"for log-probabilities of the shape (2, 3) it returned {shapes}")
        length_B, horizon = mask_BT.sum(-1), settings.horizon or 1
        loss = aggregate(found.loss_BT, mask_BT, settings.aggregation, rollout_length_B=length_B, horizon=horizon)
        loss.backward()
        if not math.isfinite(value := float(loss.detach())):
            raise ValueError(f"its loss is {value}")
    except Exception as error:  # isolation point: a plugin's loss
        raise ConfigError(
            f"objective = {settings.objective!r}: this policy_loss (with aggregation = {settings.aggregation!r}) "
            f"failed on two made rows: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _swapped(parameters: Sequence[nn.Parameter], values: list[Tensor]) -> Iterator[None]:
    """Gives the parameters other values until the block ends."""

    def swap() -> None:
        for i, parameter in enumerate(parameters):
            parameter.data, values[i] = values[i], parameter.data

    swap()
    try:
        yield
    finally:
        swap()


def _random_state() -> dict[str, Any]:
    """Returns the state of Python's, numpy's and torch's generators, in types that a weights-only load accepts."""
    name, keys, position, has_gauss, cached_gaussian = numpy.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached_gaussian)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_random_state(state: dict[str, Any]) -> None:
    """Restores what :func:`_random_state` returned; CUDA's part only if the number of devices is the same."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached_gaussian = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached_gaussian))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
