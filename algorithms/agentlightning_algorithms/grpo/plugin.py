"""The algorithm ``grpo``, its policy backends, and ``agl export``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import Component, hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "algorithm",
            "grpo",
            "agentlightning_algorithms.grpo.algorithm:GRPO",
            extra="grpo",
            summary="trains weights on one machine",
        ),
        Component(
            "policy_backend",
            "transformers",
            "agentlightning_algorithms.grpo.backend.transformers:TransformersBackend",
            extra="grpo",
            summary="samples the policy in a process of our own, on CPU or one GPU",
        ),
        Component(
            "policy_backend",
            "vllm",
            "agentlightning_algorithms.grpo.backend.vllm:VLLMBackend",
            summary="samples the policy on a vLLM server",
        ),
    ]


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_algorithms.grpo.command import export

    cli.add_command(export)
