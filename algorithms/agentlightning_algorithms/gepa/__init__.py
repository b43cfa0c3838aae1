"""The algorithm ``gepa``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "algorithm",
            "gepa",
            "agentlightning_algorithms.gepa.algorithm:GEPA",
            extra="gepa",
            summary="tunes prompts by reflection and Pareto selection",
        ),
        Component(
            "resource",
            "prompt_candidate",
            "agentlightning_algorithms.shared.prompt_search.candidate:Candidate",
            summary="lineage and scores of a prompt that was tried",
        ),
    ]
