"""The algorithm ``apo``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    apo = "agentlightning_algorithms.apo.algorithm:APO"
    candidate = "agentlightning_algorithms.shared.prompt_search.candidate:Candidate"
    return [
        Component("algorithm", "apo", apo, extra="apo", summary="tunes prompts by textual gradients and beam search"),
        Component("resource", "prompt_candidate", candidate, summary="lineage and scores of a prompt that was tried"),
    ]
