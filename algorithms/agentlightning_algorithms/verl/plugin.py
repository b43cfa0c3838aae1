"""The algorithm ``verl``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "algorithm",
            "verl",
            "agentlightning_algorithms.verl.algorithm:VERL",
            extra="verl",
            summary="trains weights on many GPUs",
        ),
    ]
