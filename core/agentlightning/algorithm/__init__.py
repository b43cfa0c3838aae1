"""Algorithms: what learns from rollouts."""

from typing import TYPE_CHECKING

from agentlightning.facade import resolve_lazily

if TYPE_CHECKING:
    from agentlightning.algorithm.algorithm import Algorithm as Algorithm
    from agentlightning.algorithm.algorithm import FastAlgorithm as FastAlgorithm
    from agentlightning.algorithm.context import RunContext as RunContext
    from agentlightning.algorithm.decorator import FunctionalAlgorithm as FunctionalAlgorithm
    from agentlightning.algorithm.decorator import algo as algo
    from agentlightning_algorithms.baseline import Baseline as Baseline
    from agentlightning_algorithms.grpo.algorithm import GRPO as GRPO
    from agentlightning_algorithms.live.algorithm import LiveLearning as LiveLearning
    from agentlightning_algorithms.prompt_search.apo import APO as APO
    from agentlightning_algorithms.prompt_search.gepa import GEPA as GEPA
    from agentlightning_algorithms.verl.algorithm import VERL as VERL

__all__ = [
    "APO",
    "GEPA",
    "GRPO",
    "VERL",
    "Algorithm",
    "Baseline",
    "FastAlgorithm",
    "FunctionalAlgorithm",
    "LiveLearning",
    "RunContext",
    "algo",
]

__getattr__ = resolve_lazily(
    __name__,
    {
        "APO": ("algorithm", "apo"),
        "Algorithm": "agentlightning.algorithm.algorithm",
        "Baseline": ("algorithm", "baseline"),
        "FastAlgorithm": "agentlightning.algorithm.algorithm",
        "FunctionalAlgorithm": "agentlightning.algorithm.decorator",
        "GEPA": ("algorithm", "gepa"),
        "GRPO": ("algorithm", "grpo"),
        "LiveLearning": ("algorithm", "live"),
        "RunContext": "agentlightning.algorithm.context",
        "VERL": ("algorithm", "verl"),
        "algo": "agentlightning.algorithm.decorator",
    },
)
