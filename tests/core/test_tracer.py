from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider

from agentlightning import semconv
from agentlightning.emitter import emit_message
from agentlightning.errors import PluginError, PluginImportError
from agentlightning.plugin.registry import get_manager
from agentlightning.testing.tracer import TracerConformance
from agentlightning.tracer import AgentOpsTracer, DummyTracer, OtelTracer, Tracer, get_active_tracer
from agentlightning.tracer.tracer import Trace
from agentlightning.types import AttemptedRollout, Span
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from agentlightning_plugins.tracers.shared.pipeline import pipeline
from tests.core.tracer_semantics import TracerSemantics
from tests.source import run_python

PIPELINE = pipeline


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    store = InMemoryLightningStore()
    yield store
    await store.close()


@pytest.fixture
def otel_only(store: InMemoryLightningStore) -> Iterator[OtelTracer]:
    tracer = OtelTracer()
    with ready(tracer, store):
        yield tracer


@contextlib.contextmanager
def ready(tracer: Tracer, store: InMemoryLightningStore) -> Iterator[None]:
    tracer.init()
    tracer.init_worker("worker", store)
    try:
        yield
    finally:
        tracer.teardown_worker("worker")
        tracer.teardown()


def ids_of(rollout: AttemptedRollout) -> dict[str, Any]:
    return {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}


async def stored(store: InMemoryLightningStore, rollout: AttemptedRollout) -> dict[str, Span]:
    return {span.name: span for span in await store.query_spans(rollout.rollout_id)}


class TestOtelTracer(TracerSemantics, TracerConformance):
    @pytest.fixture
    def tracer(self) -> Tracer:
        return OtelTracer()


class TestDummyTracer(TracerSemantics, TracerConformance):
    @pytest.fixture
    def tracer(self) -> Tracer:
        return DummyTracer()


# Tests in addition to the conformance tests of all tracers.


def test_a_tracer_without_handlers_of_frameworks_says_so() -> None:
    with pytest.raises(PluginError, match="DummyTracer takes no handlers of frameworks; use the tracer 'otel'"):
        DummyTracer().get_langchain_handler()


def test_importing_the_facade_does_not_import_opentelemetry() -> None:
    code = "import sys, agentlightning.tracer as t; t.DummyTracer, t.Tracer; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


FORKING_PROGRAM = """
import os, signal, time
from agentlightning_plugins.tracers.shared.pipeline import pipeline
from concurrent.futures import ThreadPoolExecutor

child = os.fork()
if child == 0:
    os._exit(0)
deadline = time.monotonic() + 20
while os.waitpid(child, os.WNOHANG) == (0, 0):
    if time.monotonic() > deadline:
        os.kill(child, signal.SIGKILL)
        raise TimeoutError("the child does not return from os.fork()")
    time.sleep(0.02)
"""


def test_a_traced_process_can_fork_when_thread_pools_are_used_later() -> None:
    run_python("-c", FORKING_PROGRAM)


# The OpenTelemetry tracer.


async def test_spans_of_other_threads_are_assigned_to_their_attempt_by_the_trace_id(
    otel_only: OtelTracer, store: InMemoryLightningStore
) -> None:
    """A framework's worker thread has none of our context variables, but gets the parent span."""
    rollouts = [await store.start_rollout(i) for i in range(8)]
    library = otel.get_tracer("framework", tracer_provider=PIPELINE.provider)
    all_traces_are_open = asyncio.Barrier(8)
    with ThreadPoolExecutor(4) as pool:

        async def run(number: int, rollout: AttemptedRollout) -> None:
            async with otel_only.trace_context(**ids_of(rollout)):
                await all_traces_are_open.wait()
                parent = otel_context.get_current()
                job = pool.submit(lambda: library.start_span(f"work {number}", context=parent).end())
                await asyncio.wrap_future(job)

        await asyncio.gather(*(run(i, rollout) for i, rollout in enumerate(rollouts)))
    for number, rollout in enumerate(rollouts):
        assert set(await stored(store, rollout)) == {f"work {number}", semconv.SPAN_ROLLOUT}


