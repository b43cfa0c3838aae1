"""Both durable stores: killed processes, several processes, group commit and queries."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from agentlightning.errors import ConfigError, NotFoundError, StoreError
from agentlightning.event import Event, RolloutEnqueued
from agentlightning.store.backend import Condition, Delete, Guard, Put, Query
from agentlightning.store.engine import BackendStore
from agentlightning.store.factory import create_store
from agentlightning.types import Attempt, AttemptedRollout, EnqueueRolloutRequest, Record, Rollout, Span, Worker
from agentlightning_plugins.stores.memory.store import MemoryBackend
from agentlightning_plugins.stores.postgresql import transaction as postgresql_transaction
from agentlightning_plugins.stores.postgresql.connection import Server
from agentlightning_plugins.stores.postgresql.store import PostgresBackend
from agentlightning_plugins.stores.sqlite import transaction as sqlite_transaction
from agentlightning_plugins.stores.sqlite.store import SqliteBackend
from tests.plugins.stores.actions import make_span
from tests.source import REPO, run_python
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.environment("main")  # the conformance kit shows that old drivers work

DurableBackend: TypeAlias = SqliteBackend | PostgresBackend


@pytest.fixture
async def backend(url: str) -> AsyncIterator[DurableBackend]:
    backend = open_backend(url)
    yield backend
    await backend.close()


def open_backend(url: str) -> DurableBackend:
    if url.startswith("sqlite"):
        return SqliteBackend(Path(url.removeprefix("sqlite:///")))
    return PostgresBackend(Server(url, connections=5, statement_timeout_s=50.0, reconnect_s=10.0))


def open_store(url: str) -> BackendStore:
    store = create_store(url)
    assert isinstance(store, BackendStore)
    return store


def transactions_of(backend: DurableBackend) -> int:
    return backend.writer.transactions if isinstance(backend, SqliteBackend) else backend.transactions


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=pipe, stdout=pipe, cwd=REPO, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


async def test_an_attempt_that_another_process_ends_is_not_kept_in_memory(url: str) -> None:
    here, there = open_store(url), open_store(url)
    claimed = await here.start_rollout("claimed here, its spans are stored there")
    attempt = claimed.rollout_id, claimed.attempt.attempt_id
    for _ in range(2):  # the first one sets the attempt running
        await there.add_many_spans([make_span(claimed)])
    assert [store._database.is_running(attempt) for store in (here, there)] == [False, True]
    await here.update_attempt(*attempt, status="succeeded")
    await until(lambda: not there._database.is_cached(attempt))
    assert not here._database.is_cached(attempt)
    for store in (here, there):
        await store.close()


# --- attempts whose calls repeat their history ---


def make_history(of: AttemptedRollout, conversation: int, turns: int) -> list[Span]:
    """Makes a span for each turn of a conversation; each repeats the messages and token ids of the turns before."""
    spans: list[Span] = []
    contents, ids = ["system prompt " * 40], list[int]()
    for turn in range(turns):
        contents.append(f'{conversation}: "{turn}" \\ [1]"] é \0 ' + f"result {turn * 7919} \n" * 40)
        ids += [conversation * 1000 + turn * 31 + number for number in range(300)]
        indexed = {f"llm.input.{number}.content": content for number, content in enumerate(contents)}
        texts = {"messages": json.dumps(contents), "plain": "".join(contents)}
        spans.append(make_span(of, ids=ids, nested={"ids": ids[-200:]}, count=turn, **texts, **indexed))
    return spans


async def number_of_parts(url: str) -> int:
    """Returns how many parts of spans a database has."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            return int(connection.execute("SELECT count(*) FROM part").fetchone()[0])
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval("SELECT count(*) FROM agl.part"))
    finally:
        await connection.close()


