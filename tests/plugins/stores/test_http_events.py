"""Server-sent events and metrics of the store server."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentlightning.errors import StoreError
from agentlightning.event import AttemptFinished
from agentlightning.store.engine import BackendStore
from agentlightning.types import EnqueueRolloutRequest
from agentlightning_algorithms.shared.live_resources import LiveState
from agentlightning_plugins.stores.http import command
from agentlightning_plugins.stores.http.client import LightningStoreClient
from agentlightning_plugins.stores.http.server import LightningStoreServer, events
from agentlightning_plugins.stores.http.server import metrics as metrics_module
from agentlightning_plugins.stores.http.server.events import EventStreams
from agentlightning_plugins.stores.http.server.metrics import ServerMetrics
from agentlightning_plugins.stores.http.server.polling import Polls
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.plugins.stores.actions import make_span
from tests.plugins.stores.served import ask, claim, serve, until_gauge
from tests.waiting import LIMIT_S, until


class Stream:
    """Reads frames as a browser's EventSource does."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    async def frame(self) -> dict[str, str]:
        """Returns the fields of the next frame: a comment has the field '', the end of the stream no field."""
        text = b""
        while not text.endswith(b"\n\n"):
            line = await asyncio.wait_for(self._content.readline(), LIMIT_S)
            if not line:
                return {}
            text += line
        return {name: value for name, _, value in (line.partition(": ") for line in text.decode().strip().split("\n"))}

    async def event(self) -> dict[str, str]:
        """Returns the next frame that is not a comment, or no fields at the end of the stream."""
        while "" in (frame := await self.frame()):
            pass
        return frame


@asynccontextmanager
async def subscribe(
    server: LightningStoreServer, query: str = "", last_event_id: str | None = None
) -> AsyncIterator[Stream]:
    headers = {} if last_event_id is None else {"last-event-id": last_event_id}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{server.endpoint}/v1/agl/events{query}", headers=headers) as response,
    ):
        assert response.content_type == "text/event-stream"
        yield Stream(response.content)


async def test_a_reader_that_reconnects_gets_the_events_it_missed() -> None:
    async with serve() as (server, store):
        async with subscribe(server) as stream:
            first = await store.enqueue_rollout(1)
            seen = await stream.event()
            assert (seen["event"], json.loads(seen["data"])["rollout_id"]) == ("rollout_enqueued", first.rollout_id)
        missed = [await store.enqueue_rollout(number) for number in range(3)]
        await store.dequeue_rollout("worker")
        async with subscribe(server, "?kinds=rollout_enqueued", seen["id"]) as stream:
            for rollout in [*missed, await store.enqueue_rollout(9)]:
                event = await stream.event()
                assert json.loads(event["data"])["rollout_id"] == rollout.rollout_id
                assert event["id"] != seen["id"]


@pytest.mark.parametrize("unknown", ["0-1", "nonsense", "ffffffff-99"])
async def test_a_reader_with_an_unknown_last_event_id_gets_a_gap_event(unknown: str) -> None:
    async with serve() as (server, store), subscribe(server, last_event_id=unknown) as stream:
        gap = await stream.event()
        assert (gap["event"], json.loads(gap["data"])["code"]) == ("gap", "gap")
        await store.enqueue_rollout(1)
        assert (await stream.event())["event"] == "rollout_enqueued"


async def test_a_reader_that_missed_more_events_than_the_server_keeps_gets_a_gap_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "KEPT_EVENTS", 2)
    async with serve() as (server, store):
        async with subscribe(server) as stream:
            await store.enqueue_rollout(0)
            seen = await stream.event()
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(2)])
        async with subscribe(server, last_event_id=seen["id"]) as stream:
            assert (await stream.event())["event"] == "rollout_enqueued"
        await store.enqueue_rollout(3)
        async with subscribe(server, last_event_id=seen["id"]) as stream:
            assert (await stream.event())["event"] == "gap"


async def test_a_quiet_stream_gets_keepalive_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEPALIVE_S", 0.05)
    async with serve() as (server, _), subscribe(server) as stream:
        assert [next(iter(await stream.frame())) for _ in range(3)] == ["", "", ""]


async def test_a_slow_reader_gets_an_overflow_event_and_does_not_delay_other_readers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "MAX_UNREAD_EVENTS", 50)
    big = "x" * 20_000  # more than the buffers of a socket hold
    async with serve() as (server, store), subscribe(server) as slow, subscribe(server) as quick:
        for step in range(1, 501):
            await store.add_metrics(step, {f"{big}{key}": 1.0 for key in range(2)})
            assert (await quick.event())["event"] == "step_finished"
        kinds = []
        while frame := await slow.event():
            kinds.append(frame["event"])
        assert kinds[-1] == "overflow"
        assert len(kinds) < 500
        assert set(kinds[:-1]) == {"step_finished"}


