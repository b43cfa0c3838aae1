"""W3C's trace context in child processes and in the requests of HTTP clients."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import aiohttp
import httpx
import httpx2
import pytest
import requests
from aiohttp import web
from openai import AsyncOpenAI, OpenAI

from agentlightning.run.thread import run_in_thread
from agentlightning.tracer import OtelTracer
from agentlightning_plugins.stores.http.server import LightningStoreServer
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.http_site import serving
from tests.plugins.tracers.context_child import Teller, read_context, tell_context

SHOW = [sys.executable, "-c", "import os; print(os.environ.get('TRACEPARENT'), os.environ.get('MARK'), sep='|')"]


@pytest.fixture
def tracer() -> Iterator[OtelTracer]:
    tracer = OtelTracer()
    tracer.init()
    yield tracer
    tracer.teardown()


class Listener:
    """Records the ``traceparent`` of each request."""

    def __init__(self) -> None:
        self.url = ""
        self.heard: list[str | None] = []

    async def take(self, request: web.Request) -> web.Response:
        self.heard.append(request.headers.get("traceparent"))
        return web.json_response({"error": {"message": "no"}}, status=400)


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = Listener()
    async with serving(web.route("*", "/{path:.*}", listener.take)) as url:
        listener.url = f"{url}/"
        yield listener


def run(*args: Any, **kwargs: Any) -> tuple[str, str]:
    output = subprocess.run(SHOW, *args, check=True, capture_output=True, text=True, **kwargs).stdout
    context, _, mark = output.strip().partition("|")
    return context, mark


def read_output(*arguments: Any) -> str:
    with subprocess.Popen(SHOW, *arguments) as process:
        assert process.stdout is not None
        return bytes(process.stdout.read()).decode().strip()


# Child processes.


async def test_a_child_process_inherits_the_trace_context_of_its_parent(tracer: OtelTracer) -> None:
    assert (await asyncio.to_thread(run))[0] == "None"
    async with tracer.trace_context() as trace:
        with tracer.operation_context("tool"):
            context, _ = await run_in_thread(run, name="agent")
            assert context == tracer.get_traceparent()
        process = await asyncio.create_subprocess_exec(*SHOW, stdout=subprocess.PIPE)
        from_asyncio = (await process.communicate())[0].decode().partition("|")[0]
    tool, root = trace.spans
    assert context.startswith(f"00-{tool.trace_id}-{tool.span_id}-")
    assert from_asyncio.startswith(f"00-{root.trace_id}-{root.span_id}-")
    assert "TRACEPARENT" not in os.environ
    assert tracer.get_traceparent() is None


async def test_a_given_environment_keeps_its_variables(tracer: OtelTracer) -> None:
    async with tracer.trace_context():
        own = {"PATH": os.environ["PATH"], "MARK": "mine"}
        context, mark = run(env=own)
        assert context == tracer.get_traceparent()
        assert mark == "mine"
        assert own == {"PATH": os.environ["PATH"], "MARK": "mine"}
        assert run(env={**own, "TRACEPARENT": "theirs"}) == ("theirs", "mine")
        assert run(env={**own, b"TRACEPARENT": b"theirs"}) == ("theirs", "mine")
        assert run(env=os.environ)[0] == tracer.get_traceparent()
        positional: Any = (-1, None, None, subprocess.PIPE, None, None, True, False, None, own)
        assert read_output(*positional) == f"{tracer.get_traceparent()}|mine"


@pytest.mark.parametrize("kind", ["fork", "spawn", "subclass"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # raised by fork
async def test_a_process_of_multiprocessing_inherits_the_trace_context(tracer: OtelTracer, kind: str) -> None:
    here, there = multiprocessing.Pipe()
    process: Any
    if kind == "subclass":
        process = Teller(there)
    else:
        process = multiprocessing.get_context(kind).Process(target=tell_context, args=(there,))
    async with tracer.trace_context():
        process.start()
        assert await asyncio.to_thread(here.poll, 60)
        assert here.recv() == tracer.get_traceparent()
    process.join()
    assert process.exitcode == 0
    assert "TRACEPARENT" not in os.environ
    assert "run" not in vars(process)


async def test_each_call_of_a_process_pool_carries_the_trace_context_of_its_caller(tracer: OtelTracer) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for _ in range(2):
            async with tracer.trace_context():
                heard = await asyncio.get_running_loop().run_in_executor(pool, read_context)
                assert heard == tracer.get_traceparent()
        assert await asyncio.wrap_future(pool.submit(read_context)) is None


async def test_trace_contexts_of_children_of_concurrent_attempts_never_mix(tracer: OtelTracer) -> None:
    async def act() -> bool:
        async with tracer.trace_context() as trace:
            context, _ = await run_in_thread(run, name="agent")
        return context.split("-")[1] == trace.spans[-1].trace_id

    assert await asyncio.gather(*(act() for _ in range(8))) == [True] * 8


def test_teardown_restores_the_patched_methods_of_processes_and_http_clients() -> None:
    def places() -> list[Any]:
        clients = (httpx.Client, httpx.AsyncClient, httpx2.Client, httpx2.AsyncClient, requests.Session)
        return [
            vars(subprocess.Popen)["__init__"],
            vars(multiprocessing.process.BaseProcess)["start"],
            vars(ProcessPoolExecutor)["submit"],
            vars(aiohttp.ClientSession)["__init__"],
            *(vars(client)["send"] for client in clients),
        ]

    before = places()
    tracer = OtelTracer()
    tracer.init()
    assert all(one is not other for one, other in zip(before, places(), strict=True))
    tracer.teardown()
    assert all(one is other for one, other in zip(before, places(), strict=True))


# HTTP clients.


def use_httpx(url: str) -> None:
    httpx.get(url)


def use_httpx2(url: str) -> None:
    httpx2.get(url)


def use_requests(url: str) -> None:
    requests.get(url, timeout=300)


async def use_httpx_async(url: str) -> None:
    async with httpx.AsyncClient() as client:
        await client.get(url)


async def use_httpx2_async(url: str) -> None:
    async with httpx2.AsyncClient() as client:
        await client.get(url)


async def use_aiohttp(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(url, headers={"x-own": "1"}):
        pass


CLIENTS: list[Callable[[str], Any]] = [
    use_httpx,
    use_httpx2,
    use_requests,
    use_httpx_async,
    use_httpx2_async,
    use_aiohttp,
]


@pytest.mark.parametrize("use", CLIENTS, ids=lambda use: use.__name__)
async def test_a_request_carries_the_trace_context_of_its_attempt(
    tracer: OtelTracer, listener: Listener, use: Callable[[str], Any]
) -> None:
    async def ask() -> None:
        if asyncio.iscoroutinefunction(use):
            await use(listener.url)
        else:
            await run_in_thread(lambda: use(listener.url), name="agent")

    await ask()
    async with tracer.trace_context():
        with tracer.operation_context("tool"):
            await ask()
            expected = tracer.get_traceparent()
    await ask()
    assert listener.heard == [None, expected, None]


async def test_a_traceparent_set_by_the_caller_is_kept(tracer: OtelTracer, listener: Listener) -> None:
    async with tracer.trace_context(), aiohttp.ClientSession() as session, httpx.AsyncClient() as client:
        async with session.get(listener.url, headers={"TraceParent": "theirs"}):
            pass
        await client.get(listener.url, headers={"traceparent": "theirs"})
    assert listener.heard == ["theirs", "theirs"]


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_openais_responses_api_carry_the_trace_context_too(
    tracer: OtelTracer, listener: Listener, stream: bool
) -> None:
    def ask() -> None:
        with (
            OpenAI(base_url=listener.url, api_key="any", max_retries=0) as client,
            pytest.raises(Exception, match="no"),
        ):
            client.responses.create(model="m", input="hi", stream=stream)

    async with tracer.trace_context() as trace:
        async with AsyncOpenAI(base_url=listener.url, api_key="any", max_retries=0) as client:
            with pytest.raises(Exception, match="no"):
                await client.responses.create(model="m", input="hi", stream=stream)
        await run_in_thread(ask, name="agent")
    assert len(listener.heard) == 2
    assert {(heard or "").split("-")[1] for heard in listener.heard} == {trace.spans[-1].trace_id}


# Spans recorded by a child.


CHILD = """
import os
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
parent = TraceContextTextMapPropagator().extract({"traceparent": os.environ["TRACEPARENT"]})
provider.get_tracer("child").start_span("in the child", context=parent).end()
"""


async def test_in_a_served_store_the_spans_of_a_child_process_are_below_the_span_that_started_it(
    tracer: OtelTracer,
) -> None:
    backing = InMemoryLightningStore()
    server = LightningStoreServer(backing, port=0)
    await server.start()
    rollout = await backing.start_rollout(0)
    ids: Any = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    env = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": str(server.otlp_traces_endpoint()),
        "OTEL_RESOURCE_ATTRIBUTES": ",".join(f"agentlightning.{name}={value}" for name, value in ids.items()),
    }

    def start_child() -> None:
        subprocess.run([sys.executable, "-c", CHILD], check=True, env=env)

    async with tracer.trace_context(**ids, store=backing):
        with tracer.operation_context("tool"):
            await run_in_thread(start_child, name="agent")
    spans = {span.name: span for span in await backing.query_spans(rollout.rollout_id)}
    assert spans["in the child"].trace_id == spans["tool"].trace_id
    assert spans["in the child"].parent_id == spans["tool"].span_id
    await server.stop()
    await backing.close()
