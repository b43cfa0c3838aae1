"""The algorithm ``apo``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "algorithm",
            "apo",
            "agentlightning_algorithms.apo.algorithm:APO",
            extra="apo",
            summary="tunes prompts by textual gradients and beam search",
        ),
        Component(
            "resource",
            "prompt_candidate",
            "agentlightning_algorithms.shared.prompt_search.candidate:Candidate",
            summary="lineage and scores of a prompt that was tried",
        ),
    ]
