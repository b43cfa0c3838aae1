"""The algorithms ``grpo``, ``sft`` and ``dpo``, policy backends, ``agl export`` and ``agl serve``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    "grpo": "difference from the mean of the group, over its spread",
    "dr_grpo": "difference from the mean of the group",
    "rloo": "difference from the mean of the others",
    "reinforce_plus_plus_baseline": "difference from the mean of the group, whitened over the batch",
    "opo": "difference from the mean weighted by length",
}
_PARTS: Mapping[ComponentKind, Mapping[str, str]] = {
    "aggregation": {
        "token-mean": "learning.loss:token_mean",
        "token-sum": "learning.loss:token_sum",
        "seq-mean-token-sum": "learning.loss:seq_mean_token_sum",
        "seq-mean-token-sum-norm": "learning.loss:seq_mean_token_sum_norm",
        "seq-mean-token-mean": "learning.loss:seq_mean_token_mean",
        "rollout-mean": "learning.loss:rollout_mean",
    },
    "schedule": {name: f"learning.schedule:{name}" for name in ("constant", "linear", "cosine")},
    "task_sampler": {"shuffled": "choice:shuffled", "undecided": "choice:undecided"},
    "rollout_filter": {"everything": "choice:everything", "finished": "choice:finished"},
    "reward_shaping": {"unchanged": "choice:unchanged", "soft_overlong": "choice:soft_overlong"},
    "training_metrics": {"pass_at_k": "choice:pass_at_k"},
}
"""Further parts of a training, by kind and name."""


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
            Component(kind, name, f"{package}.{target}", "grpo", f"{kind.replace('_', ' ')} of grpo")
            for kind, parts in _PARTS.items()
            for name, target in parts.items()
        ),
    ]


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_algorithms.grpo.command import export, serve

    cli.add_command(export)
    cli.add_command(serve)
