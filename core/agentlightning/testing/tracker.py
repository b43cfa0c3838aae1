"""Conformance tests for trackers.

Use them like this::

    class TestMyTracker(TrackerConformance):
        @pytest.fixture
        def make_tracker(self):
            return MyTracker
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentlightning import event as events
from agentlightning import semconv
from agentlightning.records import Attempt, AttemptedRollout, Run, Span
from agentlightning.run.tracker import Sample
from agentlightning.testing import promised

__all__ = ["TrackerConformance"]

RUN = Run(run_id="run", name="run [1] of ü", config={"algorithm": "Conformance", "data.limit": 3, "several": [1, None]})
OF_ROLLOUT: Mapping[str, Any] = {"rollout_id": "ro-1", "attempt_id": "at-1"}
REWARD = Span(
    **OF_ROLLOUT, name="reward", trace_id="a" * 32, span_id="b" * 16, attributes={f"{semconv.REWARD}.0.value": 1.0}
)
ROLLOUT = AttemptedRollout(
    rollout_id="ro-1",
    input={"task": "[/bold] ü \x1b[31m"},
    start_time=0.0,
    status="failed",
    attempt=Attempt(**OF_ROLLOUT, sequence_id=1, start_time=0.0, status="failed"),
)
SAMPLES: Sequence[Sample] = [(ROLLOUT, [REWARD]), (ROLLOUT, [])]


def step(number: int, **values: float) -> events.StepFinished:
    """Returns the event of a step with these metrics."""
    return events.StepFinished(run_id=RUN.run_id, step=number, values=values)


class TrackerConformance:
    """Tests that every tracker must pass.

    Subclass it and define one fixture, ``make_tracker``: a function that returns a new tracker, before ``start``.
    """

    patience_s: ClassVar[float] = 30.0
    """How long a tracker may work without its backend; the trainer waits no longer at the end of a run."""

    def read_steps(self, tracker: Any, directory: Path) -> Sequence[tuple[int, Mapping[str, float]]] | None:
        """Returns what a closed tracker has stored: each step with metrics, in order; None: a test cannot read it.

        Override it, so that the tests compare metrics instead of only finding errors.
        """
        return None

    def follow(self, tracker: Any, directory: Path | None, *seen: events.Event) -> None:
        """Calls a tracker as the trainer does, in a thread; fails if a method raises or does not return."""

        def work() -> None:
            with promised("start(run, directory) takes any run"):
                tracker.start(RUN, directory)
            try:
                for each in seen:
                    with promised(f"on_event takes every event, and ignores what it does not show: {each!r}"):
                        tracker.on_event(each)
                    self._show(tracker, each)
            finally:
                with promised("close() ends what start began"):
                    tracker.close()

        self._run_in_thread(work, 4 * self.patience_s, "every method of a tracker returns, also if its backend is slow")

    def _run_in_thread(self, work: Callable[[], None], limit_s: float, promise: str) -> None:
        failures: list[BaseException] = []

        def keep_failure() -> None:
            try:
                work()
            except BaseException as failure:  # raised in the thread of the test
                failures.append(failure)

        thread = threading.Thread(target=keep_failure, daemon=True)
        thread.start()
        thread.join(limit_s)
        assert not thread.is_alive(), f"{promise}; it still works after {limit_s:g} s"
        with promised(promise):
            for failure in failures:
                raise failure

    def _show(self, tracker: Any, seen: events.Event) -> None:
        if isinstance(seen, events.RolloutFinished) and hasattr(tracker, "on_rollout"):
            with promised("on_rollout(rollout, spans) takes every rollout, also one that failed and has no spans"):
                for sample in SAMPLES:
                    tracker.on_rollout(*sample)
        if isinstance(seen, events.StepFinished) and hasattr(tracker, "on_samples"):
            with promised("on_samples(step, samples) takes up to 8 rollouts, also ones that failed and have no spans"):
                tracker.on_samples(seen.step, SAMPLES)

    def test_it_takes_every_event_of_a_run_in_order(self, make_tracker: Callable[[], Any], tmp_path: Path) -> None:
        tracker = make_tracker()
        more: list[events.Event] = [
            events.RunStarted(name=RUN.name),
            events.ResourcesPublished(resources_id="prompts", version=1),
            events.RolloutEnqueued(rollout_id="ro-1"),
            events.RolloutStarted(**OF_ROLLOUT),
            events.AttemptFinished(**OF_ROLLOUT, status="failed", error="ValueError: [/bold] ü {x}"),
            events.AttemptRevoked(**OF_ROLLOUT, reason="timeout"),
            events.RolloutFinished(rollout_id="ro-1", status="failed"),
        ]
        self.follow(
            tracker, tmp_path, *more, step(1, reward=0.25), step(2, reward=0.5), events.RunFinished(status="failed")
        )
        self._expect(tracker, tmp_path, [(1, {"reward": 0.25}), (2, {"reward": 0.5})])

    def test_any_name_and_any_finite_number_is_a_metric(self, make_tracker: Callable[[], Any], tmp_path: Path) -> None:
        """The store leaves out NaN and infinities, so that a step may have no metrics at all."""
        tracker = make_tracker()
        odd = {
            "loss/policy": -1e30,
            "val_pass@4": 5e-324,
            "errors/Key Error: [x] ü": 3,
            "progress": 0.5,
            "x" * 200: 1.0,
        }
        self.follow(tracker, tmp_path, step(1), step(2, **odd), step(3, reward=0.5))
        stored = self.read_steps(tracker, tmp_path)
        if stored is not None:
            assert [len(values) for number, values in stored if number == 2] == [len(odd)], (
                f"on_event stores every metric, whatever its name; step 2 has {list(odd)}, stored: {stored}"
            )

    def test_a_resumed_run_keeps_its_earlier_steps(self, make_tracker: Callable[[], Any], tmp_path: Path) -> None:
        self.follow(make_tracker(), tmp_path, step(1, reward=0.25))
        again = make_tracker()
        self.follow(again, tmp_path, step(2, reward=0.5), events.RunFinished(status="succeeded"))
        self._expect(again, tmp_path, [(1, {"reward": 0.25}), (2, {"reward": 0.5})])

    def test_close_may_be_called_again_and_without_start(self, make_tracker: Callable[[], Any], tmp_path: Path) -> None:
        with promised("close() does nothing if start was not called, or failed"):
            make_tracker().close()
        tracker = make_tracker()
        self.follow(tracker, tmp_path, step(1, reward=0.25))
        with promised("close() does nothing the second time"):
            tracker.close()
        self._expect(tracker, tmp_path, [(1, {"reward": 0.25})])

    def test_without_a_directory_and_a_backend_it_gives_up_in_time(
        self, make_tracker: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A method may raise: then the trainer closes and drops the tracker, and the training goes on."""

        def refuse(*args: object) -> None:
            raise ConnectionRefusedError("this test refuses connections")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        with promised("the constructor only keeps settings; start connects"):
            tracker = make_tracker()

        def work() -> None:
            with contextlib.suppress(Exception):
                tracker.start(RUN, None)
                tracker.on_event(step(1, reward=0.25))
            tracker.close()

        promise = "without a backend, start or on_event raises an Exception in time, and close() raises nothing"
        self._run_in_thread(work, self.patience_s, promise)

    def _expect(self, tracker: Any, directory: Path, steps: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        stored = self.read_steps(tracker, directory)
        if stored is not None:
            found = [(number, {name: float(value) for name, value in values.items()}) for number, values in stored]
            assert found == steps, (
                f"on_event stores the metrics of each step once, and a resumed run adds to them: {found}"
            )
