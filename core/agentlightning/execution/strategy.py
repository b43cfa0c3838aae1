"""Execution strategies: run an algorithm and its runners in threads, processes or machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Final, Literal, Protocol, TypeAlias

from agentlightning.run.stop_event import StopEvent
from agentlightning.store.protocol import LightningStore

RUNNERS_FAILED: Final = "the runners failed"
"""A strategy cancels the algorithm with this message (``task.cancel(RUNNERS_FAILED)``) when no runner is left."""

Role: TypeAlias = Literal["both", "algorithm", "runner"]


class AlgorithmJob(Protocol):
    """The algorithm's half of a run. Pickled (cloudpickle) if it runs in a process of its own."""

    async def __call__(self, store: LightningStore) -> None:
        """Returns when the algorithm is done; cancelling it saves what can be saved."""
        ...


class RunnerJob(Protocol):
    """A runner's half of a run. Pickled (cloudpickle) if it runs in a process of its own."""

    def __call__(self, store: LightningStore, worker_id: str, stop: StopEvent) -> Awaitable[bool]:
        """Runs rollouts until ``stop`` is set, then drains. Returns False when its process should be replaced."""
        ...


class ExecutionStrategy(ABC):
    """Runs one algorithm and its runners against one store, until the algorithm is done."""

    role: Role = "both"
    """The half of the run that this process executes."""
    n_runners: int = 1

    @abstractmethod
    def execute(self, algorithm: AlgorithmJob, runner: RunnerJob, store: LightningStore) -> None:
        """Blocks until the algorithm is done and the runners have drained.

        Raises:
            Exception: whatever the algorithm raised.
            KeyboardInterrupt: the user stopped it; the algorithm was cancelled first.
        """
