"""``@algo``: an algorithm from a function."""

from agentlightning_algorithms.shared.function_algorithm import FunctionalAlgorithm as FunctionalAlgorithm
from agentlightning_algorithms.shared.function_algorithm import algo as algo
