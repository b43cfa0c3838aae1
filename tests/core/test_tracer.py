from __future__ import annotations

import asyncio
import contextlib
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider

from agentlightning import semconv
from agentlightning.emitter import emit_message, emit_reward
from agentlightning.errors import ConfigError, PluginError, StoreError
from agentlightning.plugins import get_manager
from agentlightning.reward import find_final_reward
from agentlightning.store.span_writer import SpanWriter
from agentlightning.thread import run_in_thread
from agentlightning.tracer import DummyTracer, OtelTracer, Tracer, get_active_tracer
from agentlightning.types import AttemptedRollout, Span, TraceStatus
from agentlightning_plugins import otel_tracer
from agentlightning_plugins.memory_store import InMemoryLightningStore

PIPELINE = otel_tracer._pipeline


class SlowStore(InMemoryLightningStore):
    """Takes its time for the first write of spans, or fails for good."""

    def __init__(self, stall_s: float = 0.0, failing: bool = False) -> None:
        super().__init__()
        self.stall_s = stall_s
        self.failing = failing

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        stall_s, self.stall_s = self.stall_s, 0.0
        await asyncio.sleep(stall_s)
        if self.failing:
            raise StoreError("down")
        return await super().add_many_spans(spans)


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    store = InMemoryLightningStore()
    yield store
    await store.close()


@pytest.fixture(params=["otel", "dummy"])
def tracer(request: pytest.FixtureRequest, store: InMemoryLightningStore) -> Iterator[Tracer]:
    tracer = OtelTracer() if request.param == "otel" else DummyTracer()
    with ready(tracer, store):
        yield tracer


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


# What every tracer does.


async def test_leaving_the_trace_context_finds_every_span_stored(tracer: Tracer, store: InMemoryLightningStore) -> None:
    rollout = await store.start_rollout(0)
    async with tracer.trace_context(**ids_of(rollout)) as trace:
        for i in range(50):
            tracer.create_span(f"step {i}", {"i": i})
    spans = await store.query_spans(rollout.rollout_id)
    assert [span.name for span in spans] == [f"step {i}" for i in range(50)] + [semconv.SPAN_ROLLOUT]
    assert [span.sequence_id for span in spans] == list(range(1, 52))
    assert [span.span_id for span in trace.spans] == [span.span_id for span in spans]
    assert trace.dropped == 0


async def test_spans_form_one_tree_under_the_root(tracer: Tracer, store: InMemoryLightningStore) -> None:
    rollout = await store.start_rollout(0)
    async with tracer.trace_context("agent", **ids_of(rollout)):
        with tracer.operation_context("outer", {"depth": 1}) as outer:
            outer.set_attributes({"more": "said later"})
            with tracer.operation_context("inner"):
                tracer.create_span("leaf")
        tracer.create_span("second leaf")
    spans = await stored(store, rollout)
    assert len({span.trace_id for span in spans.values()}) == 1
    parents = {name: span.parent_id for name, span in spans.items()}
    assert parents == {
        "leaf": spans["inner"].span_id,
        "inner": spans["outer"].span_id,
        "outer": spans["agent"].span_id,
        "second leaf": spans["agent"].span_id,
        "agent": None,
    }
    assert spans["outer"].attributes == {"depth": 1, "more": "said later"}


async def test_each_attempt_has_a_trace_of_its_own(tracer: Tracer, store: InMemoryLightningStore) -> None:
    roots = []
    for i in range(2):
        rollout = await store.start_rollout(i)
        async with tracer.trace_context(**ids_of(rollout)):
            pass
        roots += list(await store.query_spans(rollout.rollout_id))
    assert roots[0].trace_id != roots[1].trace_id