async def test_spans_of_a_library_with_separate_traces_are_assigned_by_the_context(
    otel_only: OtelTracer, store: InMemoryLightningStore
) -> None:
    """The library opens a root span and ends it in another thread, where it also creates a child span."""
    library = otel.get_tracer("framework", tracer_provider=PIPELINE.provider)
    rollouts = [await store.start_rollout(i) for i in range(8)]
    all_traces_are_open = asyncio.Barrier(8)

    async def run(number: int, rollout: AttemptedRollout) -> None:
        async with otel_only.trace_context(**ids_of(rollout)):
            span = library.start_span(f"own {number}", context=otel_context.Context())
            await all_traces_are_open.wait()

            def end_elsewhere() -> None:
                child = library.start_span(f"child {number}", context=otel.set_span_in_context(span))
                child.end()
                span.end()

            thread = threading.Thread(target=end_elsewhere)
            thread.start()
            await asyncio.to_thread(thread.join)

    await asyncio.gather(*(run(i, rollout) for i, rollout in enumerate(rollouts)))
    for number, rollout in enumerate(rollouts):
        assert set(await stored(store, rollout)) == {f"own {number}", f"child {number}", semconv.SPAN_ROLLOUT}


async def test_the_trace_id_takes_precedence_over_the_context_of_the_thread(
    otel_only: OtelTracer, store: InMemoryLightningStore
) -> None:
    """A worker task started by one attempt later serves another: the parent span decides to which a span belongs."""
    library = otel.get_tracer("framework", tracer_provider=PIPELINE.provider)
    first, second = await store.start_rollout(0), await store.start_rollout(1)
    jobs: asyncio.Queue[otel_context.Context] = asyncio.Queue()

    async def serve() -> None:
        library.start_span("served", context=await jobs.get()).end()

    async with otel_only.trace_context(**ids_of(first)):
        worker = asyncio.create_task(serve())
        await asyncio.sleep(0)

    async def ask() -> None:
        async with otel_only.trace_context(**ids_of(second)):
            jobs.put_nowait(otel_context.get_current())
            await worker

    await asyncio.create_task(ask())
    assert "served" in await stored(store, second)
    assert "served" not in await stored(store, first)


async def test_the_spans_of_an_attempt_that_has_ended_are_not_kept_in_memory(
    otel_only: OtelTracer, store: InMemoryLightningStore
) -> None:
    async def run() -> weakref.ref[Trace]:
        async with otel_only.trace_context(**ids_of(await store.start_rollout(0))) as trace:
            emit_message("hello")
            otel.get_tracer("framework", tracer_provider=PIPELINE.provider).start_span("call").end()
        assert len(trace.spans) == 3
        return weakref.ref(trace)

    ended = await asyncio.create_task(run())
    await asyncio.create_task(run())  # because the tracer keeps the last trace
    gc.collect()
    assert ended() is None


async def test_spans_outside_attempts_are_not_stored(otel_only: OtelTracer, store: InMemoryLightningStore) -> None:
    PIPELINE.tracer.start_span("outside an attempt").end()
    assert (await store.statistics())["spans"] == 0


async def test_a_span_keeps_every_attribute_despite_limits_in_environment_variables(
    store: InMemoryLightningStore, tmp_path: Any
) -> None:
    code = """
import asyncio
from agentlightning.tracer import OtelTracer

async def main():
    tracer = OtelTracer()
    async with tracer.trace_context() as trace:
        tracer.create_span("big", {f"a{i}": "x" * 5000 for i in range(1000)})
    big, root = trace.spans
    assert len(big.attributes) == 1000 and len(big.attributes["a0"]) == 5000

asyncio.run(main())
"""
    environment = {
        "PATH": "/usr/bin",
        "OTEL_SDK_DISABLED": "true",
        "OTEL_TRACES_SAMPLER": "always_off",
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "3",
        "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "7",
    }
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], check=True, env=environment)


