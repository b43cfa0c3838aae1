"""How an algorithm and its runners are put into threads, processes or machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Final, Protocol

from agentlightning.run.stop_event import StopEvent
from agentlightning.store.protocol import LightningStore

RUNNERS_FAILED: Final = "the runners failed"
"""What a strategy cancels an algorithm with (``task.cancel(RUNNERS_FAILED)``) when nobody is left to run rollouts."""


class AlgorithmJob(Protocol):
    """The algorithm's half of a run. Pickled (cloudpickle) where it gets a process of its own."""

    async def __call__(self, store: LightningStore) -> None:
        """Returns when the algorithm is done; cancelling it saves what can be saved."""
        ...


class RunnerJob(Protocol):
    """A runner's half of a run. Pickled (cloudpickle) to reach a process of its own."""

    def __call__(self, store: LightningStore, worker_id: str, stop: StopEvent) -> Awaitable[bool]:
        """Runs rollouts until ``stop`` is set, then drains. Returns False when its process should be replaced."""
        ...


class ExecutionStrategy(ABC):
    """Runs one algorithm and its runners against one store, until the algorithm is done."""

    @abstractmethod
    def execute(self, algorithm: AlgorithmJob, runner: RunnerJob, store: LightningStore) -> None:
        """Blocks until the algorithm is done and the runners have drained.

        Raises:
            Exception: whatever the algorithm raised.
            KeyboardInterrupt: the user stopped it; the algorithm was cancelled first.
        """