async def test_what_an_agent_raises_is_on_its_spans_and_goes_on(tracer: Tracer, store: InMemoryLightningStore) -> None:
    rollout = await store.start_rollout(0)

    async def act() -> None:
        async with tracer.trace_context(**ids_of(rollout)):
            with tracer.operation_context("tool"):
                _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        await act()
    for span in (await stored(store, rollout)).values():
        assert span.status.status_code == "ERROR"
        assert span.status.description == "ZeroDivisionError: division by zero"
        (event,) = span.events
        assert event.attributes["exception.type"] == "ZeroDivisionError"


async def test_a_span_says_when_and_how_it_was(tracer: Tracer, store: InMemoryLightningStore) -> None:
    rollout = await store.start_rollout(0)
    async with tracer.trace_context(**ids_of(rollout)):
        span = tracer.create_span("past", timestamp=1_700_000_000.5, status=TraceStatus(status_code="OK"))
    kept = (await stored(store, rollout))["past"]
    assert kept.start_time == kept.end_time == span.start_time == 1_700_000_000.5
    assert kept.status.status_code == span.status.status_code == "OK"
    assert kept.span_id == span.span_id
    assert kept.rollout_id == span.rollout_id == rollout.rollout_id


async def test_the_last_trace_is_the_one_of_the_caller(tracer: Tracer, store: InMemoryLightningStore) -> None:
    assert tracer.get_last_trace() == []
    async with tracer.trace_context("mine"):
        tracer.create_span("inside")
        assert [span.name for span in tracer.get_last_trace()] == ["inside"]
    await asyncio.create_task(_trace_something(tracer))
    assert [span.name for span in tracer.get_last_trace()] == ["inside", "mine"]


async def _trace_something(tracer: Tracer) -> None:
    async with tracer.trace_context("other"):
        pass


async def test_without_ids_spans_stay_in_the_trace(tracer: Tracer, store: InMemoryLightningStore) -> None:
    async with tracer.trace_context() as trace:
        emit_reward(1.0)
    assert find_final_reward(trace.spans) == 1.0
    assert (await store.statistics())["spans"] == 0


async def test_half_an_identity_is_refused(tracer: Tracer) -> None:
    with pytest.raises(ConfigError, match="together"):
        async with tracer.trace_context(rollout_id="ro-1"):
            pass


async def test_the_active_tracer_is_known_inside_only(tracer: Tracer) -> None:
    assert get_active_tracer() is None
    async with tracer.trace_context():
        assert get_active_tracer() is tracer
        assert await run_in_thread(get_active_tracer, name="agent") is tracer
    assert get_active_tracer() is None


async def test_a_trace_may_name_a_store_of_its_own(tracer: Tracer, store: InMemoryLightningStore) -> None:
    other = InMemoryLightningStore()
    rollout = await other.start_rollout(0)
    async with tracer.trace_context(**ids_of(rollout), store=other):
        tracer.create_span("there")
    assert set(await stored(other, rollout)) == {"there", semconv.SPAN_ROLLOUT}
    await other.close()


async def test_a_worker_id_can_be_used_again_after_teardown_but_not_twice(
    tracer: Tracer, store: InMemoryLightningStore
) -> None:
    with pytest.raises(ConfigError, match="teardown_worker"):
        tracer.init_worker("worker", store)
    tracer.teardown_worker("worker")
    tracer.teardown_worker("worker")
    tracer.init_worker("worker", store)


async def test_spans_that_could_not_be_delivered_are_counted_on_the_trace(tracer: Tracer) -> None:
    store = SlowStore(failing=True)
    rollout = await store.start_rollout(0)
    tracer.delivery_timeout_s = 0.1
    async with tracer.trace_context(**ids_of(rollout), store=store) as trace:
        tracer.create_span("lost")
    assert trace.dropped == 2, "the span and the root"
    await store.close()