async def test_spans_that_repeat_a_history_come_back_whole_and_are_stored_once(url: str) -> None:
    store, other = open_store(url), open_store(url)
    claimed, second = await store.start_rollout("long"), await store.start_rollout("short")
    one, two = make_history(claimed, 1, 12), make_history(claimed, 2, 12)
    elsewhere = make_history(second, 1, 2)
    mixed = [span for pair in zip(one, two, strict=True) for span in pair]
    for number, span in enumerate(mixed[:16]):  # two conversations, stored by two processes
        await (store if number % 3 else other).add_span(span)
    await store.close()
    store = open_store(url)  # it knows no part
    await store.add_many_spans([*reversed(mixed[16:]), *elsewhere])
    expected = {span.span_id: span.attributes for span in (*mixed, *elsewhere)}
    polled = (await store.poll_new_spans(limit=1000)).items
    for found in (polled, await store.query_spans(None), await other.query_spans(None, limit=1000, sort_by="name")):
        assert {span.span_id: span.attributes for span in found} == expected
    (single,) = await other.query_spans(claimed.rollout_id, span_id=one[9].span_id)
    assert single.attributes == one[9].attributes
    page = await other.query_spans(claimed.rollout_id, limit=2, offset=22)
    assert [span.attributes for span in page] == [expected[span.span_id] for span in page]
    assert 0 < await number_of_parts(url) < 24 * 12, "each span would have its own"
    for rollout in (claimed, second):
        await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
    await store.delete_rollouts([claimed.rollout_id])
    assert [span.attributes for span in await store.query_spans(None)] == [span.attributes for span in elsewhere]
    await store.delete_rollouts([second.rollout_id])
    assert await number_of_parts(url) == 0
    for each in (store, other):
        await each.close()


async def test_parts_of_a_transaction_that_failed_are_stored_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(url)
    claimed = await store.start_rollout("long")
    first, *rest = make_history(claimed, 1, 4)
    with monkeypatch.context() as patch:
        for module in (sqlite_transaction, postgresql_transaction):
            patch.setattr(module, "join", fail)
        with pytest.raises(ZeroDivisionError):
            await store.add_span(first)
    await store.add_many_spans([first, *rest])
    found = await store.query_spans(claimed.rollout_id)
    assert [span.attributes for span in found] == [span.attributes for span in (first, *rest)]
    await store.close()


def fail(*arguments: object) -> str:
    raise ZeroDivisionError(f"joined {len(arguments)}")


# --- killed processes ---


WRITER = """
import asyncio, itertools, sys
from tests.plugins.stores.actions import make_span
import agentlightning as agl

async def work(store, number):
    for count in itertools.count():
        queued = await store.enqueue_rollout([number, count])
        claimed = await store.start_rollout("started")
        span = (await store.add_many_spans([make_span(claimed)]))[0]
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        print(queued.rollout_id, claimed.rollout_id, span.span_id, flush=True)

async def main():
    store = agl.create_store(sys.argv[1])
    print("ready", flush=True)
    await asyncio.gather(*(work(store, number) for number in range(8)))

asyncio.run(main())
"""


async def test_no_acknowledged_write_is_lost_when_the_writing_process_is_killed(url: str) -> None:
    for _ in range(2):  # into an empty database, then into the one that the first process left behind
        writer = start(WRITER, url)
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(40)]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.read().splitlines(keepends=True)
        writer.wait()
        writer.stdout.close()
        if writer.stdin is not None:
            writer.stdin.close()
        store = open_store(url)
        acknowledged = [line.split() for line in lines if line.endswith("\n")]
        assert len(acknowledged) >= 40
        for queued_id, ended_id, span_id in acknowledged:
            queued, ended = await store.get_rollout_by_id(queued_id), await store.get_rollout_by_id(ended_id)
            assert queued is not None
            assert queued.status == "queuing"
            assert ended is not None
            assert ended.status == "succeeded"
            assert [span.span_id for span in await store.query_spans(ended_id)] == [span_id]
        counted = await store.statistics()
        assert counted["rollouts"] == len(await store.query_rollouts())
        assert counted["spans"] == len(await store.query_spans(None))
        await store.close()


async def test_calls_of_a_closed_store_raise_an_error(url: str) -> None:
    store = open_store(url)
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.enqueue_rollout("a")
    with pytest.raises(StoreError, match="closed"):
        await store.query_rollouts()


# --- several processes ---

CLAIMER = """
import asyncio, sys
import agentlightning as agl

async def main():
    store = agl.create_store(sys.argv[1])
    first = await store.dequeue_rollout()  # each process claims one, however slow it is afterwards
    print("ready", flush=True)
    sys.stdin.readline()
    print(first.rollout_id, flush=True)
    async def claim_all():
        while (claimed := await store.dequeue_rollout(timeout=0.2)) is not None:
            print(claimed.rollout_id, flush=True)
            await asyncio.sleep(0.005)  # leaves most rollouts to others
    await asyncio.gather(*(claim_all() for _ in range(4)))
    await store.close()

asyncio.run(main())
"""


