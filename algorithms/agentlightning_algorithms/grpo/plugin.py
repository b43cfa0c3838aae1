"""The algorithms ``grpo`` and ``sft``, policy backends, ``agl export`` and ``agl serve``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import Component, hookimpl

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


@hookimpl
def components() -> Iterable[Component]:
    package = "agentlightning_algorithms.grpo"
    return [
        Component("algorithm", "grpo", f"{package}.algorithm:GRPO", "grpo", "trains weights on one machine"),
        Component(
            "algorithm", "sft", f"{package}.sft.algorithm:SFT", "grpo", "fine-tunes weights on good rollouts or a file"
        ),
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
    ]


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_algorithms.grpo.command import export, serve

    cli.add_command(export)
    cli.add_command(serve)
