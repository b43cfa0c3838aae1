"""The algorithm ``grpo``, policy backends, ``agl export`` and ``agl serve``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import Component, Kind, hookimpl

if TYPE_CHECKING:
    import click


_SHARED = "agentlightning_algorithms.shared"
_MODULES = {
    "advantage": f"{_SHARED}.advantage",
    "aggregation": f"{_SHARED}.policy.loss",
    "policy_loss": f"{_SHARED}.policy.loss",
    "reward_shaping": f"{__name__}.episode",
    "rollout_filter": f"{__name__}.episode",
    "schedule": f"{_SHARED}.policy.settings",
    "task_sampler": f"{__name__}.episode",
    "training_metrics": f"{__name__}.episode",
}
_PARTS = (
    ("advantage", "grpo", "difference from the mean of the group, divided by its spread"),
    ("advantage", "dr_grpo", "difference from the mean of the group"),
    ("advantage", "rloo", "difference from the mean of the group's other rollouts"),
    ("advantage", "reinforce_plus_plus_baseline", "difference from the mean of the group, whitened over the batch"),
    ("advantage", "opo", "difference from the length-weighted mean of the group"),
    ("advantage", "gdpo", "several rewards, each normalised in its group, then summed and whitened"),
    ("aggregation", "token-mean", "mean over all tokens of the batch"),
    ("aggregation", "token-sum", "sum over all tokens"),
    ("aggregation", "seq-mean-token-sum", "mean over rows of their sums"),
    ("aggregation", "seq-mean-token-sum-norm", "mean over rows of their sums, divided by the constant `horizon`"),
    ("aggregation", "seq-mean-token-mean", "mean over rows of their means"),
    ("aggregation", "rollout-mean", "mean over rollouts of the means of their tokens"),
    ("policy_loss", "ppo", "clipped ratios of tokens"),
    ("policy_loss", "gspo", "one clipped ratio for a row"),
    ("policy_loss", "cispo", "clipped ratios as weights"),
    ("policy_loss", "sapo", "a soft gate on ratios instead of clipping"),
    ("policy_loss", "gmpo", "the geometric mean of the clipped ratios of a row"),
    ("policy_loss", "dppo", "tokens whose probability moved far are left out"),
    ("policy_loss", "cross_entropy", "likelihood of the tokens"),
    ("reward_shaping", "soft_overlong", "less reward for answers near the token limit"),
    ("rollout_filter", "finished", "rollouts that neither failed nor were cut off"),
    ("schedule", "constant", "constant learning rate"),
    ("schedule", "linear", "linear decay of the learning rate"),
    ("schedule", "cosine", "cosine decay of the learning rate"),
    ("task_sampler", "shuffled", "epochs in random order"),
    ("task_sampler", "undecided", "tasks whose mean reward is nearest to 0.5"),
    ("training_metrics", "pass_at_k", "chance that at least one of k rollouts of a task succeeds"),
)
"""Functions that a training uses: kind, name and summary."""


@hookimpl
def kinds() -> list[Kind]:
    backend = "agentlightning_algorithms.shared.policy_backend:PolicyBackend"
    loss = "(logprob_BT, old_logprob_BT, advantage_BT, mask_BT, settings) -> Surrogate"
    sampler = "(count, history: TaskHistory) -> indices of the next tasks"
    return [
        Kind("advantage", "(items: Sequence[Scored], *, std_floor) -> list[float]", "grpo: advantage of each rollout"),
        Kind("aggregation", "(length_B, weight_B, rollout_length_B, horizon) -> factors, divisor", "grpo: mean"),
        Kind("policy_backend", backend, "samples the model that grpo trains"),
        Kind("policy_loss", loss, "grpo: the objective"),
        Kind("reward_shaping", "(episode, group, settings) -> float", "grpo: the reward to train with"),
        Kind("rollout_filter", "(episodes, settings) -> episodes", "grpo: the rollouts to train on"),
        Kind("schedule", "(progress: float) -> float", "grpo: share of the learning rate at a progress from 0 to 1"),
        Kind("task_sampler", sampler, "grpo: the order of tasks"),
        Kind("training_metrics", "(episodes) -> dict[str, float]", "grpo: further metrics of a step"),
    ]


@hookimpl
def components() -> Iterable[Component]:
    server, vllm = f"{__name__}.transformers_backend:TransformersBackend", f"{__name__}.vllm_backend:VLLMBackend"
    summary = "samples the policy in a child process, on CPU or one GPU"
    return [
        Component("algorithm", "grpo", f"{__name__}.algorithm:GRPO", "grpo", "trains weights on one machine"),
        Component("policy_backend", "transformers", server, "grpo", summary),
        Component("policy_backend", "vllm", vllm, summary="samples on a running vLLM server"),
        *(
            Component(
                kind,
                name,
                f"{_MODULES[kind]}:{name.replace('-', '_')}",
                None if kind == "advantage" else "grpo",
                summary,
            )
            for kind, name, summary in _PARTS
        ),
    ]


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_algorithms.grpo.command import export, serve

    cli.add_command(export)
    cli.add_command(serve)
