"""The rewards ``judge`` and ``model``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    package = "agentlightning_plugins.rewards.judge"
    return [
        Component(
            "reward", "judge", f"{package}.judge:Judge", extra="openai", summary="a model rates each answer by a rubric"
        ),
        Component("reward", "model", f"{package}.judge:RewardModel", summary="a reward model scores each answer"),
    ]
