"""The rewards ``judge`` and ``model``, and the reward shaping ``judge``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    module, summary = f"{__name__}.judge", "a model rates each answer by a rubric"
    return [
        Component("reward", "judge", f"{module}:Judge", extra="openai", summary=summary),
        Component(
            "reward_shaping", "judge", f"{__name__}.group:compare", "openai", "a model compares a group's attempts"
        ),
        Component("reward", "model", f"{module}:RewardModel", summary="a reward model scores each answer"),
    ]
