"""Conditions that a fleet meets in months: other versions, wrong clocks, half-open connections; its servers' spans."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agentlightning.errors import ConfigError
from agentlightning.store.engine import BackendStore
from agentlightning.types import RolloutConfig
from agentlightning_plugins.stores.http.client import LightningStoreClient, connection
from agentlightning_plugins.stores.http.server import LightningStoreServer
from agentlightning_plugins.stores.memory.store import MemoryBackend
from tests.failures import check_messages
from tests.plugins.stores.actions import close, make_span, next_event, read_attempted, subscribe
from tests.plugins.stores.served import serve
from tests.plugins.stores.test_operations import serving
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.environment("main")  # about processes, not about versions of libraries

ANOTHER_VERSION = """
import json
encode = application.encode

def change(value):
    if isinstance(value, list):
        return [change(each) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {{name: change(each) for name, each in value.items() if name not in {left_out}}}
    return {{**kept, **{added}}} if "rollout_id" in value or "items" in value else kept

def change_event(event):
    content = {{**json.loads(encode_event(event)), **{added}}}
    if {added} and content.get("kind") == "rollout_started":
        content["kind"] = "of_the_next_version"
    return json.dumps(content).encode()

application.encode = lambda result: json.dumps(change(json.loads(encode(result)))).encode()
from agentlightning_plugins.stores.http.server import events
encode_event, events.to_json = events.to_json, change_event
"""
NEWER = {"left_out": [], "added": {"of_the_next_version": {"deep": [1]}}}
OLDER = {"left_out": ["truncated", "late_status", "spans_dropped", "reward", "cursor"], "added": {}}


@pytest.mark.parametrize("server", [NEWER, OLDER], ids=["newer", "older"])
async def test_a_client_works_with_a_server_of_the_next_and_of_the_previous_version(
    server: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next version adds fields to records and pages; the previous one lacks those that were added last."""
    times = ANOTHER_VERSION.format(**server)
    async with serving(tmp_path, times=times, AGL_BACKEND="memory://") as service:
        client = LightningStoreClient(service.url)
        events = await subscribe(client, None)
        queued = await client.enqueue_rollout({"question": 1}, metadata={"group": "g"})
        claimed = await client.dequeue_rollout("worker", timeout=LIMIT_S)
        assert claimed is not None
        assert claimed.rollout_id == queued.rollout_id
        await client.update_worker("worker")
        await client.add_many_spans([make_span(claimed)])
        await client.update_attempt(claimed.rollout_id, "latest", status="succeeded", reward=0.5)
        (done,) = await client.wait_for_rollouts([queued.rollout_id], timeout=LIMIT_S)
        assert (done.status, done.input) == ("succeeded", {"question": 1})
        kinds = [""]
        while kinds[-1] != "rollout_finished":
            kinds.append((await next_event(events)).kind)
        assert "rollout_enqueued" in kinds
        await close(events)
        page = await client.query_rollouts(metadata={"group": "g"}, limit=5)
        assert (len(page), page.total, page.truncated) == (1, 1, False)
        assert len(await client.query_spans(queued.rollout_id)) == 1
        # A newer client may send what this version does not know: it is named, and nothing is done.
        with pytest.raises((ConfigError, TypeError), match="of_the_next_version"):
            await client.query_rollouts(of_the_next_version=1)
        await client.close()
    check_messages("client and server have neighbouring versions", *caplog.messages)


@pytest.mark.parametrize("shift_s", [300.0, -300.0], ids=["ahead", "behind"])
async def test_a_runner_whose_clock_is_five_minutes_wrong_does_its_work_and_says_so(
    shift_s: float, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import time\nreal = time.time\ntime.time = lambda: real() + {shift_s}\n"
    )
    (tmp_path / "agent.py").write_text("def agent(task):\n    return 1.0\n")
    log = tmp_path / "log"
    async with serve() as (server, store):
        begun = store.now()
        config = RolloutConfig(timeout_seconds=10 * LIMIT_S, unresponsive_seconds=10 * LIMIT_S)
        queued = await store.enqueue_rollout("task", config=config)
        with log.open("wb") as output:
            runner = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agentlightning", "runner", f"{tmp_path / 'agent.py'}:agent"),
                *("--store", server.endpoint),
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
                stdout=asyncio.subprocess.DEVNULL,
                stderr=output,
            )
        try:
            await store.wait_for_rollouts([queued.rollout_id], timeout=LIMIT_S)
        finally:
            runner.terminate()
            await runner.wait()
        ended = await read_attempted(store, queued.rollout_id)
        assert (ended.status, ended.attempt.sequence_id, ended.attempt.reward) == ("succeeded", 1, 1.0)
        assert ended.end_time is not None
        assert begun <= ended.start_time <= ended.attempt.start_time <= ended.end_time <= store.now()
    if shift_s < 0:
        assert re.search(r"the clock of this machine is (299|300)\.\d s behind", log.read_text()), log.read_text()
    else:
        check_messages("a clock is five minutes wrong", log.read_text())


