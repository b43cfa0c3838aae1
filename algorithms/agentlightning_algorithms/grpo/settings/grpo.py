"""Settings of ``grpo``, with their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from agentlightning.errors import ConfigError, suggest
from agentlightning.plugin.registry import get_manager
from agentlightning.plugin.settings import require_least
from agentlightning_algorithms.advantage import STD_FLOOR
from agentlightning_algorithms.grpo.checkpoints.clock import CheckpointClock
from agentlightning_algorithms.grpo.settings.lora import LoraSettings as LoraSettings
from agentlightning_algorithms.grpo.settings.policy import PolicySettings as PolicySettings
from agentlightning_algorithms.grpo.settings.policy import complete_policies
from agentlightning_algorithms.grpo.settings.teacher import TeacherSettings as TeacherSettings
from agentlightning_algorithms.grpo.settings.update import Aggregation as Aggregation
from agentlightning_algorithms.grpo.settings.update import KlEstimator as KlEstimator
from agentlightning_algorithms.grpo.settings.update import MaskLevel as MaskLevel
from agentlightning_algorithms.grpo.settings.update import UpdateSettings as UpdateSettings
from agentlightning_algorithms.grpo.settings.update import WeightLevel as WeightLevel
from agentlightning_algorithms.grpo.training_row import Distribution
from agentlightning_algorithms.trained_model.checkpoint import find_model

SAMPLING_KEYS: Final = (
    "force", "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop", "seed", "n", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "extra_body",
)  # fmt: skip


PENALTIES: Final = ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
_NEUTRAL: Final[Mapping[str, Any]] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None,
}  # fmt: skip
"""The parameters that change the distribution of tokens, each at the value that has no effect."""


@dataclass(kw_only=True, eq=False, repr=False)
class ExperienceSettings:
    """Settings of training rows: the selection of model calls, and their advantages.

    Attributes:
        rows: ``transitions``: one row per model call. ``trajectories``: consecutive calls, each of which extends the
            tokens of the previous call, share a row and its forward pass.
        estimator: a component of the kind ``advantage``; ours are described at
            :func:`~agentlightning_algorithms.advantage.compute_advantages`.
        std_floor: lower bound on the standard deviation that advantages are divided by, in units of the reward.
        failed_reward: reward of a rollout that failed or has no reward; None excludes the rollout, also from its group.
        keep_flat_groups: also train on groups whose rollouts all have the same reward.
        drop_cut_off: do not train on answers that ended at ``max_tokens`` (overlong filtering, DAPO,
            arXiv:2503.14476); they still count in their group.
    """

    rows: Literal["transitions", "trajectories"] = "transitions"
    estimator: str = "grpo"
    std_floor: float = STD_FLOOR
    failed_reward: float | None = 0.0
    keep_flat_groups: bool = False
    drop_cut_off: bool = False


@dataclass(kw_only=True, eq=False, repr=False)
class GRPOSettings(ExperienceSettings):
    """The arguments of ``GRPO``.

    Attributes:
        model: a causal language model with a chat template: its directory, its hub name, or the directory of a run that
            trained one, such as ``sft``.
        steps: number of weight updates.
        tasks_per_step: tasks per step, drawn without repetition until the training set is used up.
        rollouts_per_task: group size.
        sampling: sampling parameters of agents' calls in training; default ``{"temperature": 1.0}``. The gateway forces
            temperature, top_p, top_k and the absence of penalties on every call, whatever the agent requests. ``force:
            False`` leaves temperature, top_p and top_k to each call, which is trained with log-probabilities at its own
            values; penalties, min_p and logit_bias stay off.
        update: learning rate, clipping, minibatches and so on. Its schedule spans ``steps``; its temperature and seed
            are taken from ``sampling`` and from the run.
        lora: train low-rank adapters; None: all weights.
        policies: several policies by name, each a LoRA adapter over ``model`` with its own optimizer; agents receive
            each policy as the resource of that name, and a call trains the policy that it names. None: one policy, the
            resource ``resource_name``.
        teacher: a second model to distil from; groups without spread are then trained on, too.
        backend: what samples agents' calls: ``transformers``, a process started by the training; ``vllm``, a server
            that is already running; or ``{"name": ..., **settings}``.
        refill_rounds: how many times a step draws further tasks to replace groups without spread (dynamic sampling,
            DAPO, arXiv:2503.14476).
        staleness: 0: sampling and training alternate. 1: the next step's rollouts run while this step trains, with
            weights that are one update old. k from 2 on: the rollouts of up to k later steps run as well, running
            calls continue with new weights, and a step takes the first complete groups; groups that were begun, or have
            calls that were sampled, more than k updates ago are dropped.
        task_sampler: a component of the kind ``task_sampler``, which chooses the tasks of a step: ``shuffled`` epochs,
            or ``undecided``: tasks whose last mean reward is nearest to 0.5.
        reward_shaping: a component of that kind, which changes the rewards used for training: ``unchanged`` or
            ``soft_overlong``. Metrics show the rewards before shaping. Not with an adapter that has a credit rule.
        rollout_filter: a component of that kind, which chooses the rollouts to train on: ``everything`` or
            ``finished``.
        extra_metrics: components of the kind ``training_metrics``, such as ``pass_at_k``.
        success_threshold: a reward of at least this counts as a success.
        rollout_timeout_s: a rollout that takes longer is stopped and counts as failed.
        eval_every: steps between evaluations on the validation set; 0: only before the first and after the last step.
        eval_rollouts: rollouts of each task in an evaluation; with several, ``val_pass@k`` is a metric.
        eval_sampling: sampling parameters in evaluation, also forced; default: ``sampling`` at temperature 0.
        target_reward: stop once the mean validation reward reaches this.
        test_dataset: evaluated before the first and after the last step; never used for model selection.
        checkpoint_every: steps between checkpoints in the run's directory, or a time such as ``5m``. They are
            written while the next rollouts run.
        keep_weights_every: steps between weights that are kept in ``steps/<step>`` of the run's directory; 0: none.
        keep_weights_last: number of newest checkpoints whose weights are kept there, too.
        keep_steps: rollouts of training and validation that are older than this many steps are deleted, with their
            spans and tokens, which take about 160 kB per model call. 0: all are kept. None: 4 in a store that is lost
            with its process, and all in a durable one.
        resource_name: name of the resource that agents receive the model as.
        dtype: dtype of computation, in sampling and in training. Trained weights stay in float32 because an update is
            smaller than the resolution of bfloat16.
        device: device for sampling and training.
        train_threads: torch threads of the trainer; None: torch's default.
        sample_threads: torch threads of the policy server.
        max_batch_size: calls that the policy server samples at once.
        seed: seed of task order, sampling and minibatches; None: the run's.

    Raises:
        PluginError: the name of a component that no plugin offers.
        ConfigError: a value out of range, settings that contradict each other, an unknown key of ``sampling``, or a
            ``model`` that is a path without a model.
    """

    model: str
    steps: int = 100
    tasks_per_step: int = 16
    rollouts_per_task: int = 8
    sampling: Mapping[str, Any] | None = None
    update: UpdateSettings | None = None
    lora: LoraSettings | None = None
    policies: Mapping[str, PolicySettings | None] | None = None
    teacher: TeacherSettings | None = None
    backend: str | Mapping[str, Any] = "transformers"
    refill_rounds: int = 0
    staleness: int = 0
    task_sampler: str = "shuffled"
    reward_shaping: str = "unchanged"
    rollout_filter: str = "everything"
    extra_metrics: Sequence[str] = ()
    success_threshold: float = 1.0
    rollout_timeout_s: float = 300.0
    eval_every: int = 10
    eval_rollouts: int = 1
    eval_sampling: Mapping[str, Any] | None = None
    target_reward: float | None = None
    test_dataset: Sequence[Any] | None = None
    checkpoint_every: int | str = 1
    keep_weights_every: int = 0
    keep_weights_last: int = 0
    keep_steps: int | None = None
    resource_name: str = "llm"
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    train_threads: int | None = None
    sample_threads: int = 1
    max_batch_size: int = 64
    seed: int | None = None

    @property
    def is_asynchronous(self) -> bool:
        """Whether rollouts may go on while the weights change."""
        return self.staleness > 1

    @property
    def distribution(self) -> Distribution | None:
        """The distribution of all calls in training; None: each call has its own."""
        sampling = self.sampling or {}
        return Distribution(float(sampling["temperature"])) if sampling["force"] else None

    def __post_init__(self) -> None:
        require_least(1, steps=self.steps, tasks_per_step=self.tasks_per_step)
        CheckpointClock(self.checkpoint_every)
        require_least(1, eval_rollouts=self.eval_rollouts)
        require_least(0, eval_every=self.eval_every, refill_rounds=self.refill_rounds, keep_steps=self.keep_steps or 0)
        require_least(0, staleness=self.staleness)
        require_least(0, keep_weights_every=self.keep_weights_every, keep_weights_last=self.keep_weights_last)
        learns_from_rewards = self.teacher is None or self.teacher.reward_coefficient > 0
        self.keep_flat_groups = self.keep_flat_groups or self.teacher is not None
        if self.rollouts_per_task < 2 and learns_from_rewards:
            raise ConfigError(f"rollouts_per_task = {self.rollouts_per_task}: a group needs at least 2 to compare")
        get_manager().get("advantage", self.estimator)
        get_manager().get("task_sampler", self.task_sampler)
        get_manager().get("reward_shaping", self.reward_shaping)
        get_manager().get("rollout_filter", self.rollout_filter)
        for name in self.extra_metrics:
            get_manager().get("training_metrics", name)
        self.model = find_model(self.model)
        given = _unnest_temperature(self.sampling or {})
        self.sampling = {"force": True, "temperature": 1.0, **given}
        self.eval_sampling = {**given, "temperature": 0.0, **_unnest_temperature(self.eval_sampling or {})}
        _check_sampling("sampling", self.sampling)
        _check_training_sampling(flatten(self.sampling))
        if self.teacher is not None:
            self.teacher.check_sampling(self.sampling)
        _check_sampling("eval_sampling", self.eval_sampling)
        if self.eval_rollouts > 1 and not self.eval_sampling["temperature"]:
            raise ConfigError(f"eval_rollouts = {self.eval_rollouts} needs a temperature above 0 in eval_sampling.")
        if "transformers" in (self.backend, isinstance(self.backend, Mapping) and self.backend.get("name")):
            _refuse_distortions("eval_sampling", flatten(self.eval_sampling), "and the transformers backend lacks it")
        update = self.update or UpdateSettings()
        total = update.total_updates or self.steps
        self.update = replace(update, temperature=float(self.sampling["temperature"]), total_updates=total)
        updates: list[UpdateSettings | None] = [self.update]
        if self.policies is not None:
            self.policies = policies = complete_policies(self.policies, self.lora, self.update)
            updates += [policy.update for policy in policies.values()]
        for own in updates:
            if self.staleness and own is not None and own.old_logprobs == "trainer" and own.importance_weights is None:
                raise ConfigError(
                    f"staleness = {self.staleness} with old_logprobs = 'trainer': nothing corrects for the older "
                    "weights that sampled; set update.importance_weights, or old_logprobs: sampler, whose ratio does"
                )


def flatten(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sampling parameters with those of ``extra_body`` moved to the top level, as in a request."""
    own = {name: value for name, value in sampling.items() if name not in ("extra_body", "force")}
    return {**own, **(sampling.get("extra_body") or {})}