async def test_an_agent_of_1000_spans_is_not_slowed_by_a_store_that_stalls() -> None:
    store = SlowStore(stall_s=5.0)
    tracer = OtelTracer()
    with ready(tracer, store):
        rollout = await store.start_rollout(0)
        async with tracer.trace_context(**ids_of(rollout)) as trace:
            began = time.perf_counter()
            for i in range(1000):
                tracer.create_span("step", {"i": i, "text": "x" * 200})
            assert time.perf_counter() - began < 2.5
        assert trace.dropped == 0
    assert (await store.statistics())["spans"] == 1001
    await store.close()


async def act(store: InMemoryLightningStore, number: int) -> None:
    """An agent of a few steps that gives the others a turn after each; all it says names its own rollout."""
    for step in range(5):
        emit_message(f"{number}.{step}")
        await asyncio.sleep(0.001)
    emit_reward(float(number))


def act_in_thread(store: InMemoryLightningStore, number: int) -> None:
    for step in range(5):
        emit_message(f"{number}.{step}")
        time.sleep(0.001)
    emit_reward(float(number))


@pytest.mark.parametrize("kind", ["tasks", "threads", "both"])
async def test_64_rollouts_traced_at_once_never_mix(tracer: Tracer, store: InMemoryLightningStore, kind: str) -> None:
    rollouts = [await store.start_rollout(i) for i in range(64)]

    async def run(number: int, rollout: AttemptedRollout) -> list[Span]:
        async with tracer.trace_context(**ids_of(rollout)) as trace:
            if kind == "tasks" or (kind == "both" and number % 2):
                await act(store, number)
            else:
                await run_in_thread(lambda: act_in_thread(store, number), name=f"agent {number}")
        return trace.spans

    traces = await asyncio.gather(*(run(i, rollout) for i, rollout in enumerate(rollouts)))
    for number, rollout in enumerate(rollouts):
        spans = await store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id)
        said = [span.attributes[semconv.MESSAGE_BODY] for span in spans if span.name == semconv.SPAN_MESSAGE]
        assert said == [f"{number}.{step}" for step in range(5)]
        assert find_final_reward(spans) == number
        assert len({span.trace_id for span in spans}) == 1
        assert [span.span_id for span in spans] == [span.span_id for span in traces[number]]
    assert (await store.statistics())["spans"] == 64 * 7


def test_a_tracer_travels_to_another_process_before_it_is_used() -> None:
    assert pickle.loads(pickle.dumps(OtelTracer(join_global_provider=False))).join_global_provider is False
    assert isinstance(pickle.loads(pickle.dumps(DummyTracer())), DummyTracer)


def test_a_missing_langchain_handler_is_a_clear_error() -> None:
    with pytest.raises(PluginError, match="LangChain"):
        DummyTracer().get_langchain_handler()


def test_importing_the_facade_does_not_import_opentelemetry() -> None:
    code = "import sys, agentlightning.tracer as t; t.DummyTracer, t.Tracer; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# What is OpenTelemetry's.


async def test_spans_of_other_threads_find_their_attempt_by_trace_alone(
    otel_only: OtelTracer, store: InMemoryLightningStore
) -> None:
    """A framework's worker thread knows no context variable of ours, but is handed the parent."""
    rollouts = [await store.start_rollout(i) for i in range(8)]
    library = otel.get_tracer("framework", tracer_provider=PIPELINE.provider)
    everybody_is_in = asyncio.Barrier(8)
    with ThreadPoolExecutor(4) as pool:

        async def run(number: int, rollout: AttemptedRollout) -> None:
            async with otel_only.trace_context(**ids_of(rollout)):
                await everybody_is_in.wait()
                parent = otel_context.get_current()
                job = pool.submit(lambda: library.start_span(f"work {number}", context=parent).end())
                await asyncio.wrap_future(job)

        await asyncio.gather(*(run(i, rollout) for i, rollout in enumerate(rollouts)))
    for number, rollout in enumerate(rollouts):
        assert set(await stored(store, rollout)) == {f"work {number}", semconv.SPAN_ROLLOUT}