async def test_two_processes_never_claim_the_same_rollout(url: str) -> None:
    store = open_store(url)
    queued = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(200)])
    processes = [start(CLAIMER, url) for _ in range(2)]
    outputs = await asyncio.gather(*(asyncio.to_thread(process.communicate, "go\n") for process in processes))
    claims = [output.split() for output, _ in outputs]
    assert Counter(claims[0] + claims[1]) == Counter(rollout.rollout_id for rollout in queued)
    assert min(map(len, claims)) > 0
    await store.close()


ANSWERER = """
import asyncio, sys
import agentlightning as agl

async def main():
    store = agl.create_store(sys.argv[1])
    print("ready", flush=True)
    for _ in range(int(sys.argv[2])):
        claimed = await store.dequeue_rollout(timeout=300)
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
    await store.close()

asyncio.run(main())
"""


async def test_an_enqueue_and_a_finish_wake_waiters_in_another_process(url: str) -> None:
    store = open_store(url)
    events: list[Event] = []
    store._database.backend.watch(events.extend)
    other = start(ANSWERER, url, "10")
    for number in range(10):
        await asyncio.sleep(0.03)
        queued = await store.enqueue_rollout(number)
        (done,) = await store.wait_for_rollouts([queued.rollout_id], timeout=LIMIT_S)
        assert done.status == "succeeded"
    other.communicate()
    kinds = [event.kind for event in events]
    assert kinds == ["rollout_enqueued", "rollout_started", "attempt_finished", "rollout_finished"] * 10
    await store.close()


async def test_the_events_of_two_stores_reach_both_stores_in_commit_order(url: str) -> None:
    backends = [open_backend(url) for _ in range(2)]
    seen: list[list[str]] = [[], []]
    for backend, mine in zip(backends, seen, strict=True):

        def listen(events: Sequence[Event], mine: list[str] = mine) -> None:
            mine.extend(getattr(event, "rollout_id", "") for event in events)

        backend.watch(listen)

    async def count_up(backend: DurableBackend) -> None:
        for _ in range(40):
            while True:  # the revision of one record gives the order of the commits
                page = await backend.select(Query(Rollout))
                revision = page.rows[0].revision if page.rows else 0
                put = Put(Rollout(rollout_id="ro-1", input=revision, start_time=0.0))
                guard = Guard(Rollout, ("ro-1",), revision)
                if await backend.commit([put], [guard], [RolloutEnqueued(rollout_id=str(revision))]):
                    break

    await asyncio.gather(*(count_up(backend) for backend in backends))
    await until(lambda: min(map(len, seen)) == 80)
    assert seen[0] == seen[1] == [str(revision) for revision in range(80)]
    for backend in backends:
        await backend.close()


FORKING_PROGRAM = """
import asyncio, os, sys
import agentlightning as agl

store = agl.create_store(sys.argv[1])
if os.fork() == 0:
    try:
        asyncio.run(store.enqueue_rollout("a"))
    except agl.StoreError as error:
        print(error, flush=True)
    finally:
        os._exit(0)
os.wait()
asyncio.run(store.close())
"""


def test_a_store_that_was_opened_before_a_fork_is_refused_in_the_child(url: str) -> None:
    """The parent is a separate process, because a process with threads should not fork."""
    assert "was opened before this process was forked" in run_python("-c", FORKING_PROGRAM, url)


# --- group commit ---


async def test_concurrent_writes_share_transactions(backend: DurableBackend) -> None:
    before = transactions_of(backend)
    puts = [Put(Rollout(rollout_id=f"ro-{n}", input=n, start_time=0.0)) for n in range(400)]
    assert all(await asyncio.gather(*(backend.commit([put]) for put in puts)))
    assert transactions_of(backend) - before <= 40
    assert (await backend.count())["rollouts"] == 400


