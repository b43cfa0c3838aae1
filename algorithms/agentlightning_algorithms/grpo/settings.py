"""The settings of ``grpo``, with their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal

from pydantic import ConfigDict

from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import bind_fields, read_spec, require_least
from agentlightning_algorithms.grpo.sampling import (
    check_sampling,
    check_training_sampling,
    flatten,
    refuse_distortions,
    unnest_temperature,
)
from agentlightning_algorithms.shared.advantage import STD_FLOOR
from agentlightning_algorithms.shared.policy.settings import LoraSettings, UpdateSettings, check_part
from agentlightning_algorithms.shared.policy.training_row import Distribution
from agentlightning_algorithms.shared.trained_model import find_model

__all__ = [
    "CheckpointSettings", "ExperienceSettings", "GRPOSettings", "LoraSettings", "PolicySettings", "TeacherSettings",
    "UpdateSettings",
]  # fmt: skip

_RESERVED: Final = (
    "policy", "drift", "errors", "outcome", "resources", "reward", "rewards", "rollout", "sampler", "staleness",
    "test", "val",
)  # fmt: skip
"""Names taken by the base model, by metrics of the whole run and by parameters of agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """One of several policies: a LoRA adapter over the model that all of them share.

    Attributes:
        lora: settings of the policy's adapter; None: the run's ``lora``.
        update: settings of the policy's weight updates; None: the run's ``update``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    lora: LoraSettings | None = None
    update: UpdateSettings | None = None

    def __post_init__(self) -> None:
        bind_fields(self, "policies")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSettings:
    """On-policy distillation from a second model (:class:`~agentlightning_algorithms.grpo.teacher.Teacher`).

    Attributes:
        model: the teacher, which must have the policy's tokenizer: a directory, a hub name, or the directory of a run
            that trained it. With an endpoint, the model's name there.
        endpoint: OpenAI base URL of a server that returns ``prompt_logprobs`` as vLLM does; None: the teacher is loaded
            into the training process.
        api_key: API key of the endpoint.
        timeout_s: timeout of a request to the endpoint.
        coefficient: weight of log(teacher / policy) in the advantage of each token.
        reward_coefficient: weight of the advantage that comes from rewards; 0: the policy learns from the teacher only.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    model: str
    endpoint: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 300.0
    coefficient: float = 1.0
    reward_coefficient: float = 1.0

    def __post_init__(self) -> None:
        bind_fields(self, "teacher")
        if not self.coefficient > 0:
            raise ConfigError(f"teacher: coefficient = {self.coefficient}; it must be above 0.")
        require_least(0, reward_coefficient=self.reward_coefficient)
        require_least(0.001, timeout_s=self.timeout_s)
        if self.endpoint is None:
            object.__setattr__(self, "model", find_model(self.model))

    def check_sampling(self, sampling: Mapping[str, Any]) -> None:
        """Raises a ConfigError if the teacher cannot score tokens that were sampled with these parameters."""
        if self.endpoint is not None and not (sampling["force"] and sampling["temperature"] == 1):
            raise ConfigError(
                f"teacher: endpoint with sampling: temperature = {sampling['temperature']}, force = "
                f"{sampling['force']}: a server returns log-probabilities at temperature 1 only; set temperature = 1 "
                "and force = true, or leave endpoint out."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceSettings:
    """Settings of training rows: the selection of rollouts and model calls, and their advantages.

    Attributes:
        rows: ``transitions``: one row per model call. ``trajectories``: consecutive calls, each of which extends the
            tokens of the previous call, share a row and its forward pass.
        estimator: a component of the kind ``advantage``; ours are described at
            :func:`~agentlightning_algorithms.shared.advantage.compute_advantages`.
        std_floor: lower bound on the standard deviation that advantages are divided by, in units of the reward.
        failed_reward: reward of a rollout that failed or has no reward, unless the lowest reward of its group is lower:
            then that one. None excludes the rollout, also from its group.
        keep_flat_groups: also train on groups whose rollouts all have the same reward.
        drop_cut_off: do not train on answers that ended at ``max_tokens`` (overlong filtering, DAPO,
            arXiv:2503.14476); they still count in their group.
        reward_shaping: a component of that kind, such as ``soft_overlong``, which changes the rewards used for
            training. Metrics show the rewards before shaping. Not with an adapter that has a credit rule. None: no
            change.
        rollout_filter: a component of that kind, such as ``finished``, which chooses the rollouts to train on. None:
            all.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    rows: Literal["transitions", "trajectories"] = "transitions"
    estimator: str | Mapping[str, Any] = "grpo"
    std_floor: float = STD_FLOOR
    failed_reward: float | None = 0.0
    keep_flat_groups: bool = False
    drop_cut_off: bool = False
    reward_shaping: str | Mapping[str, Any] | None = None
    rollout_filter: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        bind_fields(self, "experience")
        check_part("advantage", self.estimator)
        if read_spec(self.estimator)["name"] == "gdpo" and not self.keep_flat_groups:
            raise ConfigError(
                "estimator = 'gdpo' compares several rewards, but groups without spread in the first one are dropped; "
                "set keep_flat_groups: true"
            )
        if self.reward_shaping is not None:
            check_part("reward_shaping", self.reward_shaping)
        if self.rollout_filter is not None:
            check_part("rollout_filter", self.rollout_filter)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Settings of the checkpoints and weights that are kept in the run's directory.

    Attributes:
        every: steps between checkpoints, which are written while the next rollouts run. None: 1, and more once the
            training has waited for them for 30 seconds and for a tenth of its time.
        keep_every: steps between weights that are kept in ``steps/<step>``; 0: none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    every: int | None = None
    keep_every: int = 0

    def __post_init__(self) -> None:
        bind_fields(self, "checkpoints")
        require_least(1, every=self.every)
        require_least(0, keep_every=self.keep_every)


@dataclass(kw_only=True, eq=False, repr=False)
class GRPOSettings:
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
        experience: which rollouts and calls become training rows, and their advantages.
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
        extra_metrics: components of the kind ``training_metrics``, such as ``pass_at_k``.
        success_threshold: a reward of at least this counts as a success.
        rollout_timeout_s: a rollout that takes longer is stopped and counts as failed.
        eval_every: steps between evaluations on the validation set; 0: only before the first and after the last step.
        eval_rollouts: rollouts of each task in an evaluation; with several, ``val_pass@k`` is a metric.
        eval_sampling: sampling parameters in evaluation, also forced; default: ``sampling`` at temperature 0.
        target_reward: stop once the mean validation reward reaches this.
        test_dataset: evaluated before the first and after the last step; never used for model selection.
        checkpoints: when checkpoints are written, and which weights are kept.
        keep_steps: rollouts of training and validation that are older than this many steps are deleted, with their
            spans and tokens, which take about 160 kB per model call. 0: all are kept. None: 4 in a store that is lost
            with its process, and all in a durable one.
        profile_step: the step, counted from 0, whose update torch's profiler records, in ``profile.txt`` and
            ``profile.json`` of the run's directory; None: none.
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
    experience: ExperienceSettings = field(default_factory=ExperienceSettings)
    update: UpdateSettings | None = None
    lora: LoraSettings | None = None
    policies: Mapping[str, PolicySettings | None] | None = None
    teacher: TeacherSettings | None = None
    backend: str | Mapping[str, Any] = "transformers"
    refill_rounds: int = 0
    staleness: int = 0
    task_sampler: str | Mapping[str, Any] = "shuffled"
    extra_metrics: Sequence[str | Mapping[str, Any]] = ()
    success_threshold: float = 1.0
    rollout_timeout_s: float = 300.0
    eval_every: int = 10
    eval_rollouts: int = 1
    eval_sampling: Mapping[str, Any] | None = None
    target_reward: float | None = None
    test_dataset: Sequence[Any] | None = None
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    keep_steps: int | None = None
    profile_step: int | None = None
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
        bind_fields(self, "grpo", leave=["test_dataset"])  # which would be read
        require_least(1, steps=self.steps, tasks_per_step=self.tasks_per_step, eval_rollouts=self.eval_rollouts)
        require_least(1, max_batch_size=self.max_batch_size, sample_threads=self.sample_threads)
        require_least(1, train_threads=self.train_threads)
        require_least(0.001, rollout_timeout_s=self.rollout_timeout_s)
        require_least(0, eval_every=self.eval_every, refill_rounds=self.refill_rounds, keep_steps=self.keep_steps or 0)
        require_least(0, staleness=self.staleness, profile_step=self.profile_step)
        if self.profile_step is not None and self.profile_step >= self.steps:
            raise ConfigError(f"profile_step = {self.profile_step}: the last step is {self.steps - 1}, counted from 0.")
        learns_from_rewards = self.teacher is None or self.teacher.reward_coefficient > 0
        if self.teacher is not None:
            self.experience = replace(self.experience, keep_flat_groups=True)
        if self.rollouts_per_task < 2 and learns_from_rewards:
            raise ConfigError(f"rollouts_per_task = {self.rollouts_per_task}: a group needs at least 2 to compare")
        check_part("policy_backend", self.backend)
        check_part("task_sampler", self.task_sampler)
        for name in self.extra_metrics:
            check_part("training_metrics", name)
        self.model = find_model(self.model)
        given = unnest_temperature(self.sampling or {})
        self.sampling = {"force": True, "temperature": 1.0, **given}
        self.eval_sampling = {**given, "temperature": 0.0, **unnest_temperature(self.eval_sampling or {})}
        check_sampling("sampling", self.sampling)
        check_training_sampling(flatten(self.sampling))
        if self.teacher is not None:
            self.teacher.check_sampling(self.sampling)
        check_sampling("eval_sampling", self.eval_sampling)
        if self.eval_rollouts > 1 and not self.eval_sampling["temperature"]:
            raise ConfigError(f"eval_rollouts = {self.eval_rollouts} needs a temperature above 0 in eval_sampling.")
        if "transformers" in (self.backend, isinstance(self.backend, Mapping) and self.backend.get("name")):
            refuse_distortions("eval_sampling", flatten(self.eval_sampling), "and the transformers backend lacks it")
        update = self.update or UpdateSettings()
        total = update.total_updates or self.steps
        self.update = replace(update, temperature=float(self.sampling["temperature"]), total_updates=total)
        updates: list[UpdateSettings | None] = [self.update]
        if self.policies is not None:
            self.policies = policies = _complete_policies(self.policies, self.lora, self.update)
            updates += [policy.update for policy in policies.values()]
        for own in updates:
            if self.staleness and own is not None and own.old_logprobs == "trainer" and own.importance_weights is None:
                raise ConfigError(
                    f"staleness = {self.staleness} with old_logprobs = 'trainer': nothing corrects for the older "
                    "weights that sampled; set update.importance_weights, or old_logprobs: sampler, whose ratio does"
                )


def _complete_policies(
    policies: Mapping[str, PolicySettings | None], lora: LoraSettings | None, update: UpdateSettings
) -> dict[str, PolicySettings]:
    """Returns the settings of each policy with every None filled in; the temperature always comes from ``update``.

    Raises:
        ConfigError: there is no policy, a name cannot be used, or a policy has no LoRA settings.
    """
    if not policies:
        raise ConfigError("policies is empty; name at least one, as in policies: {writer: {}, reviewer: {}}")
    found = {}
    for name, given in policies.items():
        if not name.isidentifier() or name in _RESERVED:
            raise ConfigError(
                f"policies: {name!r} cannot be the name of a policy; agents request the resource by this name, so use "
                f"a Python identifier other than {', '.join(_RESERVED)}"
            )
        own = given or PolicySettings()
        if own.lora is None and lora is None:
            raise ConfigError(
                f"policies: {name} has no lora; several policies must be LoRA adapters over one model, because each "
                "would otherwise need its own model and server. Set lora: {rank: 16}"
            )
        own_update = own.update or update
        total = own_update.total_updates or update.total_updates
        own_update = replace(own_update, temperature=update.temperature, total_updates=total)
        found[name] = PolicySettings(lora=own.lora or lora, update=own_update)
    return found