class Cable:
    """Forwards TCP to a server, until it is cut: then nothing passes on its open connections, and nothing ends them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._cut = asyncio.Event()
        self._pumps: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.connections = 0

    @contextlib.asynccontextmanager
    async def plugged(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)
            for writer in self._writers:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

    def cut(self) -> None:
        self._cut.set()
        self._cut = asyncio.Event()  # new connections work

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, back]
        for source, target in ((reader, back), (there, writer)):
            self._pumps.append(asyncio.create_task(self._pump(source, target, self._cut)))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, cut: asyncio.Event) -> None:
        while (data := await source.read(65536)) and not cut.is_set():
            target.write(data)
        if cut.is_set():
            await asyncio.Event().wait()
        target.close()


async def test_a_rollout_that_was_claimed_over_a_half_open_connection_runs_again_when_its_lease_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = BackendStore(MemoryBackend(), lease_s=0.3, watchdog_interval_s=0.05)
    async with LightningStoreServer(store, port=0) as server, Cable(server.port).plugged() as url:
        vanished = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        body = b'{"timeout": 30, "worker_id": "vanished"}'
        head = b"POST /v1/agl/queues/rollouts/dequeue HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n"
        vanished[1].write(head % len(body) + body)  # it never reads the answer, and the connection stays open
        queued = await store.enqueue_rollout("task")

        async def is_claimed_by_it() -> bool:
            attempt = await store.get_latest_attempt(queued.rollout_id)
            return attempt is not None and attempt.worker_id == "vanished"

        await until(is_claimed_by_it)
        client = LightningStoreClient(server.endpoint)
        claimed = await client.dequeue_rollout("living", timeout=LIMIT_S)
        assert claimed is not None
        assert (claimed.rollout_id, claimed.attempt.sequence_id) == (queued.rollout_id, 2)
        await client.close()
        vanished[1].close()
    await store.close()
    check_messages("a connection is half open: a cable, a firewall", *caplog.messages)


async def test_a_subscriber_on_a_half_open_connection_gets_the_events_over_a_new_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_SILENCE_S", 0.5)
    async with serve() as (server, store):
        cable = Cable(server.port)
        async with cable.plugged() as url:
            client = LightningStoreClient(url)
            events = client.subscribe(["rollout_enqueued"])
            first = asyncio.ensure_future(anext(events))
            while not first.done():
                await store.enqueue_rollout("before")
                await asyncio.wait({first}, timeout=0.05)
            cable.cut()
            last = await store.enqueue_rollout("after")
            while (await asyncio.wait_for(anext(events), LIMIT_S)).rollout_id != last.rollout_id:
                pass
            assert cable.connections >= 2
            await client.close()
    check_messages("a connection is half open: a cable, a firewall", *caplog.messages)


async def test_servers_export_spans_of_their_requests_without_ids_if_the_environment_says_so(tmp_path: Path) -> None:
    received: list[Any] = []

    async def take(request: web.Request) -> web.Response:
        export = ExportTraceServiceRequest.FromString(await request.read())
        received.extend(
            span for resource in export.resource_spans for scope in resource.scope_spans for span in scope.spans
        )
        return web.Response(content_type="application/x-protobuf")

    application = web.Application()
    application.router.add_post("/v1/traces", take)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    variables = {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{runner.addresses[0][1]}",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    async with serving(tmp_path, AGL_BACKEND="memory://", **variables) as service:
        await service.get("/v1/agl/rollouts/ro-secret")
        await until(lambda: received)
        await service.end()
    await runner.cleanup()
    (span,) = received
    assert span.name == "GET /v1/agl/rollouts/{rollout_id}"
    attributes = {each.key: each.value for each in span.attributes}
    assert attributes["http.response.status_code"].int_value == 404
    assert "secret" not in str(span)
