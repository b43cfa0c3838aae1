"""Execution strategies: run an algorithm and its runners in threads, processes or machines."""

from agentlightning.execution.strategy import RUNNERS_FAILED as RUNNERS_FAILED
from agentlightning.execution.strategy import AlgorithmJob as AlgorithmJob
from agentlightning.execution.strategy import ExecutionStrategy as ExecutionStrategy
from agentlightning.execution.strategy import RunnerJob as RunnerJob
from agentlightning_plugins.strategies.client_server import (
    ClientServerExecutionStrategy as ClientServerExecutionStrategy,
)
from agentlightning_plugins.strategies.shared_memory import (
    SharedMemoryExecutionStrategy as SharedMemoryExecutionStrategy,
)