def run_with_provider(setup: str, check: str) -> None:
    """Runs a check in a new process, because OpenTelemetry's global provider can be set only once."""
    code = f"""
import asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from agentlightning.tracer import OtelTracer

exporter = InMemorySpanExporter()
{setup}

async def main():
    for _ in range(2):
        async with tracer.trace_context() as attempt:
            with trace.get_tracer("users").start_as_current_span("user's"):
                tracer.create_span("ours")
    names = [span.name for span in attempt.spans]
{check}

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_our_provider_becomes_the_global_provider_if_there_is_none() -> None:
    run_with_provider(
        "tracer = OtelTracer()", "    assert names == ['ours', \"user's\", 'agentlightning.rollout'], names"
    )


def test_an_existing_global_provider_keeps_its_exporters_and_passes_its_spans_to_us() -> None:
    run_with_provider(
        "provider = TracerProvider(); provider.add_span_processor(SimpleSpanProcessor(exporter))\n"
        "trace.set_tracer_provider(provider); tracer = OtelTracer()",
        "    assert names == ['ours', \"user's\", 'agentlightning.rollout'], names\n"
        '    assert [span.name for span in exporter.get_finished_spans()] == ["user\'s"] * 2\n'
        "    assert trace.get_tracer_provider() is provider",
    )


def test_a_tracer_can_be_created_without_joining_the_global_provider() -> None:
    run_with_provider(
        "tracer = OtelTracer(join_global_provider=False)",
        "    assert names == ['ours', 'agentlightning.rollout'], names\n"
        "    trace.set_tracer_provider(provider := TracerProvider())\n"
        "    assert trace.get_tracer_provider() is provider",
    )


class Instrumenting:
    """A plugin that counts how often it is active."""

    def __init__(self, error: Exception | None = None) -> None:
        self.active = 0
        self.providers: list[Any] = []
        self._error = error

        from agentlightning.plugin.hookspecs import hookimpl

        @hookimpl
        def instrument(tracer_provider: Any) -> Any:
            if self._error is not None:
                raise self._error
            self.active += 1
            self.providers.append(tracer_provider)
            return self.undo

        self.instrument = instrument

    def undo(self) -> None:
        self.active -= 1


@pytest.fixture
def plugins() -> Iterator[list[Any]]:
    registered: list[Any] = []
    yield registered
    for plugin in registered:
        get_manager()._pluggy.unregister(plugin)
        get_manager().plugins = {n: p for n, p in get_manager().plugins.items() if not n.startswith("test-")}


def register(plugins: list[Any], plugin: Any) -> Any:
    get_manager().register(plugin, f"test-{len(plugins)}")
    plugins.append(plugin)
    return plugin


def test_libraries_are_instrumented_once_while_any_tracer_is_in_use(plugins: list[Any]) -> None:
    plugin = register(plugins, Instrumenting())
    first, second = OtelTracer(), OtelTracer()
    first.init()
    second.init()
    assert plugin.active == 1
    first.teardown()
    assert plugin.active == 1
    second.teardown()
    assert plugin.active == 0
    second.teardown()
    assert plugin.providers == [PIPELINE.provider]
    assert isinstance(PIPELINE.provider, TracerProvider)


def test_a_plugin_that_fails_to_instrument_does_not_stop_other_plugins(
    plugins: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    register(plugins, Instrumenting(RuntimeError("no")))
    good = register(plugins, Instrumenting())
    register(plugins, Instrumenting(ValueError("neither")))
    tracer = OtelTracer()
    tracer.init()
    assert good.active == 1
    tracer.teardown()
    assert good.active == 0
    assert "test-0" in caplog.text
    assert "test-2" in caplog.text


async def test_work_in_a_thread_pool_belongs_to_the_attempt_that_submitted_it(
    otel_only: OtelTracer, store: InMemoryLightningStore
) -> None:
    """One pool serves all attempts and a caller outside of attempts."""
    rollouts = [await store.start_rollout(i) for i in range(8)]
    with ThreadPoolExecutor(2) as pool:

        async def run(number: int, rollout: AttemptedRollout) -> None:
            async with otel_only.trace_context(**ids_of(rollout)):
                for _ in range(4):
                    await asyncio.wrap_future(pool.submit(emit_message, f"{number}"))

        await asyncio.gather(*(run(i, rollout) for i, rollout in enumerate(rollouts)))
        assert pool.submit(get_active_tracer).result() is None
    for number, rollout in enumerate(rollouts):
        *messages, root = await store.query_spans(rollout.rollout_id)
        assert [message.attributes[semconv.MESSAGE_BODY] for message in messages] == [str(number)] * 4
        assert {message.parent_id for message in messages} == {root.span_id}


def test_thread_pools_are_restored_by_teardown() -> None:
    before = ThreadPoolExecutor.submit
    tracer = OtelTracer()
    tracer.init()
    assert ThreadPoolExecutor.submit is not before
    tracer.teardown()
    assert ThreadPoolExecutor.submit is before


def test_the_agentops_tracer_without_its_package_is_refused_with_the_install_command() -> None:
    with pytest.raises(PluginImportError, match=r"needs agentops\. Install with: (uv )?pip install .*\[agentops\]"):
        AgentOpsTracer()
