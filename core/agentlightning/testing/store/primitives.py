"""Actions that the tests of the primitives share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, TypeVar

from agentlightning.event import Event, StepFinished
from agentlightning.frozen import freeze
from agentlightning.records import Attempt, AttemptStatus, Metrics, Record, Rollout, Run, Span, Worker, new_attempt_id
from agentlightning.resources import PromptTemplate, Resource, ResourcesUpdate
from agentlightning.store.backend import KEYS, Backend, Condition, Put, Query, Row, Write, key_of

T = TypeVar("T")

PATIENCE_S = 60.0
"""How long a test waits for something that must happen. Only a broken store makes a test wait that long."""

ANSWERS = (
    "a call hangs, or the wake-up that it waits for was lost: watch calls each listener with the events of every "
    "commit and claim, of all threads, after their change can be read"
)
"""The rule that a store breaks if a call does not return."""

JSON: Final = {
    "text": 'grüße "quoted" \\ \n\t\u2028 😀 ',
    "numbers": [0, -1, 2**63 - 1, -(2**63), 0.1, 1e-300, 1.7976931348623157e308, 1.0],
    "nothing": [None, True, False, [], {}, "", [[[]]]],
    "": {"a.b": 1, "$c": [2], "grüße": 3},
}
"""A value that careless encodings change."""


async def soon(awaitable: Awaitable[T], rule: str = ANSWERS) -> T:
    """Returns the result, or raises AssertionError with the broken rule after ``PATIENCE_S``."""
    try:
        async with asyncio.timeout(PATIENCE_S) as limit:
            return await awaitable
    except TimeoutError:
        if not limit.expired():
            raise
        raise AssertionError(f"nothing happened for {PATIENCE_S:g} s: {rule}") from None


async def in_other_thread(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Awaits a coroutine in an event loop of another thread."""
    return await asyncio.to_thread(lambda: asyncio.run(soon(call())))


def numbered(count: int, **fields: Any) -> list[Rollout]:
    """Makes queued rollouts ``ro-0``, ``ro-1``, ...; times are not in the order of the queue."""
    return [Rollout(rollout_id=f"ro-{n}", **({"input": n, "start_time": 1e9 - n} | fields)) for n in range(count)]


def records_of_each_kind(now: float) -> list[Record]:
    """Makes a record of each kind with unusual values; the span is the last."""
    attempt = make_attempt("ro-json", 0.1, status="failed")
    prompt: dict[str, Resource] = {"prompt": PromptTemplate("a {b}")}
    return [
        Run(run_id="r", name="grüße", config=JSON, metadata=JSON, status="failed"),
        Rollout(rollout_id="ro-json", input=JSON, metadata=JSON, start_time=0.1, mode="val", status="succeeded"),
        attempt.model_copy(update={"metadata": freeze(JSON)}),
        ResourcesUpdate(resources_id="rs-1", version=2, create_time=1.5, update_time=2.5, resources=prompt),
        Worker(worker_id="w", heartbeat_stats=JSON, last_heartbeat_time=now, attempt_ids=["at-1"]),
        Metrics(run_id="r", step=-3, time=0.1, values={"loss": 1e-300}),
        span_of(attempt, 1, 7).model_copy(update={"attributes": freeze(JSON), "parent_id": "f" * 16}),
    ]


def make_attempt(
    rollout_id: str, now: float, attempt_id: str = "at-1", *, number: int = 1, status: AttemptStatus = "preparing"
) -> Attempt:
    """Makes the attempt of a rollout that began now."""
    return Attempt(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=number,
        start_time=now,
        last_heartbeat_time=now,
        status=status,
    )


def begin(locked: Sequence[tuple[Row[Rollout], int]]) -> tuple[list[Write], list[Event]]:
    """Begins an attempt of each claimed rollout, as the engine does."""
    now = time.time()
    writes: list[Write] = []
    for (rollout, _), n_attempts in locked:
        writes.append(Put(rollout.model_copy(update={"status": "preparing"})))
        writes.append(Put(make_attempt(rollout.rollout_id, now, new_attempt_id(), number=n_attempts + 1)))
    return writes, [StepFinished(step=n, values={}, time=now) for n, _ in enumerate(locked, 1)]


async def add(backend: Backend, *records: Record, step: int | None = None) -> None:
    """Commits records, with an event for ``step``."""
    events = [] if step is None else [StepFinished(step=step, values={}, time=backend.now())]
    done = await backend.commit([Put(record) for record in records], (), events)
    assert done is True, f"commit: returned {done!r}; it returns True when it has written, False if a guard failed"


async def add_attempt(backend: Backend, rollout_id: str = "ro-0", status: AttemptStatus = "running") -> Attempt:
    """Commits a running rollout with an attempt."""
    now = backend.now()
    attempt = make_attempt(rollout_id, now, status=status)
    await add(backend, Rollout(rollout_id=rollout_id, input=0, start_time=now, status="running"), attempt)
    return attempt


async def row_of(backend: Backend, record: Record) -> Row[Any] | None:
    """Reads the row with the key of a record."""
    fields = zip(KEYS[type(record)], key_of(record), strict=True)
    rows = (
        await backend.select(Query(type(record), tuple([Condition(name, "eq", value) for name, value in fields])))
    ).rows
    return rows[0] if rows else None


async def rows_of(backend: Backend) -> dict[str, list[Row[Any]]]:
    """Reads everything."""
    return {kind.__name__: list((await backend.select(Query(kind))).rows) for kind in KEYS}


def span_of(attempt: Attempt, number: int, sequence_id: int = 0) -> Span:
    """Makes a span of an attempt; the number makes its id."""
    return Span.from_attributes(
        attributes={"number": number},
        rollout_id=attempt.rollout_id,
        attempt_id=attempt.attempt_id,
        sequence_id=sequence_id,
        name="step",
        span_id=f"{number:016x}",
    )


@contextlib.contextmanager
def succeeds(rule: str) -> Iterator[None]:
    """Fails with the rule if anything is raised."""
    try:
        yield
    except Exception as error:  # isolation point: code of the author
        raise AssertionError(f"{rule}; it raised {error!r}") from error


class Listener:
    """Collects the steps of ``StepFinished`` events."""

    patience_s = PATIENCE_S

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, events: Sequence[Event]) -> None:
        self.steps += [event.step for event in events if isinstance(event, StepFinished)]

    async def expect(self, steps: Sequence[int], rule: str) -> None:
        """Waits until so many events have arrived; they must be these."""
        deadline = time.monotonic() + self.patience_s
        while len(self.steps) < len(steps):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.002)
        assert self.steps == list(steps), f"{rule}; it got the events {self.steps} instead of {list(steps)}"


async def calls_of(backend: Backend, count: int) -> dict[str, Callable[[], Awaitable[object]]]:
    """Returns a call of each primitive that may be made ``count`` times."""
    attempt = await add_attempt(backend, "ro-live")
    await add(backend, *numbered(count))
    spans = iter(range(10**6))
    return {
        "commit": lambda: backend.commit([Put(Run(run_id="another"))]),
        "claim": lambda: backend.claim("default", 1, begin),
        "select": lambda: backend.select(Query(Rollout, limit=9)),
        "append_spans": lambda: backend.append_spans([span_of(attempt, next(spans))], backend.now()),
        "next_sequence_ids": lambda: backend.next_sequence_ids([("ro-live", "at-1")]),
        "count": backend.count,
    }


async def together(call: Callable[[], Awaitable[Any]], n_calls: int = 8) -> list[Any]:
    """Calls concurrently."""
    return await asyncio.gather(*(call() for _ in range(n_calls)))
