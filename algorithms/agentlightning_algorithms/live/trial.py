"""The two tests that decide a trial."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentlightning_algorithms.live.decision import make_test
from agentlightning_algorithms.live.sequential import SequentialTest, Verdict
from agentlightning_algorithms.live_resources import KEY_HASH, LiveState, Result

if TYPE_CHECKING:
    from agentlightning_algorithms.live.algorithm import LiveLearning


class Trial:
    """Tests the results of a trial in two orders.

    The order in which results arrive can only roll the candidate back, so a candidate whose rollouts fail immediately
    is stopped immediately. The order in which rollouts started can only promote it: a result waits for the results of
    all rollouts that started before, so a candidate gains nothing by failing late.
    """

    def __init__(self, settings: LiveLearning, state: LiveState) -> None:
        """Begins a trial; ``state`` is the state in which it began."""
        self._by_arrival = make_test(settings, state)
        self._by_start = make_test(settings, state)
        self._max_treated = settings.max_treated
        self._waiting: list[tuple[float, str, Result]] = []
        """Heap of the results that the test in the order of start has not received yet."""

    def add(self, results: Iterable[Result], horizon: float) -> None:
        """Adds results, in the order of their arrival.

        Args:
            results: of rollouts whose metadata have the group.
            horizon: Unix time before which each started rollout has a result or will not get one.
        """
        for result in results:
            if self._by_arrival.verdict != "worse":
                _add(self._by_arrival, result)
            heapq.heappush(self._waiting, (result.rollout.start_time, result.rollout.rollout_id, result))
        while self._waiting and self._waiting[0][0] < horizon and not self._is_over():
            _add(self._by_start, heapq.heappop(self._waiting)[2])

    def _is_over(self) -> bool:
        return self.verdict is not None or self._by_start.treatment.n >= self._max_treated

    @property
    def verdict(self) -> Verdict | None:
        """The decision; None while the trial is undecided."""
        if self._by_arrival.verdict == "worse":
            return "worse"
        return None if self._by_start.verdict == "worse" else self._by_start.verdict

    @property
    def is_waiting(self) -> bool:
        """Whether the results that arrived would promote the candidate, while those of earlier rollouts are missing."""
        return bool(self._waiting) and self.verdict is None and self._by_arrival.verdict in ("better", "not worse")

    @property
    def deciding_test(self) -> SequentialTest:
        """The test with the numbers that belong to the verdict."""
        return self._by_arrival if self.verdict == "worse" else self._by_start


def _add(test: SequentialTest, result: Result) -> None:
    metadata = result.rollout.metadata or {}
    unit = metadata.get(KEY_HASH, result.rollout.rollout_id)
    test.add(result.reward, is_treatment=metadata["group"] == "treatment", unit=unit)