async def test_a_library_with_traces_of_its_own_is_attributed_by_context(
    otel_only: OtelTracer, store: InMemoryLightningStore
) -> None:
    """It opens a root span and ends it in a thread of its own, where a child is made as well."""
    library = otel.get_tracer("framework", tracer_provider=PIPELINE.provider)
    rollouts = [await store.start_rollout(i) for i in range(8)]
    everybody_is_in = asyncio.Barrier(8)

    async def run(number: int, rollout: AttemptedRollout) -> None:
        async with otel_only.trace_context(**ids_of(rollout)):
            span = library.start_span(f"own {number}", context=otel_context.Context())
            await everybody_is_in.wait()

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


async def test_the_trace_wins_over_the_context_of_the_thread(
    otel_only: OtelTracer, store: InMemoryLightningStore
) -> None:
    """A worker that one attempt started serves another one later: the parent says whose work it is."""
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


async def test_a_span_that_ends_after_its_attempt_is_stored_with_it(
    otel_only: OtelTracer, store: InMemoryLightningStore
) -> None:
    rollout = await store.start_rollout(0)
    async with otel_only.trace_context(**ids_of(rollout)) as trace:
        late = otel_only.start_span("late")
    late.end()
    writer = SpanWriter.shared(store)
    assert await writer.flush(timeout_s=5)
    writer.release()
    assert "late" in await stored(store, rollout)
    assert [span.name for span in trace.spans] == [semconv.SPAN_ROLLOUT]


async def test_spans_outside_attempts_go_nowhere(otel_only: OtelTracer, store: InMemoryLightningStore) -> None:
    PIPELINE.tracer.start_span("nobody's").end()
    assert (await store.statistics())["spans"] == 0


async def test_a_span_keeps_every_attribute_whatever_the_environment_says(
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
    """Each case needs a process of its own: OpenTelemetry's global provider is set once."""
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


def test_ours_becomes_the_global_provider_when_there_is_none() -> None:
    run_with_provider(
        "tracer = OtelTracer()", "    assert names == ['ours', \"user's\", 'agentlightning.rollout'], names"
    )


def test_a_global_provider_that_is_there_keeps_its_exporters_and_gives_us_its_spans() -> None:
    run_with_provider(
        "provider = TracerProvider(); provider.add_span_processor(SimpleSpanProcessor(exporter))\n"
        "trace.set_tracer_provider(provider); tracer = OtelTracer()",
        "    assert names == ['ours', \"user's\", 'agentlightning.rollout'], names\n"
        '    assert [span.name for span in exporter.get_finished_spans()] == ["user\'s"] * 2\n'
        "    assert trace.get_tracer_provider() is provider",
    )


def test_a_tracer_can_leave_the_global_provider_alone() -> None:
    run_with_provider(
        "tracer = OtelTracer(join_global_provider=False)",
        "    assert names == ['ours', 'agentlightning.rollout'], names\n"
        "    trace.set_tracer_provider(provider := TracerProvider())\n"
        "    assert trace.get_tracer_provider() is provider",
    )


class Instrumenting:
    """A plugin that counts."""

    def __init__(self, error: Exception | None = None) -> None:
        self.active = 0
        self.providers: list[Any] = []
        self._error = error

        from agentlightning.hookspecs import hookimpl

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


def test_a_plugin_that_fails_to_instrument_does_not_keep_others_from_it(
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


async def test_work_given_to_a_thread_pool_belongs_to_whoever_gave_it(
    otel_only: OtelTracer, store: InMemoryLightningStore
) -> None:
    """One pool serves all attempts, and somebody outside them."""
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


def test_thread_pools_are_as_they_were_after_teardown() -> None:
    before = ThreadPoolExecutor.submit
    tracer = OtelTracer()
    tracer.init()
    assert ThreadPoolExecutor.submit is not before
    tracer.teardown()
    assert ThreadPoolExecutor.submit is before
