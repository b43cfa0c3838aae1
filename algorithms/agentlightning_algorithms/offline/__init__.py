"""The algorithms ``sft`` and ``dpo``, which train weights without running the agent."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    return [
        Component(
            "algorithm", "sft", f"{__name__}.training:SFT", "grpo", "fine-tunes weights on good rollouts or a file"
        ),
        Component("algorithm", "dpo", f"{__name__}.dpo:DPO", "grpo", "trains weights on pairs of rollouts"),
    ]