async def test_an_operation_that_fails_does_not_fail_the_others_in_its_transaction(backend: DurableBackend) -> None:
    one = Rollout(rollout_id="ro-1", input=1, start_time=0.0)
    attempt = Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0)
    stray = Attempt(rollout_id="ro-unknown", attempt_id="at-1", sequence_id=1, start_time=0.0)
    span = Span.from_attributes(attributes={}, rollout_id="ro-1", attempt_id="at-1")
    await backend.commit([Put(Rollout(rollout_id="ro-0", input=0, start_time=0.0))])
    seen: list[Event] = []
    backend.watch(seen.extend)
    outcomes = await asyncio.gather(
        backend.commit([Put(one), Put(attempt)], (), [RolloutEnqueued(rollout_id="ro-1")]),
        backend.commit([Put(Worker(worker_id="w-1")), Put(stray)], (), [RolloutEnqueued(rollout_id="ro-2")]),
        backend.commit([Put(Worker(worker_id="w-2"))], [Guard(Rollout, ("ro-1",), 7)]),
        backend.append_spans([span, span.model_copy(update={"attempt_id": "at-unknown"})], 1.0),
        backend.append_spans([span], 1.0),
        backend.claim("default", 1, lambda locked: 1 / 0),  # a bug of the caller
        backend.commit([Put(Worker(worker_id="w-3"))]),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [
        bool,
        NotFoundError,
        bool,
        NotFoundError,
        list,
        ZeroDivisionError,
        bool,
    ]
    assert (outcomes[0], outcomes[2], outcomes[6]) == (True, False, True)
    assert [row.record.worker_id for row in (await backend.select(Query(Worker))).rows] == ["w-3"]
    assert [getattr(event, "rollout_id", "") for event in seen] == ["ro-1"]
    counts = await backend.count()
    assert (counts["rollouts"], counts["attempts"], counts["spans"], counts["workers"]) == (2, 1, 1, 1)


# --- records and queries ---


@pytest.mark.parametrize(
    "task",
    [float("nan"), {1, 2}, {"deep": [Ellipsis]}, {1: "a"}, b"bytes", 2**70, Rollout, "\ud800", Worker(worker_id="w")],
    ids=str,
)
async def test_an_input_that_is_not_json_is_refused(url: str, task: object) -> None:
    store = open_store(url)
    with pytest.raises(ConfigError, match="JSON"):
        await store.enqueue_rollout(task)
    assert (await store.statistics())["rollouts"] == 0
    assert await store.dequeue_rollout() is None
    await store.close()


async def test_deleting_a_rollout_deletes_its_attempts_and_spans(backend: DurableBackend) -> None:
    writes: list[Put | Delete] = []
    for n in range(4):
        writes.append(Put(Rollout(rollout_id=f"ro-{n}", input=n, start_time=0.0, run_id="ab"[n % 2])))
        writes.append(Put(Attempt(rollout_id=f"ro-{n}", attempt_id="at-1", sequence_id=1, start_time=0.0)))
    await backend.commit(writes)
    spans = [Span.from_attributes(attributes={}, rollout_id=f"ro-{n % 4}", attempt_id="at-1") for n in range(12)]
    await backend.append_spans(spans, 1.0)
    await backend.commit([Delete(Rollout, ("ro-1",)), Delete(Attempt, ("ro-2", "at-1")), Delete(Rollout, ("ro-9",))])
    assert await backend.count() == {"rollouts": 3, "attempts": 2, "spans": 6, "resources": 0, "workers": 0}
    kinds: list[type[Record]] = [Rollout, Attempt, Span]
    assert [len((await backend.select(Query(kind))).rows) for kind in kinds] == [3, 2, 6]
    page = await backend.select(Query(Span, (Condition("run_id", "eq", "a"),), limit=2, count=True))
    assert page.total == 3
    claimed = await backend.claim("a", 9, lambda locked: ([], []))
    assert [rollout.rollout_id for rollout in claimed] == ["ro-0", "ro-2"]


METADATA: list[dict[str, object] | None] = [
    None,
    {"group": None},
    {"group": 1, "tag": "a"},
    {"group": 1.0, "tag": True},
    {"group": True, "tag": 1},
    {"group": "1", "tag": ["a"]},
    {"group": [2], "tag": '["a"]'},
    {"group": {"x": 1}, "tag": {"y": 2}},
    {"group": 0.1 + 0.2, "tag": 0.1 + 0.2},
    {"group": "Grüße", "tag": "GRÜSSE", "a.b": 'quo"te', 'k"ey': "v", "it's": 3},
]
QUESTIONS: list[tuple[Condition, ...]] = [
    (),
    *((Condition(f"metadata.{key}", "eq", value),) for key in ("group", "tag") for value in
      (None, 1, 1.0, True, "1", "a", [2], ["a"], '["a"]', "[2]", {"x": 1}, 0.1 + 0.2, 0.3, "Grüße", 2**70)),
    *((Condition(f"metadata.{key}", "in", value),) for key in ("group", "tag") for value in
      ((), (1, "a"), (None, 1), ("1", [2]), (0.1 + 0.2,), ('["a"]', "GRÜSSE"))),
    *((Condition(f"metadata.{key}", op, value),) for key in ("group", "tag") for op in ("ge", "le") for value in
      (1, 0.5, "a", "Z", True)),
    *((Condition(f"metadata.{key}", "contains", value),) for key in ("group", "tag") for value in ("", "r", "GR", "a")),
    (Condition("metadata.a.b", "eq", 'quo"te'),),
    (Condition('metadata.k"ey', "eq", "v"),),
    (Condition("metadata.it's", "eq", 3),),
    (Condition("rollout_id", "eq", 5),),
    (Condition("rollout_id", "in", ("ro-3", "ro-1", "ro-3", "ro-99")),),
    (Condition("rollout_id", "contains", "-1"),),
    (Condition("run_id", "eq", "a"), Condition("status", "in", ("failed", "queuing"))),
    (Condition("run_id", "in", ("a", "b")), Condition("status", "eq", "failed")),
    (Condition("run_id", "eq", "a"), Condition("metadata.group", "eq", 1)),
    (Condition("run_id", "eq", "a"), Condition("rollout_id", "contains", "-1")),
    (Condition("run_id", "eq", "b"), Condition("rollout_id", "contains", "ro-"), Condition("status", "eq", "failed")),
    (Condition("run_id", "eq", "a"), Condition("start_time", "ge", 1795267563.3967767)),
    (Condition("run_id", "eq", "b"), Condition("start_time", "ge", 0.0), Condition("start_time", "le", 1795267563.5)),
    (Condition("run_id", "eq", "a"), Condition("start_time", "le", 9e9), Condition("status", "in", ("failed", "x"))),
    (Condition("status", "in", ()),),
    (Condition("mode", "eq", None),),
    (Condition("mode", "ge", "train"),),
    (Condition("mode", "le", 3),),
    (Condition("end_time", "ge", 1795267563.3967767), Condition("start_time", "le", 1795267563.3967767)),
    (Condition("end_time", "eq", 1795267563.3967767),),
    (Condition("input", "eq", {"n": [1]}),),
    (Condition("input", "contains", "text"),),
]  # fmt: skip


async def test_queries_of_rollouts_give_the_same_results_as_the_memory_backend(backend: DurableBackend) -> None:
    memory = MemoryBackend()
    rollouts = [
        Rollout(
            rollout_id=f"ro-{number}",
            input=[{"n": [1]}, "a text", None, 3, 2.5, True][number % 6],
            start_time=1795267563.3967767 + number % 3 - 1,
            end_time=1795267563.3967767 if number % 4 else None,
            run_id="ab"[number % 2],
            mode=(None, "train", "val")[number % 3],
            status="failed" if number % 5 else "queuing",
            metadata=METADATA[number % len(METADATA)],
        )
        for number in range(30)
    ]
    for store in (memory, backend):
        await store.commit([Put(rollout) for rollout in rollouts])
        await store.commit([Put(rollouts[4].model_copy(update={"status": "queuing"}))])
        await store.commit([Delete(Rollout, ("ro-7",))])
    orders: list[tuple[str | None, bool]] = [(None, False), (None, True)]
    orders += [(field, down) for field in Rollout.model_fields for down in (False, True)]
    cuts = [(-1, 0), (3, 2), (0, 0), (-1, 4)]
    for number, where in enumerate(QUESTIONS):
        queries: list[Query[Rollout]] = []
        sorts = orders if not where else [*orders[:2], orders[number % len(orders)], orders[-1 - number % len(orders)]]
        for sort_by, descending in sorts:
            for limit, offset in cuts if not where or sort_by is None else [cuts[number % len(cuts)]]:
                queries += [
                    Query(Rollout, where, (), sort_by, descending, limit, offset, count=True),
                    Query(Rollout, (), where, sort_by, descending, limit, offset),
                ]
        answers = await asyncio.gather(*map(backend.select, queries))
        for query, found in zip(queries, answers, strict=True):
            expected = await memory.select(query)
            assert list(found.rows) == list(expected.rows), query
            assert found.total == expected.total, query


async def test_queries_of_attempts_and_spans_give_the_same_results_as_the_memory_backend(
    backend: DurableBackend,
) -> None:
    memory = MemoryBackend()
    for store in (memory, backend):
        for n in range(4):
            rollout = Rollout(rollout_id=f"ro-{n}", input=n, start_time=0.0, run_id="ab"[n % 2])
            attempts = [
                Attempt(
                    rollout_id=f"ro-{n}",
                    attempt_id=f"at-{n}{k}",
                    sequence_id=k,
                    start_time=float(-k),
                    status="running" if k == 2 else "failed",
                    worker_id=f"w-{n % 2}",
                )
                for k in (2, 1)
            ]
            await store.commit([Put(rollout), *map(Put, attempts)])
            spans = [
                Span.from_attributes(
                    attributes={},
                    name=f"s{k}",
                    rollout_id=f"ro-{n}",
                    attempt_id=f"at-{n}{1 + k % 2}",
                    span_id=f"{k:016x}",
                    trace_id="t",
                    start_time=float(k),
                )
                for k in range(5)
            ]
            await store.append_spans(spans, 9.5)
    one, both = Condition("rollout_id", "eq", "ro-1"), Condition("rollout_id", "in", ("ro-3", "ro-1"))
    live = Condition("status", "in", ("preparing", "running"))
    queries: list[Query[Any]] = [
        Query(Attempt, (one,), sort_by="sequence_id", descending=True, limit=1),
        Query(Attempt, (one, Condition("attempt_id", "eq", "at-11"))),
        Query(Attempt, (both,)),
        Query(Attempt, (live,)),
        Query(Attempt, (live, Condition("worker_id", "eq", "w-1"))),
        Query(Attempt, (Condition("status", "eq", "failed"),), sort_by="start_time"),
        Query(Attempt, (Condition("last_heartbeat_time", "ge", 9.5),)),
        Query(Attempt, (Condition("rollout_id", "contains", "3"),), sort_by="rollout_id", descending=True),
        Query(Span, (one,), sort_by="sequence_id", count=True),
        Query(Span, (one, Condition("attempt_id", "eq", "at-12")), sort_by="sequence_id", limit=2, count=True),
        Query(Span, (both, Condition("name", "eq", "s3"))),
        Query(
            Span, (Condition("run_id", "eq", "a"), Condition("name", "contains", "s")), limit=3, offset=2, count=True
        ),
        Query(Span, (Condition("run_id", "eq", "b"),), limit=4, count=True),
        Query(
            Span, (Condition("attempt_id", "contains", "2"), Condition("start_time", "ge", 2.0)), sort_by="attempt_id"
        ),
        Query(Span, (one,), (Condition("name", "eq", "s1"), Condition("span_id", "eq", f"{2:016x}"))),
        Query(Span, (one, Condition("attempt_id", "eq", "at-11"), Condition("span_id", "eq", f"{2:016x}"))),
    ]
    for query in queries:
        expected, found = await memory.select(query), await backend.select(query)
        assert list(found.rows) == list(expected.rows), query
        assert not query.count or found.total == expected.total, query


async def test_reading_on_after_a_deleted_position_skips_no_rollout(backend: DurableBackend) -> None:
    await backend.commit([Put(Rollout(rollout_id=f"ro-{n}", input=n, start_time=0.0)) for n in range(3)])
    page = await backend.select(Query(Rollout))
    await backend.commit([Delete(Rollout, ("ro-2",))])
    await backend.commit([Put(Rollout(rollout_id="ro-3", input=3, start_time=0.0))])
    after = await backend.select(Query(Rollout, after=page.position))
    assert [row.record.input for row in after.rows] == [3]
    run, since = Condition("run_id", "eq", "default"), Condition("start_time", "ge", 0.0)
    after = await backend.select(Query(Rollout, (run, since), after=page.position, limit=9))
    assert [row.record.input for row in after.rows] == [3]
