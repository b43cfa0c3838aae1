"""Faults of real processes around a served store: processes killed or paused, and a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from agentlightning.errors import StoreError
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import SpanWriter
from agentlightning.types import Rollout, RolloutConfig, Span
from agentlightning_plugins.stores.http.client import LightningStoreClient
from agentlightning_plugins.stores.http.server import LightningStoreServer, application
from agentlightning_plugins.stores.sqlite.store import SqliteLightningStore
from tests.failures import check_messages
from tests.plugins.stores.served import ask
from tests.port import reserve_port
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.environment("main")  # about processes, not about versions of libraries

RUNNER = """
    import asyncio, os, sys
    import agentlightning as agl
    from agentlightning.types import Span

    @agl.rollout
    async def agent(task, rollout):
        print("begun", rollout.attempt.attempt_id, flush=True)
        if task["first_waits_s"] and rollout.attempt.sequence_id == 1:
            await asyncio.sleep(task["first_waits_s"])
        for number in range(task["spans"]):
            agl.emit_annotation({"number": number})
        while "begins" in task and not os.path.exists(task["begins"]):
            await asyncio.sleep(0.01)
        if task.get("result") == "spans":
            return [agl.emit_message(os.urandom(50_000).hex(), propagate=False), agl.emit_reward(2.0, propagate=False)]
        if task.get("result") == "error":
            raise ValueError("x" * 100_000)
        return 1.0

    async def main():
        store = agl.LightningStoreClient(sys.argv[1])
        runner = agl.LitAgentRunner(agl.OtelTracer(), heartbeat_interval=0.2, poll_interval=0.5)
        with runner.run_context(agent=agent, store=store, worker_id=sys.argv[2]):
            await runner.iter()

    asyncio.run(main())
"""


PATIENT_STORE = """
from agentlightning.cli import main
from agentlightning_plugins.stores.http import command
from agentlightning_plugins.stores.http.server import application

command._CLOSE_S = application._FINISH_S = 600.0  # however slow the machine is
main()
"""


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a Python process whose output can be read, and kills it at the end."""
    started = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


