"""The algorithm ``grpo``, its policy backends, and ``agl export``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import Component, hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def components() -> Iterable[Component]:
    package = "agentlightning_algorithms.grpo"
    return [
        Component("algorithm", "grpo", f"{package}.algorithm:GRPO", "grpo", "trains weights on one machine"),
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
    ]


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_algorithms.grpo.command import export

    cli.add_command(export)
