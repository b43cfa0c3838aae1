"""Algorithms: learn from rollouts."""

from agentlightning.algorithm.algorithm import Algorithm as Algorithm
from agentlightning.algorithm.algorithm import FastAlgorithm as FastAlgorithm
from agentlightning.algorithm.algorithm import RunContext as RunContext
from agentlightning_algorithms.apo.algorithm import APO as APO
from agentlightning_algorithms.baseline import Baseline as Baseline
from agentlightning_algorithms.gepa.algorithm import GEPA as GEPA
from agentlightning_algorithms.grpo.algorithm import GRPO as GRPO
from agentlightning_algorithms.live.algorithm import LiveLearning as LiveLearning
from agentlightning_algorithms.shared.function_algorithm import FunctionalAlgorithm as FunctionalAlgorithm
from agentlightning_algorithms.shared.function_algorithm import algo as algo
from agentlightning_algorithms.verl.algorithm import VERL as VERL
