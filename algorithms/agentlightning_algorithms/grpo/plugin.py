"""The algorithms ``grpo``, ``sft`` and ``dpo``, policy backends, ``agl export`` and ``agl serve``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import Component, ComponentKind, hookimpl

if TYPE_CHECKING:
    import click


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
_PARTS: Sequence[tuple[ComponentKind, str, Mapping[str, str]]] = (
    (
        "aggregation",
        "learning.loss",
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
        "learning.schedule",
        {
            "constant": "constant learning rate",
            "linear": "linear decay of the learning rate",
            "cosine": "cosine decay of the learning rate",
        },
    ),
    (
        "task_sampler",
        "choice",
        {"shuffled": "epochs in random order", "undecided": "tasks whose mean reward is nearest to 0.5"},
    ),
    (
        "rollout_filter",
        "choice",
        {"everything": "all rollouts", "finished": "rollouts that neither failed nor were cut off"},
    ),
    (
        "reward_shaping",
        "choice",
        {"unchanged": "the reward itself", "soft_overlong": "less reward for answers near the token limit"},
    ),
    ("training_metrics", "choice", {"pass_at_k": "chance that at least one of k rollouts of a task succeeds"}),
)
"""Other components of a training: their kind, their module, and a summary of each by name."""


@hookimpl
def components() -> Iterable[Component]:
    package = "agentlightning_algorithms.grpo"
    return [
        Component("algorithm", "grpo", f"{package}.algorithm:GRPO", "grpo", "trains weights on one machine"),
        Component(
            "algorithm", "sft", f"{package}.offline.sft:SFT", "grpo", "fine-tunes weights on good rollouts or a file"
        ),
        Component("algorithm", "dpo", f"{package}.offline.dpo:DPO", "grpo", "trains weights on pairs of rollouts"),
        Component(
            "policy_backend",
            "transformers",
            f"{package}.backend.transformers:TransformersBackend",
            "grpo",
            "samples the policy in a child process, on CPU or one GPU",
        ),
        Component(
            "policy_backend",
            "vllm",
            f"{package}.backend.vllm:VLLMBackend",
            summary="samples on a running vLLM server",
        ),
        *(
            Component("policy_loss", name, f"{package}.learning.loss:{name}", "grpo", summary)
            for name, summary in _LOSSES.items()
        ),
        *(
            Component("advantage", name, f"agentlightning_algorithms.advantage:{name}", summary=summary)
            for name, summary in _ESTIMATORS.items()
        ),
        *(
            Component(kind, name, f"{package}.{module}:{name.replace('-', '_')}", "grpo", summary)
            for kind, module, summaries in _PARTS
            for name, summary in summaries.items()
        ),
    ]


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_algorithms.grpo.command import export, serve

    cli.add_command(export)
    cli.add_command(serve)
