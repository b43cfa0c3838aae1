"""The algorithm ``dpo``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    return [Component("algorithm", "dpo", f"{__name__}.algorithm:DPO", "grpo", "trains weights on pairs of rollouts")]
