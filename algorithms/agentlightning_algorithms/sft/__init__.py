"""The algorithm ``sft``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    return [
        Component(
            "algorithm", "sft", f"{__name__}.algorithm:SFT", "grpo", "fine-tunes weights on good rollouts or a file"
        )
    ]