async def test_the_client_resumes_a_stream_whose_connection_broke() -> None:
    async with serve() as (server, store):
        client = LightningStoreClient(server.endpoint)
        stream = client.subscribe(["rollout_enqueued"])
        coming = asyncio.ensure_future(anext(stream))
        await until_gauge(server, "agl_store_event_subscribers", 1)
        await store.enqueue_rollout(0)
        await coming
        session = client._connection._pool.session()
        for connection in [*session.connector._acquired]:  # to break the stream
            connection.transport.abort()
        ids = [(await store.enqueue_rollout(number)).rollout_id for number in range(3)]
        assert [(await asyncio.wait_for(anext(stream), LIMIT_S)).rollout_id for _ in ids] == ids
        await stream.aclose()
        await client.close()


async def test_the_client_raises_an_error_when_its_stream_overflows() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
            b'event: gap\ndata: {"code": "gap"}\n\n'
            b'event: overflow\ndata: {"code": "overflow", "message": "too slow"}\n\n'
        )
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        client = LightningStoreClient(f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}")
        with pytest.raises(StoreError, match="too slow"):
            await anext(client.subscribe())
        await client.close()


def _samples(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return samples


async def test_prometheus_metrics_describe_the_store_and_its_requests() -> None:
    async with serve() as (server, store), subscribe(server):
        await store.with_run("some-run").create_run("named")
        running, ended = await claim(store), await claim(store)
        await store.update_attempt(ended.rollout_id, ended.attempt.attempt_id, status="succeeded")
        await store.with_run("some-run").enqueue_rollout(1)
        path = f"/v1/agl/rollouts/{running.rollout_id}"
        for _ in range(3):
            assert (await ask(server, "GET", path))[0] == 200
        assert (await ask(server, "GET", path + "0"))[0] == 404
        assert (await ask(server, "GET", "/elsewhere"))[0] == 404
        asking = asyncio.create_task(ask(server, "POST", "/v1/agl/queues/rollouts/dequeue", {"timeout": 30}))
        await until_gauge(server, "agl_store_waiting_requests", 1)

        status, content = await ask(server, "GET", "/metrics")
        assert status == 200
        samples: dict[str, Any] = _samples(content.decode())
        route = "/v1/agl/rollouts/{rollout_id}"
        assert samples["agl_store_requests_total"]["GET", route, "200"] == 3
        assert samples["agl_store_requests_total"]["GET", route, "404"] == 1
        assert samples["agl_store_requests_total"]["GET", "", "404"] == 1
        assert samples["agl_store_request_seconds_count"]["GET", route] == 4
        assert samples["agl_store_request_seconds_bucket"]["+Inf", "GET", route] == 4
        assert samples["agl_store_rollouts"]["default", "succeeded"] == 1
        assert samples["agl_store_rollouts"]["default", "preparing"] == 1
        assert samples["agl_store_rollouts"]["some-run", "queuing"] == 1
        assert samples["agl_store_queue_depth"] == {("default",): 0, ("some-run",): 1}
        assert samples["agl_store_oldest_queued_seconds"]["default",] == 0
        assert samples["agl_store_oldest_queued_seconds"]["some-run",] > 0
        assert samples["agl_store_records"]["rollouts",] == 3
        assert sum(samples["agl_store_workers"].values()) == 1
        assert samples["agl_store_event_subscribers"][()] == 1
        assert samples["agl_store_waiting_requests"][()] == 1
        assert samples["agl_store_uptime_seconds"][()] > 0
        await store.enqueue_rollout(2)
        await asking


async def test_prometheus_metrics_show_rewards_by_version_and_mode_and_what_live_learning_does() -> None:
    async with serve() as (server, store):
        live = store.with_run("shop")
        await live.create_run("shop")
        for prompt, rewards in (("one", [0.0, 1.0]), ("two", [0.5])):
            version = (await live.update_resources("tuned", {"prompt": prompt})).version_id
            for mode, reward in zip(("train", "val"), rewards, strict=False):
                begun = await live.start_rollout("task", mode, version)
                await live.update_attempt(begun.rollout_id, "latest", status="succeeded", reward=reward)
        again = await live.start_rollout("task", "val", "tuned@1")
        await live.update_attempt(again.rollout_id, "latest", status="failed", reward=0.5)
        state = LiveState(phase="trial", since=0.0, stable="tuned@2", share=0.25, alarms=2)
        await store.with_run("shop.live").update_resources("shop.live", {"live": state})
        samples: dict[str, Any] = _samples((await ask(server, "GET", "/metrics"))[1].decode())
        assert samples["agl_store_reward"] == {
            ("train", "shop", "tuned@1"): 0.0,
            ("val", "shop", "tuned@1"): 0.75,
            ("train", "shop", "tuned@2"): 0.5,
        }
        assert samples["agl_store_promoted_version"]["tuned", "shop"] == 2
        assert samples["agl_store_trial_phase"] == {("trial", "shop"): 1.0}
        assert samples["agl_store_trial_share"] == {("shop",): 0.25}
        assert samples["agl_store_promotions_taken_back"] == {("shop",): 2.0}


async def test_a_scrape_reads_rewards_where_rollouts_have_ended_and_of_few_runs_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []
    query = BackendStore.query_rollouts

    async def counted(store: BackendStore, *arguments: Any, **options: Any) -> Any:
        if options.get("limit") == metrics_module._REWARDED:
            read.append(store.run_id)
        return await query(store, *arguments, **options)

    monkeypatch.setattr(BackendStore, "query_rollouts", counted)
    async with serve() as (server, store):

        async def end(run_id: str, reward: float) -> None:
            begun = await store.with_run(run_id).start_rollout("task")
            await store.with_run(run_id).update_attempt(begun.rollout_id, "latest", status="succeeded", reward=reward)

        async def scrape() -> tuple[set[str], dict[str, float]]:
            """Returns the runs that were read, and the rewards."""
            read.clear()
            samples: dict[str, Any] = _samples((await ask(server, "GET", "/metrics"))[1].decode())
            return set(read), {run: mean for (_, run, _), mean in samples["agl_store_reward"].items()}

        names = {f"run-{number}" for number in range(metrics_module._REFRESHED + 2)}
        for name in names:
            await store.with_run(name).create_run("named")
            await end(name, 1.0)
        first, rewards = await scrape()
        assert (len(first), rewards.keys()) == (metrics_module._REFRESHED, first - {"default"})
        second, rewards = await scrape()
        assert second == {"default", *names} - first
        assert rewards == dict.fromkeys(names, 1.0)
        assert await scrape() == (set(), rewards)
        await end("run-3", 0.0)
        assert await scrape() == ({"run-3"}, {**rewards, "run-3": 0.5})


async def test_a_line_about_an_ended_attempt_costs_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryLightningStore()
    events = store.subscribe(["attempt_finished"])
    finished = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    begun = await store.start_rollout("task")
    await store.add_many_spans([make_span(begun, name) for name in ("one", "two")])
    await store.update_attempt(begun.rollout_id, "latest", status="succeeded", reward=0.25)
    event = await finished
    assert isinstance(event, AttemptFinished)
    select, queries = store.backend.select, []
    monkeypatch.setattr(store.backend, "select", lambda query: (queries.append(query), select(query))[1])
    line = await command._describe(store, event)
    assert line == f"{begun.rollout_id} succeeded with 2 spans, reward 0.25"
    assert len(queries) == 1
    await store.close()


async def test_every_run_with_open_work_is_in_the_queue_metrics() -> None:
    async with serve() as (server, store):
        names = [f"run-{number}" for number in range(30)]
        for name in names:
            await store.with_run(name).create_run("named")
        for name in ("run-0", "run-1", "unnamed"):  # older than the newest runs, or never created
            await store.with_run(name).enqueue_rollout("task")
        samples = _samples((await ask(server, "GET", "/metrics"))[1].decode())
        depths = {run_id: depth for (run_id,), depth in samples["agl_store_queue_depth"].items() if depth}
        assert depths == {"run-0": 1, "run-1": 1, "unnamed": 1}
        assert len(samples["agl_store_queue_depth"]) == 24, "default, the 20 newest, and these"


async def test_a_database_error_after_the_metrics_response_is_not_reported_as_unhandled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_module, "ANSWER_S", 0.05)
    gc.collect()  # what earlier tests left behind may say so
    caplog.clear()
    store = InMemoryLightningStore()
    failures = 0

    async def fail() -> dict[str, int]:
        nonlocal failures
        await answered.wait()
        failures += 1
        raise StoreError("the database is away")

    monkeypatch.setattr(store, "statistics", fail)
    metrics = ServerMetrics(store, Polls(), EventStreams(store.with_run))
    for number in (1, 2):
        answered = asyncio.Event()
        assert b"agl_store_up 0.0" in await metrics.render()
        answered.set()
        await until(lambda number=number: failures == number)
    gc.collect()
    assert "never retrieved" not in caplog.text
    await store.close()
