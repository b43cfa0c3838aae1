"""Rewards, a rule of credit and an adapter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import agentlightning as agl
from agentlightning import semconv
from agentlightning.plugin import Component, CreditRule, Step, hookimpl
from agentlightning.types import Rollout, Span

plugin_interface = 1


def exact(task: Any, output: Any, rollout: Rollout, *, key: str = "answer", strip: bool = True) -> float:
    """1 if the output is the answer in the task."""
    shown = str(output).strip() if strip else str(output)
    return float(shown == str(task[key]))


class Pattern:
    """1 if the output matches a regular expression; slow rules may be async."""

    def __init__(self, *, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise agl.ConfigError(f"pattern = {pattern!r} is not a regular expression: {error}") from None

    async def __call__(self, task: Any, output: Any, rollout: Rollout) -> float:
        return float(self._pattern.search(str(output)) is not None)


class LastCall(CreditRule):
    """All credit for the last call."""

    def assign(self, steps: Sequence[Step], final_reward: float | None) -> Sequence[float | None]:
        return [None] * (len(steps) - 1) + [final_reward] if steps else []


class Calls(agl.TraceAdapter[list[str]]):
    """The names of the models that an attempt called."""

    def adapt(self, source: Sequence[Span], /) -> list[str]:
        return [str(semconv.read_model(span)) for span in source if semconv.is_llm_call(span)]


@hookimpl
def components() -> list[Component]:
    return [
        Component("reward", "exact", f"{__name__}:exact", summary="the answer in the task"),
        Component("reward", "pattern", f"{__name__}:Pattern", summary="a regular expression"),
        Component("credit", "last", f"{__name__}:LastCall", summary="all credit for the last call"),
        Component("adapter", "calls", f"{__name__}:Calls", summary="names of the called models"),
    ]
