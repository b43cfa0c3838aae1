"""Execution strategies: run an algorithm and its runners in threads, processes or machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Literal, TypeAlias

from agentlightning.run.thread import StopEvent
from agentlightning.store.protocol import LightningStore

RUNNERS_FAILED: Final = "the runners failed"
"""A strategy cancels the algorithm with this message (``task.cancel(RUNNERS_FAILED)``) when no runner is left."""

Role: TypeAlias = Literal["both", "algorithm", "runner"]
# The halves of a run. They are pickled (cloudpickle) if they run in a separate process.
AlgorithmJob: TypeAlias = Callable[[LightningStore], Coroutine[Any, Any, None]]
"""Returns when the algorithm is done; cancelling it saves what can be saved."""
RunnerJob: TypeAlias = Callable[[LightningStore, str, StopEvent], Awaitable[bool]]
"""Runs rollouts as the named worker until the event is set, then drains; False if its process should be replaced."""


class ExecutionStrategy(ABC):
    """Runs one algorithm and its runners against one store, until the algorithm is done.

    When a runner fails, the strategy replaces it, or continues with the other runners.
    ``agentlightning.testing.strategy.StrategyConformance`` tests a strategy.
    """

    role: Role = "both"
    """The half of the run that this process executes."""
    n_runners: int = 1
    shares_process: bool = False
    """Whether the runners share this process, so that each needs its own runner object."""

    @abstractmethod
    def execute(self, algorithm: AlgorithmJob, runner: RunnerJob, store: LightningStore) -> None:
        """Blocks until the algorithm is done and the runners have drained.

        Raises:
            Exception: whatever the algorithm raised, or why no runner is left.
            KeyboardInterrupt: the user stopped it; the algorithm was cancelled first.
        """