def agent_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters that agents pass on to ``chat.completions.create``."""
    return {name: value for name, value in sampling.items() if name != "force"}


def distribution(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request that decide which distribution its tokens are drawn from."""
    flat = flatten(sampling)
    return {name: neutral if flat.get(name) is None else flat[name] for name, neutral in _NEUTRAL.items()}


def _unnest_temperature(sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns sampling parameters with the temperature of ``extra_body``, if any, moved to the top level."""
    body = dict(sampling.get("extra_body") or {})
    if "temperature" not in body:
        return sampling
    return {**sampling, "temperature": body.pop("temperature"), "extra_body": body}


def _check_sampling(name: str, sampling: Mapping[str, Any]) -> None:
    for key in sampling:
        if key not in SAMPLING_KEYS:
            raise ConfigError(
                f"{name} has no key {key!r}.{suggest(key, SAMPLING_KEYS)} Keys: {', '.join(SAMPLING_KEYS)}."
            )
    if not isinstance(sampling.get("force", True), bool):
        raise ConfigError(f"{name}: force = {sampling['force']!r}; true or false is needed.")
    temperature = sampling.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or temperature < 0:
        raise ConfigError(f"{name}: temperature = {temperature!r}; a number of at least 0 is needed.")


def _refuse_distortions(name: str, sampling: Mapping[str, Any], why: str) -> None:
    for key in ("min_p", *PENALTIES):
        if sampling.get(key) not in (None, {}, _NEUTRAL.get(key)):
            raise ConfigError(
                f"{name}: {key} = {sampling[key]!r} changes the distribution of tokens, {why}; leave it out."
            )


def _check_training_sampling(sampling: Mapping[str, Any]) -> None:
    """Refuses parameters under which a group has no spread, or tokens are not sampled from the whole distribution."""
    if sampling["temperature"] == 0:
        raise ConfigError("sampling: temperature = 0 always gives the same answer; a group then has no spread.")
    if sampling.get("seed") is not None:
        raise ConfigError(
            f"sampling: seed = {sampling['seed']!r} would give all rollouts of a task the same answers; set the "
            "algorithm's seed or the run's instead."
        )
    _refuse_distortions("sampling", sampling, "and the trainer computes log-probabilities without it")
    if sampling.get("top_p") not in (None, 1) or (sampling.get("top_k") or 0) > 0:
        raise ConfigError(
            f"sampling = {dict(sampling)}: training needs the whole distribution; leave top_p and top_k out"
        )
