"""Trackers with a planted mistake, each of which fails the conformance test that is named next to it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentlightning.event import RolloutFinished, StepFinished
from agentlightning.testing.tracker import TrackerConformance
from tests.planted import assert_each_test_finds_one, assert_found


class Lines:
    """A correct tracker: one line of JSON for each step."""

    mode = "a"

    def __init__(self) -> None:
        self.file: Any = None

    def start(self, run: Any, directory: Path | None) -> None:
        if directory is None:
            raise ValueError("it needs a directory")
        self.file = (directory / "steps").open(self.mode)

    def on_event(self, event: Any) -> None:
        if isinstance(event, StepFinished):
            self.file.write(json.dumps([event.step, self.values(event)]) + "\n")

    def values(self, event: StepFinished) -> dict[str, Any]:
        return dict(event.values)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class TestLines(TrackerConformance):
    @pytest.fixture
    def make_tracker(self) -> type[Lines]:
        return Lines

    def read_steps(self, tracker: Any, directory: Path) -> Sequence[tuple[int, Mapping[str, float]]]:
        return [tuple(json.loads(line)) for line in (directory / "steps").read_text().splitlines()]


class Impatient(TestLines):
    patience_s: ClassVar[float] = 0.1


class StartsAnew(Lines):
    mode = "w"


class KnowsOnlySteps(Lines):
    def on_event(self, event: Any) -> None:
        self.file.write(json.dumps([event.step, self.values(event)]) + "\n")


class LosesTheLastStep(Lines):
    last: Any = None

    def on_event(self, event: Any) -> None:
        if isinstance(event, StepFinished):
            if self.last is not None:
                super().on_event(self.last)
            self.last = event


class NeedsAReward(Lines):
    def values(self, event: StepFinished) -> dict[str, Any]:
        return {**event.values, "reward": event.values["reward"]}


class KeepsPlainNames(Lines):
    def values(self, event: StepFinished) -> dict[str, Any]:
        return {name: value for name, value in event.values.items() if name.isidentifier()}


class NeedsASpan(Lines):
    def on_samples(self, step: int, samples: Any) -> None:
        for _, spans in samples:
            spans[0].attributes.items()


class NeedsASuccess(Lines):
    def on_event(self, event: Any) -> None:
        if isinstance(event, RolloutFinished) and event.status != "succeeded":
            raise ValueError(event.status)
        super().on_event(event)


class ClosesOnce(Lines):
    def close(self) -> None:
        super().close()
        self.file = None if self.file is None else Closed()


class Closed:
    def close(self) -> None:
        raise OSError("it is closed")


class ClosesWhatItNeverOpened(Lines):
    def close(self) -> None:
        self.file.close()


class ConnectsWhenItIsMade(Lines):
    def __init__(self) -> None:
        super().__init__()
        with socket.socket() as connection:
            connection.connect(("127.0.0.1", 9))


class WaitsForEver(Lines):
    has_backend = threading.Event()

    def start(self, run: Any, directory: Path | None) -> None:
        self.has_backend.wait()


class EndsTheProcess(Lines):
    def start(self, run: Any, directory: Path | None) -> None:
        raise SystemExit("no backend")


PLANTED = [
    (KnowsOnlySteps, "test_it_takes_every_event_of_a_run_in_order", "on_event takes every event"),
    (NeedsASuccess, "test_it_takes_every_event_of_a_run_in_order", "on_event takes every event"),
    (LosesTheLastStep, "test_it_takes_every_event_of_a_run_in_order", "on_event stores the metrics of each step"),
    (NeedsASpan, "test_it_takes_every_event_of_a_run_in_order", "on_samples(step, samples) takes"),
    (NeedsAReward, "test_any_name_and_any_finite_number_is_a_metric", "on_event takes every event"),
    (KeepsPlainNames, "test_any_name_and_any_finite_number_is_a_metric", "on_event stores every metric"),
    (StartsAnew, "test_a_resumed_run_keeps_its_earlier_steps", "a resumed run adds to them"),
    (ClosesOnce, "test_close_may_be_called_again_and_without_start", "close() does nothing the second time"),
    (ClosesWhatItNeverOpened, "test_close_may_be_called_again_and_without_start", "if start was not called"),
    (ConnectsWhenItIsMade, "test_without_a_directory_and_a_backend_it_gives_up_in_time", "the constructor only keeps"),
    (WaitsForEver, "test_without_a_directory_and_a_backend_it_gives_up_in_time", "still works after 0.1 s"),
    (EndsTheProcess, "test_without_a_directory_and_a_backend_it_gives_up_in_time", "raises an Exception in time"),
]


@pytest.mark.parametrize(("tracker", "test", "message"), PLANTED, ids=[planted[0].__name__ for planted in PLANTED])
def test_the_kit_finds_a_planted_mistake(
    tracker: type[Lines], test: str, message: str, request: pytest.FixtureRequest
) -> None:
    kit = Impatient if tracker is WaitsForEver else TestLines
    assert_found(kit, test, request, message, make_tracker=tracker)
    if tracker is WaitsForEver:
        tracker.has_backend.set()


def test_every_test_of_the_kit_finds_a_mistake() -> None:
    assert_each_test_finds_one(TrackerConformance, [test for _, test, _ in PLANTED])
