"""Tests of the primitives ``select``, ``append_spans``, ``next_sequence_ids`` and ``count``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from agentlightning.errors import NotFoundError
from agentlightning.records import LIVE_ATTEMPT, Attempt, AttemptStatus, Rollout, Run, Span, Worker
from agentlightning.store.backend import Backend, Condition, Delete, Guard, Put, Query, key_of
from agentlightning.testing.store.primitives import (
    add,
    add_attempt,
    in_other_thread,
    numbered,
    records_of_each_kind,
    row_of,
    span_of,
    together,
)


@contextmanager
def fails(primitive: str, missing: object) -> Iterator[None]:
    """Fails unless NotFoundError is raised."""
    with suppress(NotFoundError):
        yield
        raise AssertionError(f"{primitive}: accepted {missing}, which is not stored; it raises NotFoundError")


class ReadingTests:
    """Tests of queries, spans, their numbers and counts."""

    # --- select ---

    async def test_records_come_back_unchanged(self, backend: Backend) -> None:
        *records, span = records_of_each_kind(backend.now())
        assert isinstance(span, Span)
        await add(backend, *records)
        await backend.append_spans([span], backend.now() - 5.0)
        for record in (*records, span):
            found = await row_of(backend, record)
            assert found is not None, f"select: {type(record).__name__} {key_of(record)} is not found by its key"
            text, expected = found.record.model_dump_json(), record.model_dump_json()
            assert text == expected, f"select: a {type(record).__name__} came back as {text}, not as it was: {expected}"

    async def test_a_query_finds_the_records_that_satisfy_it(self, backend: Backend) -> None:
        for changes in (
            {"mode": "train", "metadata": {"group": "a", "step": 1, "note": None}},
            {"status": "running", "metadata": {"group": "A", "step": 2}, "start_time": 2e9},
            {"mode": "val", "status": "succeeded", "end_time": 5.0, "run_id": "other"},
        ):
            number = (await backend.count())["rollouts"]
            await add(backend, numbered(number + 1)[-1].model_copy(update=changes))
        live = await add_attempt(backend, "ro-live")
        await backend.append_spans([span_of(live, 1)], backend.now())

        def is_(field: str, op: Any, value: Any) -> Condition:
            return Condition(field, op, value)

        ids = ["ro-0", "ro-1", "ro-2", "ro-live"]
        cases: list[tuple[list[Condition], list[Condition], list[str]]] = [
            ([], [], ids),
            ([is_("rollout_id", "eq", "ro-1")], [], ids[1:2]),
            ([is_("rollout_id", "in", ("ro-2", "ro-0", "ro-9"))], [], ["ro-0", "ro-2"]),
            ([is_("rollout_id", "in", ())], [], []),
            ([is_("status", "in", ("running", "succeeded"))], [], ids[1:]),
            ([is_("rollout_id", "contains", "o-l")], [], ids[3:]),
            ([is_("rollout_id", "contains", "RO")], [], []),
            ([is_("rollout_id", "contains", "_")], [], []),
            ([is_("mode", "contains", "a")], [], ["ro-0", "ro-2"]),
            ([is_("start_time", "ge", 1e9), is_("start_time", "le", 1e9)], [], ids[:1]),
            ([is_("end_time", "le", 9.0)], [], ["ro-2"]),
            ([is_("end_time", "eq", None)], [], ["ro-0", "ro-1", "ro-live"]),
            ([is_("metadata.group", "eq", "a")], [], ids[:1]),
            ([is_("metadata.step", "eq", 2)], [], ids[1:2]),
            ([is_("metadata.note", "eq", None)], [], ids),
            ([is_("run_id", "eq", "other"), is_("mode", "eq", "train")], [], []),
            ([], [is_("run_id", "eq", "other"), is_("mode", "eq", "train")], ["ro-0", "ro-2"]),
            ([is_("run_id", "eq", "default")], [is_("mode", "eq", "val"), is_("metadata.step", "eq", 2)], ids[1:2]),
        ]
        for where, any_of, expected in cases:
            page = await backend.select(Query(Rollout, tuple(where), tuple(any_of)))
            found = [row.record.rollout_id for row in page.rows]
            assert found == expected, f"select: where={where}, any_of={any_of} found {found} instead of {expected}"
        for run_id, n_spans in (("default", 1), ("other", 0)):
            rows = (await backend.select(Query(Span, (is_("run_id", "eq", run_id),)))).rows
            assert len(rows) == n_spans, f"select: spans are found by the run_id of their rollout; {run_id} has {rows}"

    async def test_a_query_orders_and_limits_its_rows(self, backend: Backend) -> None:
        modes = ("train", None, "val", "test", None)
        await add(backend, *[numbered(5)[n].model_copy(update={"mode": mode}) for n, mode in enumerate(modes)])
        await add(backend, numbered(1)[0].model_copy(update={"mode": "train"}))

        async def check(expected: str, **options: Any) -> int | None:
            page = await backend.select(Query(Rollout, **options))
            found = "".join(str(row.record.input) for row in page.rows)
            assert found == expected, (
                f"select: {options} returned the rows {found} instead of {expected}; rows come in the order of "
                "insertion, which a replacement keeps, or sorted with None first and ties in the order of insertion"
            )
            total = 5 if options.get("count") else None
            assert page.total == total, f"select: {options} has the total {page.total} instead of {total}"
            return page.position

        await check("01234")
        await check("43210", descending=True)
        await check("12", limit=2, offset=1)
        await check("34", offset=3, count=True)
        await check("", limit=0, count=True)
        await check("32", limit=2, offset=1, descending=True)
        await check("14302", sort_by="mode")
        await check("20314", sort_by="mode", descending=True)
        await check("30", sort_by="mode", limit=2, offset=2)
        position = await check("012", limit=3)
        assert position is not None, "select: a page in the order of insertion has the position of its last row"
        await backend.commit([Delete(Rollout, ("ro-2",)), Put(numbered(6)[5])])
        assert await check("34", after=position, limit=2) is not None
        await check("345", after=position)

    # --- spans and numbers ---

    async def test_a_stored_span_is_skipped(self, backend: Backend) -> None:
        one, two = await add_attempt(backend), await add_attempt(backend, "ro-1")
        spans = [span_of(one, 1), span_of(two, 1), span_of(one, 2), span_of(one, 2), span_of(one, 1)]
        result = [span and span.sequence_id for span in await backend.append_spans(spans, backend.now())]
        again = [
            span and span.sequence_id for span in await backend.append_spans([span_of(one, 3), *spans], backend.now())
        ]
        assert (result, again) == ([1, 1, 2, None, None], [3, None, None, None, None, None]), (
            f"append_spans: two calls returned the numbers {result} and {again}; a span whose rollout, attempt and "
            "span_id are stored, or occurred earlier in the call, is skipped, takes no number and is returned as None"
        )
        stored = [row.record.span_id[-1] for row in (await backend.select(Query(Span))).rows]
        assert stored == list("1123"), f"append_spans: the spans {stored} are stored instead of 1, 1, 2 and 3"

    async def test_spans_are_stored_all_or_none(self, backend: Backend) -> None:
        attempt = await add_attempt(backend)
        for missing in ({"attempt_id": "at-9"}, {"rollout_id": "ro-9"}):
            stray = span_of(attempt, 2).model_copy(update=missing)
            with fails("append_spans", missing):
                await backend.append_spans([span_of(attempt, 1), stray], backend.now())
            with fails("next_sequence_ids", missing):
                await backend.next_sequence_ids([("ro-0", "at-1"), (stray.rollout_id, stray.attempt_id)])
        rows = (await backend.select(Query(Span))).rows
        assert not rows, f"append_spans: refused a call and stored {rows}; it appends all spans or none"
        numbers = list(await backend.next_sequence_ids([("ro-0", "at-1")]))
        assert numbers == [1], f"next_sequence_ids: after refused calls it returned {numbers}; they take no number"

    async def test_spans_and_reserved_numbers_share_a_counter(self, backend: Backend) -> None:
        one, two = await add_attempt(backend), await add_attempt(backend, "ro-1")
        pair, other = ("ro-0", "at-1"), ("ro-1", "at-1")
        reserved = list(await backend.next_sequence_ids([pair, other, pair]))
        assert reserved == [1, 1, 2], f"next_sequence_ids: returned {reserved}; each attempt counts from 1, in order"
        spans = [span_of(one, 1), span_of(one, 2, 10), span_of(one, 3), span_of(two, 4, 1), span_of(two, 5)]
        numbers = [span.sequence_id for span in await backend.append_spans(spans, backend.now()) if span is not None]
        assert numbers == [3, 10, 11, 1, 2], (
            f"append_spans: numbered spans {numbers} instead of [3, 10, 11, 1, 2]; 0 becomes the attempt's next "
            "number, and a greater number than the last advances the counter"
        )
        reserved = list(await backend.next_sequence_ids([pair, other]))
        assert reserved == [12, 3], f"next_sequence_ids: returned {reserved}, not [12, 3], the next after the spans"

    async def test_concurrent_calls_share_no_number(self, backend: Backend) -> None:
        attempt = await add_attempt(backend)
        ids = iter(range(1000))

        async def take() -> list[int]:
            (number,) = await backend.next_sequence_ids([("ro-0", "at-1")])
            (span,) = await backend.append_spans([span_of(attempt, next(ids))], backend.now())
            return [number, span.sequence_id if span is not None else 0]

        pairs = [*await together(take), *await in_other_thread(lambda: together(take))]
        numbers = sorted(number for pair in pairs for number in pair)
        assert numbers == list(range(1, 33)), (
            f"next_sequence_ids: concurrent calls of it and append_spans gave out {numbers} instead of 1 to 32; "
            "reading and advancing the attempt's counter are one transaction"
        )

    async def test_spans_are_heartbeats(self, backend: Backend) -> None:
        statuses: list[AttemptStatus] = ["running", "preparing", "failed"]
        for n, status in enumerate(statuses):
            attempt = await add_attempt(backend, f"ro-{n}", status)
            now = backend.now() + 3.0
            await backend.append_spans([span_of(attempt, 1)], now)
            row = await row_of(backend, attempt)
            assert row is not None
            expected = now if status in LIVE_ATTEMPT else attempt.last_heartbeat_time
            assert row.record.last_heartbeat_time == expected, (
                f"append_spans: last_heartbeat_time of a {status} attempt is {row.record.last_heartbeat_time} instead "
                f"of {expected}; a preparing or running attempt gets `now`, others keep theirs"
            )
            holds = await backend.commit([], [Guard(Attempt, key_of(attempt), 1)])
            assert (row.revision, holds) == (1, True), (
                f"append_spans: the attempt is at revision {row.revision}; a heartbeat keeps the revision, or the "
                "guards of concurrent changes would fail with every span"
            )

    async def test_count_counts_what_is_stored(self, backend: Backend) -> None:
        attempt = await add_attempt(backend)
        await backend.append_spans([span_of(attempt, n) for n in (1, 2, 2)], backend.now())
        for _ in range(2):  # the second replaces the first
            await add(
                backend, *numbered(3)[1:], Worker(worker_id="w", last_heartbeat_time=backend.now()), Run(run_id="r")
            )
        await backend.commit([Delete(Rollout, ("ro-2",))])
        counts = await backend.count()
        assert counts == {"rollouts": 2, "attempts": 1, "spans": 2, "resources": 0, "workers": 1}, (
            f"count: returned {counts}; it counts the stored records by name: 2 rollouts, 1 attempt, 2 spans, no "
            "resources and 1 worker"
        )
