"""Settings of the weight updates, with their checks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from agentlightning.errors import ConfigError, PluginImportError
from agentlightning.plugin.registry import get_manager
from agentlightning.plugin.settings import bind_fields, require_least

Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "rollout-mean"
]
KlEstimator = Literal["k2", "k3"]
WeightLevel = Literal["token", "sequence"]
MaskLevel = Literal["token", "sequence", "sequence-mean"]
PEFT_PATTERNS = ".*_pattern keys did not match"
"""A warning of peft about patterns that transformers adds for the experts of a mixture."""


def check_part(kind: str, spec: str | Mapping[str, Any]) -> None:
    """Checks name and settings of a part of a training; one whose extra is missing is checked when it is used.

    Raises:
        PluginError: no plugin offers it.
        ConfigError: an unknown setting, or a wrong type.
    """
    with contextlib.suppress(PluginImportError):
        get_manager().check(kind, spec)


def load_part(kind: str, spec: str | Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a part of a training, whose errors name it."""
    part = get_manager().create(kind, spec)

    def call(*args: Any, **settings: Any) -> Any:
        with naming_part(kind, spec):
            return part(*args, **settings)

    return call


@contextlib.contextmanager
def naming_part(kind: str, spec: object) -> Iterator[None]:
    """Turns the errors of a part of a training into a ConfigError that names the part."""
    try:
        yield
    except Exception as error:  # isolation point: a part may be a plugin's
        raise ConfigError(f"the {kind} {spec!r} failed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """Settings of the weight updates (``Updater``). docs/grpo-settings.md cites the paper of each.

    Attributes:
        lr: AdamW's peak learning rate; ``betas`` and ``weight_decay`` are AdamW's too.
        schedule: a component of that kind: ``constant``, ``linear`` or ``cosine`` decay of the learning rate from
            ``lr`` to ``lr * final_lr_fraction``, by updates, not optimizer steps.
        total_updates: updates the schedules span; required for all but ``constant``.
        warmup_updates: updates in which the learning rate rises linearly to ``lr``. A run that is shorter begins like
            the whole run, with a warning.
        max_grad_norm: gradients are clipped to this norm.
        epochs: passes over the rows of one update.
        minibatches: optimizer steps per epoch, whatever the number of rows, which depends on the number of turns.
        max_tokens_per_microbatch: bound on memory, padding included; changes the result only by rounding.
        gradient_checkpointing: recompute activations in the backward pass: less memory, about a third more time. None:
            for models of at least 500 million weights that support it.
        objective: a component of the kind ``policy_loss``, such as ``ppo``, ``gspo`` or ``cispo``; see the functions
            of these names in :mod:`~agentlightning_algorithms.shared.policy.loss`.
        clip_low: the ratio is clipped at ``1 - clip_low``. GSPO needs a thousandth of PPO's value.
        clip_high: the ratio is clipped at ``1 + clip_high``.
        dual_clip: bound on the loss of a token with negative advantage, in units of the advantage; ``ppo`` only.
        aggregation: a component of that kind; see ``aggregate`` in ``loss``.
        horizon: for ``seq-mean-token-sum-norm``, the constant length that sums are divided by.
        temperature: temperature of sampling.
        old_logprobs: the denominator of the ratio. ``sampler``: as recorded when sampling, which is exact and free.
            ``trainer``: recomputed before the first step, for samplers whose numerics differ; costs a forward pass.
        importance_weights: multiply losses by trainer/sampler ratios of a ``token`` or a ``sequence``; needs
            ``old_logprobs = trainer``.
        importance_upper: larger weights are truncated to this.
        importance_lower: weights below this or above ``importance_upper`` become 0 (IcePop); None: truncate.
        trust_mask: exclude tokens or rows whose ratio is outside [``trust_lower``, ``trust_upper``]; needs
            ``old_logprobs = trainer``.
        kl_coefficient: weight, in the loss of each token, of the divergence from the initial model (arXiv:2402.03300).
        kl_estimator: see ``kl_penalty`` in ``loss``.
        entropy_coefficient: weight of the entropy bonus (Mnih et al. 2016, arXiv:1602.01783).
        kl_schedule: a component of the kind ``schedule``, whose share ``kl_coefficient`` is multiplied by: ``linear``
            and ``cosine`` end at 0. ``entropy_schedule`` likewise.
        seed: seed of the order of rows.
    """

    # Settings from a file are checked by pydantic: an unknown key is an error.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    schedule: str | Mapping[str, Any] = "constant"
    total_updates: int | None = None
    warmup_updates: int = 0
    final_lr_fraction: float = 0.1
    max_grad_norm: float = 1.0
    epochs: int = 1
    minibatches: int = 1
    max_tokens_per_microbatch: int = 8192
    gradient_checkpointing: bool | None = None
    objective: str | Mapping[str, Any] = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    aggregation: str | Mapping[str, Any] = "token-mean"
    horizon: int | None = None
    temperature: float = 1.0
    old_logprobs: Literal["sampler", "trainer"] = "sampler"
    importance_weights: WeightLevel | None = None
    importance_upper: float = 2.0
    importance_lower: float | None = None
    trust_mask: MaskLevel | None = None
    trust_lower: float = 0.5
    trust_upper: float = 2.0
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_schedule: str | Mapping[str, Any] = "constant"
    entropy_coefficient: float = 0.0
    entropy_schedule: str | Mapping[str, Any] = "constant"
    seed: int = 0

    def __post_init__(self) -> None:
        bind_fields(self, "update")
        for name in ("lr", "max_grad_norm", "temperature", "epochs", "minibatches", "max_tokens_per_microbatch"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}; it must be above 0.")
        for schedule in (self.schedule, self.kl_schedule, self.entropy_schedule):
            check_part("schedule", schedule)
        check_part("policy_loss", self.objective)
        check_part("aggregation", self.aggregation)
        names = ("weight_decay", "warmup_updates", "final_lr_fraction", "clip_low", "clip_high", "kl_coefficient")
        require_least(0, **{name: getattr(self, name) for name in names})
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip = {self.dual_clip}; it must be above 1, or None for no bound.")
        if self.aggregation == "seq-mean-token-sum-norm" and not (self.horizon and self.horizon > 0):
            raise ConfigError(f"horizon = {self.horizon}; aggregation = {self.aggregation!r} needs a horizon above 0.")
        if self.objective == "gspo" and max(self.clip_low, self.clip_high) > 0.1:
            raise ConfigError(
                f"clip_low = {self.clip_low}, clip_high = {self.clip_high}: with objective = 'gspo' the ratio of a "
                "whole row hardly differs from 1; the paper uses 3e-4 and 4e-4, and at most 0.1 is accepted."
            )
        if (self.importance_weights or self.trust_mask) and self.old_logprobs != "trainer":
            name = "importance_weights" if self.importance_weights else "trust_mask"
            raise ConfigError(
                f"{name} = {getattr(self, name)!r} compares sampler and trainer: set old_logprobs: trainer."
            )
        for low, high in (("importance_lower", "importance_upper"), ("trust_lower", "trust_upper")):
            bounds = (getattr(self, low) or 0.0, getattr(self, high))
            if not 0 <= bounds[0] < bounds[1]:
                raise ConfigError(f"{low} = {bounds[0]}, {high} = {bounds[1]}; 0 <= {low} < {high} is needed.")

    def coefficients_at(self, update: int) -> tuple[float, float]:
        """Returns the coefficients of KL and entropy in the ``update``-th update, counted from 0."""
        progress = min(1.0, update / max(1, (self.total_updates or 1) - 1))
        kl, entropy = (load_part("schedule", name)(progress) for name in (self.kl_schedule, self.entropy_schedule))
        return self.kl_coefficient * float(kl), self.entropy_coefficient * float(entropy)

    def lr_at(self, update: int) -> float:
        """Returns the learning rate of the ``update``-th update, counted from 0."""
        if update < self.warmup_updates:
            return self.lr * (update + 1) / self.warmup_updates
        if self.schedule == "constant" or self.total_updates is None:
            return self.lr
        decaying = max(1, self.total_updates - 1 - self.warmup_updates)
        progress = min(1.0, (update - self.warmup_updates) / decaying)
        share = float(load_part("schedule", self.schedule)(progress))
        return self.lr * (self.final_lr_fraction + (1.0 - self.final_lr_fraction) * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters, trained instead of the weights (Hu et al. 2021, arXiv:2106.09685).

    Attributes:
        rank: rank of the adapters.
        alpha: adapters are scaled by alpha / rank; they need about ten times the learning rate of full training.
        target_modules: names of the linear layers to adapt; ``all-linear``: all but the output layer.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    rank: int = 16
    alpha: float = 32.0
    target_modules: str | list[str] = "all-linear"

    def __post_init__(self) -> None:
        bind_fields(self, "lora")
        require_least(1, rank=self.rank)


def constant(progress: float) -> float:
    """The component ``constant``."""
    return 1.0


def linear(progress: float) -> float:
    """The component ``linear``."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """The component ``cosine``: half a period."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))
