"""The algorithm ``gepa``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    gepa = "agentlightning_algorithms.gepa.algorithm:GEPA"
    candidate = "agentlightning_algorithms.shared.prompt_search.candidate:Candidate"
    return [
        Component("algorithm", "gepa", gepa, extra="gepa", summary="tunes prompts by reflection and Pareto selection"),
        Component("resource", "prompt_candidate", candidate, summary="lineage and scores of a prompt that was tried"),
    ]
