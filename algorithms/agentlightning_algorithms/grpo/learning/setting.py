"""Settings of the weight updates, and the check of those that agents call the model with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from pydantic import ConfigDict

from agentlightning.errors import ConfigError, suggest
from agentlightning_algorithms.grpo.learning.correction import MaskLevel, WeightLevel
from agentlightning_algorithms.grpo.learning.loss import Aggregation, KlEstimator, Objective

Schedule = Literal["constant", "linear", "cosine"]

SAMPLING_KEYS: Final = (
    "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop", "seed", "n", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "extra_body",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """Settings of the weight updates (``Updater``). docs/grpo.md cites the paper of each.

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
        gradient_checkpointing: recompute activations in the backward pass: less memory, about a third more time.
        objective: ``ppo``, ``gspo`` or ``cispo``; see ``clipped_surrogate``, ``sequence_surrogate`` and
            ``clipped_weight_surrogate`` in :mod:`~agentlightning_algorithms.grpo.learning.loss`.
        clip_low: how far below 1 the ratio is followed. GSPO wants a thousandth of PPO's.
        clip_high: how far above 1 the ratio is followed.
        dual_clip: bound on the loss of a token with negative advantage, in units of the advantage; ``ppo`` only.
        aggregation: see :func:`~agentlightning_algorithms.grpo.learning.loss.aggregate`.
        horizon: for ``seq-mean-token-sum-norm``, the constant length that sums are divided by.
        temperature: that of sampling.
        old_logprobs: the denominator of the ratio. ``sampler``: as recorded when sampling, which is exact and free.
            ``trainer``: recomputed before the first step, for samplers whose numerics differ; costs a forward pass.
        importance_weights: multiply losses by trainer/sampler ratios of a ``token`` or a ``sequence``; needs
            ``old_logprobs = trainer``. See :mod:`~agentlightning_algorithms.grpo.learning.correction`.
        importance_upper: the largest weight.
        importance_lower: smaller weights become 0, larger than the largest too (IcePop); None: truncate only.
        trust_mask: leave out tokens or rows whose ratio is outside the bounds; needs ``old_logprobs = trainer``.
        trust_lower: the smallest ratio that counts.
        trust_upper: the largest ratio that counts.
        kl_coefficient: of the divergence from the reference; 0: there is no reference.
        kl_estimator: see :func:`~agentlightning_algorithms.grpo.learning.loss.kl_penalty`.
        kl_in: ``loss``: added to the loss of each token (arXiv:2402.03300); ``reward``: taken from the reward of the
            rollout (Ziegler et al. 2019, arXiv:1909.08593).
        reference_decay: the reference is a mean of the weights that decays so much per update; None: it stays what the
            model was at the beginning.
        entropy_coefficient: of the entropy, which is subtracted from the loss (Mnih et al. 2016, arXiv:1602.01783).
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
    gradient_checkpointing: bool = False
    objective: Objective = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    aggregation: Aggregation = "token-mean"
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
    kl_in: Literal["loss", "reward"] = "loss"
    reference_decay: float | None = None
    entropy_coefficient: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("lr", "max_grad_norm", "temperature", "epochs", "minibatches", "max_tokens_per_microbatch"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}; it must be above 0.")
        for name in ("weight_decay", "warmup_updates", "final_lr_fraction", "clip_low", "clip_high", "kl_coefficient"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}; it must be at least 0.")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip = {self.dual_clip}; it must be above 1, or None for no bound.")
        if self.aggregation == "seq-mean-token-sum-norm" and not (self.horizon and self.horizon > 0):
            raise ConfigError(f"horizon = {self.horizon}; aggregation = {self.aggregation!r} needs one above 0.")
        if self.reference_decay is not None and not 0 <= self.reference_decay <= 1:
            raise ConfigError(f"reference_decay = {self.reference_decay}; it must be from 0 to 1, or None.")
        if self.objective == "gspo" and max(self.clip_low, self.clip_high) > 0.1:
            raise ConfigError(
                f"clip_low = {self.clip_low}, clip_high = {self.clip_high}: the ratio of a whole row, per token, "
                "hardly moves; with objective = 'gspo' the paper takes 3e-4 and 4e-4, and at most 0.1 is accepted."
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Train low-rank additions to the weights instead of the weights (Hu et al. 2021, arXiv:2106.09685).

    Attributes:
        rank: of the additions.
        alpha: they are scaled by alpha / rank; a learning rate about ten times that of full training is usual.
        target_modules: names of the linear layers that get one; ``all-linear``: all but the output layer.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    rank: int = 16
    alpha: float = 32.0
    target_modules: str | list[str] = "all-linear"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"rank = {self.rank}; it must be at least 1.")


def check_sampling(name: str, sampling: Mapping[str, Any]) -> None:
    """Refuses what the policy server would not read, and in training what changes the distribution behind our back.

    Raises:
        ConfigError: an unknown key, with what may have been meant; or a filter of the distribution in ``sampling``.
    """
    for key in sampling:
        if key not in SAMPLING_KEYS:
            raise ConfigError(
                f"{name} has no key {key!r}.{suggest(key, SAMPLING_KEYS)} Keys: {', '.join(SAMPLING_KEYS)}."
            )
    temperature = sampling.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or temperature < 0:
        raise ConfigError(f"{name}: temperature = {temperature!r}; a number of at least 0 is needed.")
    if name == "sampling":
        if temperature == 0:
            raise ConfigError("sampling: temperature = 0 always gives the same answer; a group then has no spread.")
        if sampling.get("seed") is not None:
            raise ConfigError(
                f"sampling: seed = {sampling['seed']!r} would give all rollouts of a task the same answers; set the "
                "algorithm's own, or the run's."
            )
        if sampling.get("top_p", 1) != 1 or (sampling.get("top_k") or 0) > 0 or sampling.get("min_p"):
            raise ConfigError(
                f"sampling = {dict(sampling)}: training needs the whole distribution; leave top_p and top_k out"
            )
