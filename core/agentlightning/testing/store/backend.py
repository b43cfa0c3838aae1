"""The contract of ``Backend`` as tests: the primitives that the author of a database writes.

The message of a failed test begins with the primitive's name and says what a correct one does.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NoReturn, TypeAlias

import pytest

from agentlightning.event import Event, StepFinished
from agentlightning.records import Attempt, Rollout, Run
from agentlightning.store.backend import Backend, Condition, Delete, Guard, Put, Query, Row, Write
from agentlightning.store.engine import BackendStore
from agentlightning.testing.store.primitives import (
    Listener,
    add,
    add_attempt,
    begin,
    calls_of,
    in_other_thread,
    numbered,
    records_of_each_kind,
    row_of,
    rows_of,
    soon,
    span_of,
    succeeds,
    together,
)
from agentlightning.testing.store.reading import ReadingTests

ReopenBackend: TypeAlias = Callable[[], Awaitable[Backend | BackendStore]]

BLOCKED_S: Final = 0.02
"""A primitive blocks if each of its calls holds the event loop as long as a sleep of this many seconds."""
SEARCH_S: Final = 1.0
"""How long readers look for half of a commit. A busy machine finds less, but nothing that is not there."""


async def longest_block(call: Callable[[], Awaitable[object]]) -> float:
    """Returns the longest time, in seconds, for which the event loop could do nothing else during a call."""
    done = False
    longest, last = 0.0, time.perf_counter()

    async def tick() -> None:
        nonlocal longest, last
        while not done:
            longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(tick())
    try:
        await call()
    finally:
        done = True
        longest = max(longest, time.perf_counter() - last)
        await ticking
    return longest


@pytest.mark.asyncio
class BackendConformance(ReadingTests):
    """The tests that every ``Backend`` must pass.

    A subclass provides a fixture ``store``, an empty ``BackendStore``, as for ``StoreConformance``; or a fixture
    ``backend``, an empty ``Backend``. If it is durable, a fixture ``reopen`` as for ``DurableStoreConformance``.
    """

    @pytest.fixture
    def backend(self, store: BackendStore) -> Backend:
        return store.backend

    @pytest.fixture
    def reopen(self) -> ReopenBackend:
        async def reopen() -> Backend:
            raise AssertionError(
                "durable: it is True, so acknowledged writes survive the process; show it with a fixture `reopen`, a "
                "coroutine function that closes the database, opens it again and returns it"
            )

        return reopen

    # --- now, durable, close ---

    async def test_now_is_unix_time(self, backend: Backend) -> None:
        now = backend.now()
        assert abs(now - time.time()) < 86400, (
            f"now: returned {now!r} at {time.time()!r}; it returns Unix time in seconds. Times are stored in records, "
            "and a monotonic clock means nothing to other processes or after a restart"
        )

    async def test_a_durable_backend_keeps_what_it_acknowledged(self, backend: Backend, reopen: ReopenBackend) -> None:
        durable = backend.durable
        assert isinstance(durable, bool), f"durable: it is {durable!r}; it says whether acknowledged writes survive"
        if not durable:
            return
        rollouts = numbered(4)
        await add(backend, *rollouts, *records_of_each_kind(backend.now())[:-1])
        await add(backend, rollouts[2].model_copy(update={"mode": "val"}))
        await backend.commit([Delete(Rollout, ("ro-1",))])
        attempt = await add_attempt(backend, "ro-live")
        await backend.append_spans([span_of(attempt, 1), span_of(attempt, 2, 7)], backend.now())
        await backend.next_sequence_ids([("ro-live", "at-1")])
        before, counts = await rows_of(backend), await backend.count()
        opened = await reopen()
        backend = opened.backend if isinstance(opened, BackendStore) else opened
        found = await rows_of(backend)
        for kind, rows in before.items():
            assert found[kind] == rows, (
                f"durable: it is True, but after reopening the {kind} rows are {found[kind]} instead of {rows}; every "
                "record, its revision and its heartbeat are durable when the call returns"
            )
        assert await backend.count() == counts, "count: the numbers are the same after reopening"
        assert list(await backend.next_sequence_ids([("ro-live", "at-1")])) == [9], (
            "next_sequence_ids: a number that was given out before reopening is not given out again"
        )
        again = await backend.append_spans([span_of(attempt, 1)], backend.now())
        assert list(again) == [None], f"append_spans: returned {again} for a span that was stored before reopening"
        claimed = [rollout.rollout_id for rollout in await backend.claim("default", 9, begin)]
        assert claimed == ["ro-0", "ro-2", "ro-3"], f"claim: the queue keeps its order when reopened; got {claimed}"

    async def test_closing_twice_is_harmless(self, backend: Backend) -> None:
        await soon(backend.close(), "close: it returns when the resources are released")
        with succeeds("close: calling it twice is harmless"):
            await soon(backend.close())

    # --- any thread, any event loop ---

    async def test_every_primitive_works_in_several_event_loops(self, backend: Backend) -> None:
        for name, call in (await calls_of(backend, 48)).items():
            with succeeds(
                f"{name}: it may be called in any thread and event loop, also at once, but locks, futures and "
                "connections of asyncio belong to one loop; use threading.Lock, or one thread that does the work"
            ):
                await together(call)
                await in_other_thread(functools.partial(together, call))
                await asyncio.gather(together(call), in_other_thread(functools.partial(together, call)))

    async def test_a_cancelled_call_leaves_the_backend_usable(self, backend: Backend) -> None:
        for name, call in (await calls_of(backend, 40)).items():
            for pause in range(4):  # iterations of the event loop between calling and cancelling
                calling = asyncio.ensure_future(together(call))
                for _ in range(pause):
                    await asyncio.sleep(0)
                calling.cancel()
                await asyncio.wait([calling])
            await soon(call(), f"{name}: a call that is cancelled holds no lock and no connection afterwards")

    async def test_no_primitive_blocks_the_event_loop(self, backend: Backend) -> None:
        async def block() -> None:
            time.sleep(BLOCKED_S)  # noqa: ASYNC251 # the mistake, to compare with

        limit = min([await longest_block(block) for _ in range(3)])
        for name, call in (await calls_of(backend, 30)).items():
            blocked = limit
            for _ in range(30):  # until one does not block: another process may stop this one during a call
                if blocked >= limit:
                    blocked = min(blocked, await longest_block(call))
            assert blocked < limit, (
                f"{name}: each of 30 calls blocked the event loop for {1000 * limit:.0f} ms or more; a primitive "
                "waits for a disk or a server in another thread (asyncio.to_thread), or awaits"
            )

    # --- commit ---

    async def test_a_commit_is_refused_if_a_guard_fails(self, backend: Backend) -> None:
        old, new = numbered(2)
        key, absent = ("ro-0",), ("ro-1",)

        async def check(revision: int, *, holds: bool, key: tuple[str] = key) -> None:
            done = await backend.commit([], [Guard(Rollout, key, revision)])
            assert done is holds, (
                f"commit: a guard for revision {revision} of {key[0]} returned {done!r} instead of {holds}; a record "
                "is at revision 1 when inserted, each Put increases it by 1, and 0 means that there is no such record"
            )

        await check(0, holds=True)
        await add(backend, old)
        for revision in (0, 2):
            await check(revision, holds=False)
        await check(1, holds=True)
        await check(1, holds=False, key=absent)
        await add(backend, old.model_copy(update={"input": "changed"}))
        await check(1, holds=False)
        await check(2, holds=True)
        guards = [Guard(Rollout, key, 2), Guard(Rollout, key, 0)]
        done = await backend.commit([Put(new), Delete(Rollout, key)], guards)
        stored = [row.record.rollout_id for row in (await backend.select(Query(Rollout))).rows]
        assert (done, stored) == (False, ["ro-0"]), (
            f"commit: one of two guards failed, it returned {done!r} and {stored} are stored; it returns False and "
            "writes nothing"
        )
        await backend.commit([Delete(Rollout, key)])
        await check(0, holds=True)

    async def test_one_of_several_commits_with_the_same_guard_succeeds(self, backend: Backend) -> None:
        await add(backend, *numbered(1))
        for revision in range(1, 6):

            async def commit(revision: int = revision) -> bool:
                return await backend.commit([Put(*numbered(1))], [Guard(Rollout, ("ro-0",), revision)])

            done = await asyncio.gather(together(commit), in_other_thread(functools.partial(together, commit)))
            assert sum(done[0] + done[1]) == 1, (
                f"commit: {sum(done[0] + done[1])} of 16 concurrent commits with the same guard succeeded; guards are "
                "compared and records written in one transaction, so exactly one does"
            )

    async def test_no_reader_sees_half_of_a_commit(self, backend: Backend) -> None:
        versions = [[Put(rollout) for rollout in numbered(8, input=version)] for version in "ab"]
        await backend.commit(versions[0])
        torn: list[list[Any]] = []
        deadline = time.monotonic() + SEARCH_S

        async def read() -> None:
            while not torn and time.monotonic() < deadline:
                values = [row.record.input for row in (await backend.select(Query(Rollout))).rows]
                if len(set(values)) > 1:
                    torn.append(values)
                await asyncio.sleep(0)

        async def write() -> None:
            for version in itertools.cycle(versions):
                await backend.commit(version)
                await asyncio.sleep(0)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # threads take turns in the middle of a commit
        writing = asyncio.create_task(write())
        try:
            await soon(asyncio.gather(read(), in_other_thread(read)))
        finally:
            sys.setswitchinterval(interval)
            writing.cancel()
            await asyncio.wait([writing])
        assert not torn, (
            f"commit: a reader saw {torn[0]}, in records that each commit sets to one value; all writes of a commit "
            "are one transaction, and select reads what is committed"
        )

    async def test_deleting_a_rollout_deletes_its_attempts_and_spans(self, backend: Backend) -> None:
        for rollout_id in ("ro-live", "ro-kept"):
            attempt = await add_attempt(backend, rollout_id)
            await backend.append_spans([span_of(attempt, 1)], backend.now())
        await add(backend, *numbered(1))
        await backend.commit([Delete(Rollout, ("ro-live",)), Delete(Rollout, ("ro-0",)), Delete(Run, ("unknown",))])
        left = {
            kind: [row.record.rollout_id for row in rows] for kind, rows in (await rows_of(backend)).items() if rows
        }
        assert left == {"Rollout": ["ro-kept"], "Attempt": ["ro-kept"], "Span": ["ro-kept"]}, (
            f"commit: after the deletion of a rollout {left} are stored; Delete removes a rollout with its attempts "
            "and spans, and no others"
        )
        claimed = await backend.claim("default", 9, begin)
        assert not claimed, f"claim: returned {claimed}, which was deleted; a deleted rollout leaves the queue"
        await add_attempt(backend, "ro-live")
        numbers = list(await backend.next_sequence_ids([("ro-live", "at-1")]))
        assert numbers == [1], f"next_sequence_ids: a new attempt with the ids of a deleted one got {numbers}, not [1]"

    # --- claim ---

    async def test_claims_are_first_in_first_out(self, backend: Backend) -> None:
        rollouts = numbered(6)
        theirs = rollouts[0].model_copy(update={"rollout_id": "theirs", "run_id": "other"})
        await add(backend, theirs, *rollouts[:5])
        await add(backend, rollouts[1].model_copy(update={"status": "running"}), rollouts[5])
        await add(backend, rollouts[0].model_copy(update={"mode": "val"}))  # stays where it is
        await add(backend, rollouts[1].model_copy(update={"status": "requeuing"}))  # enters again
        claimed = []
        for limit in (2, 1, 9, 9):
            claimed.append([rollout.rollout_id for rollout in await backend.claim("default", limit, begin)])
        assert claimed == [["ro-0", "ro-2"], ["ro-3"], ["ro-4", "ro-5", "ro-1"], []], (
            f"claim: limits of 2, 1, 9 and 9 returned {claimed}; it returns the first `limit` rollouts of the run's "
            "queue, which a Put enters when it changes the status to queuing or requeuing from any other"
        )

    async def test_claims_take_the_highest_priority_first(self, backend: Backend) -> None:
        ranks = [0, 5, -(2**63), 0, 2**63 - 1, 5]
        queued = [
            rollout.model_copy(update={"priority": rank}) for rollout, rank in zip(numbered(6), ranks, strict=True)
        ]
        await add(backend, *queued[:3])
        await add(backend, *queued[3:])
        await add(backend, queued[1].model_copy(update={"status": "running"}))
        await add(backend, queued[1].model_copy(update={"status": "requeuing"}))  # enters again, after ro-5
        claimed = [[rollout.rollout_id for rollout in await backend.claim("default", 2, begin)] for _ in range(3)]
        assert claimed == [["ro-4", "ro-5"], ["ro-1", "ro-0"], ["ro-3", "ro-2"]], (
            f"claim: priorities {ranks} were claimed in the order {claimed}; the highest priority comes first, and "
            "rollouts of the same priority in the order in which they entered the queue"
        )

    async def test_a_claim_writes_what_is_decided(self, backend: Backend) -> None:
        listener = Listener()
        stop = backend.watch(listener)
        queued = numbered(2, status="requeuing")
        await add(backend, *queued)
        await add(backend, queued[1].model_copy(update={"mode": "val"}))
        await add(
            backend, Attempt(rollout_id="ro-0", attempt_id="at-1", sequence_id=1, start_time=1.0, status="failed")
        )
        seen: list[tuple[str, int, int]] = []

        def decide(locked: Sequence[tuple[Row[Rollout], int]]) -> tuple[list[Write], list[Event]]:
            seen[:] = [(row.record.rollout_id, row.revision, n_attempts) for row, n_attempts in locked]
            return begin(locked)

        claimed = await backend.claim("default", 9, decide)
        assert seen == [("ro-0", 1, 1), ("ro-1", 2, 0)], (
            f"claim: decide got (id, revision, number of attempts) {seen}, not [('ro-0', 1, 1), ('ro-1', 2, 0)]"
        )
        assert [rollout.status for rollout in claimed] == ["requeuing"] * 2, (
            f"claim: returned {claimed}; it returns the rollouts as they were before"
        )
        stored = await rows_of(backend)
        statuses = [row.record.status for row in stored["Rollout"] + stored["Attempt"]]
        assert statuses == ["preparing", "preparing", "failed", "preparing", "preparing"], (
            f"claim: rollouts and attempts are {statuses}; the writes of decide are stored when it returns"
        )
        await listener.expect([1, 2], "claim: the events of decide are handed to every listener of watch")
        stop()
        seen[:] = [("decide was not called", 0, 0)]
        assert await backend.claim("default", 9, decide) == []
        assert seen[0][0] == "decide was not called", "claim: decide is not called if no rollout is queued"

    async def test_a_claim_that_fails_takes_nothing(self, backend: Backend) -> None:
        await add(backend, *numbered(2))

        def fail(locked: Sequence[tuple[Row[Rollout], int]]) -> NoReturn:
            raise ZeroDivisionError(f"a mistake in decide, which got {locked}")

        with pytest.raises(ZeroDivisionError):
            await soon(backend.claim("default", 1, fail))
        claimed = await soon(
            backend.claim("default", 9, begin), "claim: an error of decide releases the locked rollouts"
        )
        assert len(claimed) == 2, (
            f"claim: after an error of decide {len(claimed)} of 2 rollouts are in the queue, not all"
        )

    async def test_no_rollout_is_claimed_twice(self, backend: Backend) -> None:
        await add(backend, *numbered(40))

        async def claim_all() -> list[str]:
            mine: list[str] = []
            while claimed := await backend.claim("default", 2, begin):
                mine += [rollout.rollout_id for rollout in claimed]
            return mine

        claiming = asyncio.gather(together(claim_all), in_other_thread(functools.partial(together, claim_all)))
        while not claiming.done():
            rollouts = (await backend.select(Query(Rollout, (Condition("status", "eq", "preparing"),)))).rows
            attempts = {row.record.rollout_id for row in (await backend.select(Query(Attempt))).rows}
            half = [row.record.rollout_id for row in rollouts if row.record.rollout_id not in attempts]
            assert not half, f"claim: {half} were read without their attempts; the writes of decide are one transaction"
            await asyncio.sleep(0)
        here, there = await claiming
        claimed = sorted(rollout_id for mine in here + there for rollout_id in mine)
        assert claimed == sorted(f"ro-{n}" for n in range(40)), (
            f"claim: 16 concurrent callers got {claimed} of 40 rollouts; no rollout is handed to two callers or lost: "
            "locking the rollouts and writing the result of decide are one transaction"
        )

    # --- watch ---

    async def test_every_listener_gets_the_events_of_each_commit_in_order(self, backend: Backend) -> None:
        rule = (
            "watch: it calls each listener with all events of each commit, in order, also of commits in other threads"
        )
        listeners = [Listener(), Listener()]
        stops = [backend.watch(listener) for listener in listeners]
        await add(backend, Run(run_id="r"), step=1)
        events = [StepFinished(step=step, values={}, time=backend.now()) for step in (2, 3, 4)]
        await backend.commit([Put(Run(run_id="r"))], (), events)
        await in_other_thread(lambda: add(backend, Run(run_id="r"), step=5))
        for listener in listeners:
            await listener.expect([1, 2, 3, 4, 5], rule)
        with succeeds("watch: calling the function that it returns twice is harmless"):
            stops[0]()
            stops[0]()
        await add(backend, Run(run_id="r"), step=6)
        await listeners[1].expect([1, 2, 3, 4, 5, 6], rule)
        await listeners[0].expect(
            [1, 2, 3, 4, 5], "watch: the function that it returns stops the calls of one listener"
        )
        stops[1]()

    async def test_a_refused_commit_has_no_events(self, backend: Backend) -> None:
        listener = Listener()
        stop = backend.watch(listener)
        event = StepFinished(step=1, values={}, time=backend.now())
        assert not await backend.commit([Put(Run(run_id="r"))], [Guard(Run, ("r",), 3)], [event])
        await add(backend, Run(run_id="r"), step=2)
        await listener.expect([2], "commit: a commit whose guard fails hands no event to a listener of watch")
        stop()

    async def test_an_event_comes_after_its_change(self, backend: Backend) -> None:
        loop = asyncio.get_running_loop()
        for number in range(5):
            came = asyncio.Event()

            def notify(_: Sequence[Event], set_: Callable[[], None] = came.set) -> None:
                loop.call_soon_threadsafe(set_)

            stop = backend.watch(notify)
            committing = asyncio.create_task(add(backend, Run(run_id=f"r-{number}"), step=number))
            await soon(came.wait(), "watch: it calls each listener with the events of every commit")
            assert await row_of(backend, Run(run_id=f"r-{number}")) is not None, (
                "commit: a listener was called with an event whose change select does not find; events are handed out "
                "after the change is committed, or a waiter that looks once misses it"
            )
            await committing
            stop()

    async def test_events_come_in_the_order_of_concurrent_commits(self, backend: Backend) -> None:
        run = Run(run_id="counter", metadata={"n": 0})
        await add(backend, run)
        listener = Listener()
        stop = backend.watch(listener)

        async def increase() -> None:
            for _ in range(4):
                done = False
                while not done:
                    row = await row_of(backend, run)
                    assert row is not None
                    n = row.record.metadata["n"] + 1
                    event = StepFinished(step=n, values={}, time=backend.now())
                    put = Put(run.model_copy(update={"metadata": {"n": n}}))
                    done = await backend.commit([put], [Guard(Run, ("counter",), row.revision)], [event])

        await soon(asyncio.gather(together(increase, 4), in_other_thread(lambda: together(increase, 4))))
        await listener.expect(range(1, 33), "watch: events come in the order in which their commits took effect")
        stop()
