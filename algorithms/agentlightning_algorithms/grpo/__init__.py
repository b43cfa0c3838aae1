"""The algorithm ``grpo``, policy backends, ``agl export`` and ``agl serve``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import Component, Kind, hookimpl

if TYPE_CHECKING:
    import click


_POLICY = "agentlightning_algorithms.shared.policy"
_LOSSES = {
    "ppo": "clipped ratios of tokens",
    "gspo": "one clipped ratio for a row",
    "cispo": "clipped ratios as weights",
    "cross_entropy": "likelihood of the tokens",
}
_ESTIMATORS = {
    "grpo": "difference from the mean of the group, divided by its spread",
    "dr_grpo": "difference from the mean of the group",
    "rloo": "difference from the mean of the group's other rollouts",
    "reinforce_plus_plus_baseline": "difference from the mean of the group, whitened over the batch",
    "opo": "difference from the length-weighted mean of the group",
}
_PARTS: Sequence[tuple[str, str, Mapping[str, str]]] = (
    (
        "aggregation",
        f"{_POLICY}.loss",
        {
            "token-mean": "mean over all tokens of the batch",
            "token-sum": "sum over all tokens",
            "seq-mean-token-sum": "mean over rows of their sums",
            "seq-mean-token-sum-norm": "mean over rows of their sums, divided by the constant `horizon`",
            "seq-mean-token-mean": "mean over rows of their means",
            "rollout-mean": "mean over rollouts of the means of their tokens",
        },
    ),
    (
        "schedule",
        f"{_POLICY}.settings",
        {
            "constant": "constant learning rate",
            "linear": "linear decay of the learning rate",
            "cosine": "cosine decay of the learning rate",
        },
    ),
    (
        "task_sampler",
        f"{__name__}.episode",
        {"shuffled": "epochs in random order", "undecided": "tasks whose mean reward is nearest to 0.5"},
    ),
    (
        "rollout_filter",
        f"{__name__}.episode",
        {"finished": "rollouts that neither failed nor were cut off"},
    ),
    (
        "reward_shaping",
        f"{__name__}.episode",
        {"soft_overlong": "less reward for answers near the token limit"},
    ),
    (
        "training_metrics",
        f"{__name__}.episode",
        {"pass_at_k": "chance that at least one of k rollouts of a task succeeds"},
    ),
)
"""Other components of a training: their kind, their module, and a summary of each by name."""


@hookimpl
def kinds() -> list[Kind]:
    backend = "agentlightning_algorithms.shared.policy_backend:PolicyBackend"
    loss = "(logprob_BT, old_logprob_BT, advantage_BT, mask_BT, settings) -> Surrogate"
    sampler = "(size, count, position, *, seed, rewards) -> indices of the next tasks"
    return [
        Kind("advantage", "(items: Sequence[Scored], *, std_floor) -> list[float]", "grpo: advantage of each rollout"),
        Kind("aggregation", "(length_B, weight_B, rollout_length_B, horizon) -> factors, divisor", "grpo: mean"),
        Kind("policy_backend", backend, "samples the model that grpo trains"),
        Kind("policy_loss", loss, "grpo: the objective"),
        Kind("reward_shaping", "(episode, settings) -> float", "grpo: the reward to train with"),
        Kind("rollout_filter", "(episodes, settings) -> episodes", "grpo: the rollouts to train on"),
        Kind("schedule", "(progress: float) -> float", "grpo: share of the learning rate at a progress from 0 to 1"),
        Kind("task_sampler", sampler, "grpo: the order of tasks"),
        Kind("training_metrics", "(episodes) -> dict[str, float]", "grpo: further metrics of a step"),
    ]


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component("algorithm", "grpo", f"{__name__}.algorithm:GRPO", "grpo", "trains weights on one machine"),
        Component(
            "policy_backend",
            "transformers",
            f"{__name__}.transformers_backend:TransformersBackend",
            "grpo",
            "samples the policy in a child process, on CPU or one GPU",
        ),
        Component(
            "policy_backend",
            "vllm",
            f"{__name__}.vllm_backend:VLLMBackend",
            summary="samples on a running vLLM server",
        ),
        *(
            Component("policy_loss", name, f"{_POLICY}.loss:{name}", "grpo", summary)
            for name, summary in _LOSSES.items()
        ),
        *(
            Component("advantage", name, f"agentlightning_algorithms.shared.advantage:{name}", summary=summary)
            for name, summary in _ESTIMATORS.items()
        ),
        *(
            Component(kind, name, f"{module}:{name.replace('-', '_')}", "grpo", summary)
            for kind, module, summaries in _PARTS
            for name, summary in summaries.items()
        ),
    ]


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_algorithms.grpo.command import export, serve

    cli.add_command(export)
    cli.add_command(serve)
