"""What the algorithm root offers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentlightning.hookspecs import Component, hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def components() -> Iterable[Component]:
    root = "agentlightning_algorithms"
    return [
        Component(
            "algorithm",
            "apo",
            f"{root}.prompt_search.apo:APO",
            extra="apo",
            summary="tunes prompts by textual gradients and beam search",
        ),
        Component("algorithm", "baseline", f"{root}.baseline:Baseline", summary="runs the agent over the data"),
        Component("algorithm", "evaluation", f"{root}.evaluation:Evaluation", summary="says how good an agent is"),
        Component(
            "algorithm",
            "gepa",
            f"{root}.prompt_search.gepa:GEPA",
            extra="gepa",
            summary="tunes prompts by reflection and Pareto selection",
        ),
        Component(
            "algorithm", "grpo", f"{root}.grpo.algorithm:GRPO", extra="grpo", summary="trains weights on one machine"
        ),
        Component(
            "algorithm", "live", f"{root}.live.algorithm:LiveLearning", summary="learns from what a process serves"
        ),
        Component(
            "policy_backend",
            "transformers",
            f"{root}.grpo.policy_process:TransformersBackend",
            extra="grpo",
            summary="samples the policy in a process of our own, on CPU or one GPU",
        ),
        Component(
            "policy_backend",
            "vllm",
            f"{root}.grpo.vllm_backend:VLLMBackend",
            summary="samples the policy on a vLLM server",
        ),
        Component("resource", "live_state", "agentlightning.live:LiveState", summary="where live learning stands"),
        Component(
            "algorithm", "verl", f"{root}.verl.algorithm:VERL", extra="verl", summary="trains weights on many GPUs"
        ),
        Component(
            "resource",
            "prompt_candidate",
            f"{root}.prompt_search.candidate:Candidate",
            summary="lineage and scores of prompts that were tried",
        ),
    ]


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_algorithms.grpo.command import export

    cli.add_command(export)