class Server:
    """``agl store`` over one SQLite file and at one port; can be restarted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.port = reserve_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[str] | None = None

    async def start(self) -> None:
        self._process = await asyncio.to_thread(self._start)

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PATIENT_STORE, "store", "--backend", f"sqlite:///{self.path}"]
        started = subprocess.Popen([*command, "--port", str(self.port)], stdout=subprocess.PIPE, text=True)
        assert started.stdout is not None
        assert "Serving" in started.stdout.readline()
        return started

    async def stop(self, number: signal.Signals) -> int:
        """Sends a signal and returns the exit code."""
        stopping, self._process = self._process, None
        if stopping is None:
            return 0
        stopping.send_signal(number)
        await asyncio.to_thread(stopping.communicate, timeout=LIMIT_S)
        return stopping.returncode


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path / "store.db")
    await server.start()
    yield server
    await server.stop(signal.SIGKILL)


def check_integrity(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


class Load:
    """Workers that write continuously, and a record of all acknowledged writes."""

    def __init__(self, client: LightningStoreClient) -> None:
        self.client = client
        self.enqueued: list[str] = []
        self.claims: list[tuple[str, str]] = []
        self.finished: list[str] = []
        self.spans: set[tuple[str, str]] = set()
        self.stopping = False

    async def work(self, worker_id: str) -> None:
        while not self.stopping:
            with contextlib.suppress(StoreError):  # only idempotent calls are repeated
                self.enqueued.append((await self.client.enqueue_rollout({"of": worker_id})).rollout_id)
                claimed = await self.client.dequeue_rollout(worker_id)
                if claimed is not None:
                    await self.finish(claimed.rollout_id, claimed.attempt.attempt_id)

    async def finish(self, rollout_id: str, attempt_id: str) -> None:
        self.claims.append((rollout_id, attempt_id))
        spans = [
            Span.from_attributes(attributes={"n": n}, rollout_id=rollout_id, attempt_id=attempt_id) for n in range(3)
        ]
        await self.client.add_many_spans(spans)
        self.spans |= {(rollout_id, span.span_id) for span in spans}
        await self.client.update_attempt(rollout_id, attempt_id, "succeeded")
        self.finished.append(rollout_id)

    async def drain(self, worker_ids: list[str]) -> None:
        """Marks the workers as dead and runs the remaining rollouts."""
        for worker_id in worker_ids:
            await self.client.end_worker(worker_id)
        while claimed := await self.client.dequeue_rollout("late"):
            await self.finish(claimed.rollout_id, claimed.attempt.attempt_id)


async def kill_under_load(server: Server, kills: int, between_s: tuple[float, float]) -> None:
    client = LightningStoreClient(server.url)
    load = Load(client)
    workers = [f"worker-{number}" for number in range(8)]
    working = [asyncio.create_task(load.work(worker_id)) for worker_id in workers]
    for _ in range(kills):
        await asyncio.sleep(random.uniform(*between_s))
        before = len(load.finished)
        assert await server.stop(signal.SIGKILL) == -signal.SIGKILL
        await server.start()
        await until(lambda before=before: len(load.finished) >= before + 20)
    load.stopping = True
    await asyncio.gather(*working)
    await load.drain(workers)

    rollouts = {rollout.rollout_id: rollout for rollout in await client.query_rollouts()}
    assert set(load.enqueued) <= set(rollouts), "an acknowledged rollout is lost"
    assert {rollout.status for rollout in rollouts.values()} == {"succeeded"}, "a rollout was never done"
    assert len(load.claims) == len(set(load.claims)), "an attempt was handed out twice"
    assert sorted(load.finished) == sorted(set(load.finished)), "a rollout was done twice"
    stored = [(span.rollout_id, span.span_id) for span in await client.query_spans(None)]
    assert len(stored) == len(set(stored))
    assert load.spans <= set(stored), "an acknowledged span is lost"
    await client.close()
    assert await server.stop(signal.SIGTERM) == 0
    check_integrity(server.path)


@pytest.mark.slow
async def test_a_server_killed_during_writes_loses_no_acknowledged_write(server: Server) -> None:
    await kill_under_load(server, kills=2, between_s=(0.1, 0.5))


@pytest.mark.soak
async def test_a_server_killed_repeatedly_loses_no_acknowledged_write(server: Server) -> None:
    await kill_under_load(server, kills=40, between_s=(0.1, 3.0))


async def test_a_span_writer_loses_no_span_when_the_server_is_killed(server: Server) -> None:
    client = LightningStoreClient(server.url)
    await client.enqueue_rollout("task")
    claimed = await client.dequeue_rollout("worker")
    assert claimed is not None
    rollout_id, attempt_id = claimed.rollout_id, claimed.attempt.attempt_id
    writer = SpanWriter(client, max_batch=20, max_delay_s=0.005)
    put: list[str] = []
    restarting = asyncio.create_task(asyncio.sleep(0))
    for number in range(600):
        span = Span.from_attributes(attributes={"number": number}, rollout_id=rollout_id, attempt_id=attempt_id)
        assert writer.put(span)
        put.append(span.span_id)
        await asyncio.sleep(0.001)
        if number in (150, 400):  # the writer continues without a server
            await restarting
            await server.stop(signal.SIGKILL)
            restarting = asyncio.create_task(server.start())
    await restarting
    assert await writer.flush(timeout_s=LIMIT_S)
    assert writer.dropped(rollout_id, attempt_id) == 0
    stored = await client.query_spans(claimed.rollout_id)
    assert [span.span_id for span in stored] == put
    assert [span.sequence_id for span in stored] == list(range(1, 601))
    writer.close()
    await client.close()


async def test_a_stopped_server_answers_waiting_requests_and_finishes_running_requests(server: Server) -> None:
    client = LightningStoreClient(server.url, retry_s=0)
    waiting = asyncio.create_task(client._post("/queues/rollouts/dequeue", {"timeout": 30}))
    large = json.dumps({"rollouts": [{"input": "x" * 1000, "rollout_id": f"ro-{n}"} for n in range(5000)]}).encode()
    begun, told = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield large[:1_000_000]
        begun.set()
        await told.wait()
        yield large[1_000_000:]

    async def write() -> int:
        url = f"{server.url}/v1/agl/queues/rollouts/enqueue"
        headers = {"Content-Type": "application/json"}
        async with aiohttp.ClientSession() as session, session.post(url, data=body(), headers=headers) as response:
            assert response.status == 201
            return len(await response.json())

    writing = asyncio.create_task(write())
    await begun.wait()
    for _ in range(3):  # answered after the requests before, which have arrived then
        await client.statistics()
    stopping = asyncio.create_task(server.stop(signal.SIGINT))
    await asyncio.sleep(0.3)
    told.set()
    assert await stopping == 0
    assert await waiting == []
    assert await writing == 5000
    with pytest.raises(StoreError, match="agl store"):
        await client.statistics()
    await client.close()
    store = SqliteLightningStore(server.path)
    assert (await store.statistics())["rollouts"] == 5000
    await store.close()


@contextlib.asynccontextmanager
async def served_with_lease(path: Path, lease_s: float) -> AsyncIterator[tuple[str, LightningStore]]:
    store = SqliteLightningStore(path, lease_s=lease_s, watchdog_interval_s=0.1)
    async with LightningStoreServer(store, port=0) as server:
        yield server.endpoint, store
    await store.close()


def runner(url: str, worker_id: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return process("-c", textwrap.dedent(RUNNER), url, worker_id)


async def begun(runner_process: subprocess.Popen[str]) -> str:
    """Returns the attempt that a runner has begun."""
    assert runner_process.stdout is not None
    line = await asyncio.to_thread(runner_process.stdout.readline)
    assert line.startswith("begun"), line or runner_process.communicate()
    return line.split()[1]


@pytest.mark.slow
async def test_when_a_lease_has_run_out_another_runner_runs_the_rollout_of_a_killed_runner(tmp_path: Path) -> None:
    async with served_with_lease(tmp_path / "store.db", lease_s=2.0) as (url, store):
        config = RolloutConfig(max_attempts=20, retry_condition=["unresponsive"])
        with runner(url, "first") as first, runner(url, "second") as second:
            task = {"first_waits_s": 3600, "spans": 2}
            queued = await store.enqueue_rollout(task, config=config)
            reading = {asyncio.create_task(begun(one)): one for one in (first, second)}
            (ready,), _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            reading[ready].kill()
            ended = await store.wait_for_rollouts([queued.rollout_id], timeout=LIMIT_S)
            assert [rollout.status for rollout in ended] == ["succeeded"]
            attempts = list(await store.query_attempts(queued.rollout_id))
            # A slow machine may stop the second runner for longer than the lease, too.
            assert [attempt.status for attempt in attempts] == [*["unresponsive"] * (len(attempts) - 1), "succeeded"]
            assert len(attempts) > 1
            assert attempts[0].worker_id not in {attempt.worker_id for attempt in attempts[1:]}
            assert attempts[0].end_time is not None
            check_messages("a runner is killed", attempts[0].status)
            await asyncio.wait(reading, timeout=LIMIT_S)


async def pause_a_runner(path: Path, *, pause_s: float, lease_s: float) -> None:
    """Pauses the process of a busy runner until its lease has run out and others have done its work."""
    async with served_with_lease(path, lease_s) as (url, store):
        config = RolloutConfig(max_attempts=20, retry_condition=["unresponsive"])
        with runner(url, "paused") as paused:
            task = {"first_waits_s": 0.5, "spans": 20}
            queued: list[Rollout] = [await store.enqueue_rollout(task, config=config)]
            paused_attempt = await begun(paused)
            paused.send_signal(signal.SIGSTOP)
            queued += [await store.enqueue_rollout(task, config=config) for _ in range(3)]
            with runner(url, "other"):
                ids = [rollout.rollout_id for rollout in queued]
                pausing = asyncio.create_task(asyncio.sleep(pause_s))
                ended = await store.wait_for_rollouts(ids, timeout=LIMIT_S)
                assert [rollout.status for rollout in ended] == ["succeeded"] * 4
                await pausing
                paused.send_signal(signal.SIGCONT)
                later = await store.enqueue_rollout({"first_waits_s": 0, "spans": 1}, config=config)
                (ended_later,) = await store.wait_for_rollouts([later.rollout_id], timeout=LIMIT_S)
                assert ended_later.status == "succeeded"
                await asyncio.sleep(1)  # the paused runner sends its results
            for rollout_id in ids:
                attempts = list(await store.query_attempts(rollout_id))
                succeeded = [attempt for attempt in attempts if attempt.status == "succeeded"]
                assert len(succeeded) == 1, attempts
                spans = await store.query_spans(rollout_id, succeeded[0].attempt_id, name="agentlightning.annotation")
                assert sorted(span.attributes["number"] for span in spans) == list(range(20))
                for attempt in attempts:
                    own = await store.query_spans(rollout_id, attempt.attempt_id)
                    assert len({span.span_id for span in own}) == len(own)
                    assert attempt.spans_dropped == 0
            assert (await store.query_attempts(ids[0]))[0].attempt_id == paused_attempt
            check_messages("a runner is suspended", (await store.query_attempts(ids[0]))[0].status)


@pytest.mark.slow
async def test_a_paused_runner_causes_no_second_success_and_loses_no_span(tmp_path: Path) -> None:
    await pause_a_runner(tmp_path / "store.db", pause_s=0, lease_s=1.0)


@pytest.mark.soak
async def test_a_runner_paused_for_half_a_minute_causes_no_second_success_and_loses_no_span(tmp_path: Path) -> None:
    await pause_a_runner(tmp_path / "store.db", pause_s=30, lease_s=5.0)


async def test_a_client_waits_for_a_paused_server(server: Server) -> None:
    client = LightningStoreClient(server.url)
    rollout = await client.enqueue_rollout("task")
    stopped = server._process
    assert stopped is not None
    stopped.send_signal(signal.SIGSTOP)
    calls = [asyncio.create_task(client.enqueue_rollout(number)) for number in range(5)]
    taking = asyncio.create_task(client.dequeue_rollout("worker", timeout=LIMIT_S))
    await asyncio.sleep(0.3)
    stopped.send_signal(signal.SIGCONT)
    assert len({item.rollout_id for item in await asyncio.gather(*calls)}) == 5
    taken = await taking
    assert taken is not None
    assert taken.rollout_id == rollout.rollout_id
    assert (await client.statistics())["rollouts"] == 6
    await client.close()


async def test_a_full_disk_is_reported_to_clients_probes_and_the_log_and_damages_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(application, "_FULL_S", LIMIT_S)
    path = tmp_path / "store.db"
    store = SqliteLightningStore(path)
    async with LightningStoreServer(store, port=0) as server:
        client = LightningStoreClient(server.endpoint, retry_s=10 * LIMIT_S)
        kept = await client.enqueue_rollout("kept")
        connection = store._database.backend.writer._connection  # to make the disk full
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(StoreError) as caught:
            await asyncio.wait_for(client.enqueue_rollout("x" * 100_000), LIMIT_S)
        found = await client.get_rollout_by_id(kept.rollout_id)
        assert found == kept
        status, text = await ask(server, "GET", "/readyz")
        assert status == 503
        check_messages("the disk of the database is full", str(caught.value), text.decode())
        assert caplog.text.count("writes fail") == 1
        connection.execute("PRAGMA max_page_count = 1000000")
        await client.enqueue_rollout("x" * 100_000)
        assert server._served is not None
        server._served._full_until = 0.0  # as after the time
        assert await ask(server, "GET", "/readyz") == (200, b"ok\n")
        assert (await client.statistics())["rollouts"] == 2
        await client.close()
    await store.close()
    check_integrity(path)


@pytest.mark.parametrize(("result", "status"), [("spans", "succeeded"), ("error", "failed")])
async def test_a_runner_keeps_a_result_while_the_disk_of_the_store_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, result: str, status: str
) -> None:
    async with served_with_lease(tmp_path / "store.db", lease_s=LIMIT_S) as (url, store):
        task = {"first_waits_s": 0, "spans": 0, "begins": str(tmp_path / "begins"), "result": result}
        queued = await store.enqueue_rollout(task, config=RolloutConfig(max_attempts=1))
        with runner(url, "worker") as working:
            await begun(working)
            connection = store._database.backend.writer._connection
            connection.execute("PRAGMA max_page_count = 1")  # as many as there are
            (tmp_path / "begins").touch()
            assert working.stderr is not None
            line = await asyncio.to_thread(working.stderr.readline)
            assert "writes fail" in caplog.text
            check_messages("the disk of the database is full, and a rollout ends", line)
            connection.execute("PRAGMA max_page_count = 1000000")
            (ended,) = await store.wait_for_rollouts([queued.rollout_id], timeout=LIMIT_S)
        (attempt,) = await store.query_attempts(queued.rollout_id)
        assert ended.status == attempt.status == status
        assert attempt.reward == (2.0 if result == "spans" else None)
        assert (attempt.error is None) == (result == "spans")
