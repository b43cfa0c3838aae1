from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib.metadata
import inspect
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel, ConfigDict, create_model
from pydantic_core import core_schema

import agentlightning as agl
from agentlightning import semconv
from agentlightning.run.thread import run_in_thread
from agentlightning.testing.agent import AGENT_NAME, MODEL, AgentConformance, Lab, add
from agentlightning.tracer import OtelTracer
from agentlightning.types import Span
from agentlightning_integrations.openai import agent as openai_integration
from agentlightning_plugins.shared.instrumentation import _functions
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI, decode
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.integrations.framework_agent import NOWHERE, make_openai_agent
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.environment("main", "newest", "oldest")

ADD: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
ADD_IN_RESPONSES: Any = {"type": "function", **ADD["function"]}
ASK: list[Any] = [{"role": "user", "content": "1+2?"}]


@pytest.fixture
async def server() -> AsyncIterator[ScriptedOpenAI]:
    async with ScriptedOpenAI(lambda request: Answer(f"answer to {request.body['messages'][-1]['content']}")) as server:
        yield server


@pytest.fixture
def tracer() -> Iterator[OtelTracer]:
    tracer = OtelTracer()
    tracer.init()
    yield tracer
    tracer.teardown()


@pytest.fixture
async def client(server: ScriptedOpenAI) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=server.endpoint, api_key="any", max_retries=0) as client:
        yield client


def calls_in(spans: list[Span]) -> list[Span]:
    return [span for span in spans if semconv.is_llm_call(span)]


async def test_a_call_is_recorded_as_a_span_with_messages_and_usage(tracer: OtelTracer) -> None:
    script = [Answer(tool_calls=[("add", {"a": 1})])]
    async with (
        ScriptedOpenAI(script) as server,
        AsyncOpenAI(base_url=server.endpoint, api_key="any") as client,
        tracer.trace_context() as trace,
    ):
        completion = await client.chat.completions.create(model="m", messages=ASK, tools=[ADD])
    (span,) = calls_in(trace.spans)
    assert semconv.read_response_id(span) == completion.id
    assert semconv.read_model(span) == "m"
    assert semconv.read_input_messages(span) == ASK
    (answer,) = semconv.read_output_messages(span)
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert semconv.read_finish_reasons(span) == ["tool_calls"]
    assert semconv.read_tools(span) == [ADD]
    assert span.parent_id == trace.spans[-1].span_id


async def test_a_usage_without_details_is_recorded_without_an_error_in_the_instrumentation(
    tracer: OtelTracer, client: AsyncOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", logger="opentelemetry"):
        async with tracer.trace_context() as trace:
            completion = await client.chat.completions.create(model="m", messages=ASK)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is None
    (span,) = calls_in(trace.spans)
    assert span.attributes["gen_ai.usage.output_tokens"] == completion.usage.completion_tokens
    assert "failed to trace" not in caplog.text


async def test_a_streamed_call_is_recorded_as_a_span(tracer: OtelTracer, client: AsyncOpenAI) -> None:
    async with tracer.trace_context() as trace:
        stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    (span,) = calls_in(trace.spans)
    assert text == "answer to 1+2?"
    assert semconv.read_output_messages(span) == [{"role": "assistant", "content": text}]
    assert semconv.read_response_id(span) is not None


async def test_a_call_with_a_parsed_answer_is_recorded_without_a_warning(tracer: OtelTracer) -> None:
    async with (
        ScriptedOpenAI([Answer('{"value": 3}')]) as server,
        AsyncOpenAI(base_url=server.endpoint, api_key="any") as client,
        tracer.trace_context() as trace,
    ):
        with warnings.catch_warnings(record=True) as warned:
            completion = await client.chat.completions.parse(model="m", messages=ASK, response_format=Sum)
    assert completion.choices[0].message.parsed == Sum(value=3)
    assert warned == []
    (span,) = calls_in(trace.spans)
    assert semconv.read_output_messages(span) == [{"role": "assistant", "content": '{"value": 3}'}]


async def test_a_call_of_the_sync_client_in_a_thread_is_recorded_as_a_span(
    tracer: OtelTracer, server: ScriptedOpenAI
) -> None:
    def ask() -> None:
        with OpenAI(base_url=server.endpoint, api_key="any") as client:
            client.chat.completions.create(model="m", messages=ASK)

    async with tracer.trace_context() as trace:
        await run_in_thread(ask, name="agent")
    (span,) = calls_in(trace.spans)
    assert semconv.read_input_messages(span) == ASK
    assert span.parent_id == trace.spans[-1].span_id


async def test_tracing_a_call_of_the_sync_client_starts_no_event_loop(
    tracer: OtelTracer, server: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    new_event_loop = asyncio.new_event_loop

    def start() -> asyncio.AbstractEventLoop:
        started.append("loop")
        return new_event_loop()

    monkeypatch.setattr(asyncio.events, "new_event_loop", start)

    def ask() -> None:
        with OpenAI(base_url=server.endpoint, api_key="any") as client:
            client.chat.completions.create(model="m", messages=ASK, tools=[ADD])

    async with tracer.trace_context() as trace:
        await run_in_thread(ask, name="agent")
    (span,) = calls_in(trace.spans)
    assert (semconv.read_input_messages(span), semconv.read_tools(span), started) == (ASK, [ADD], [])


async def test_a_prompt_with_an_image_is_recorded(tracer: OtelTracer, client: AsyncOpenAI) -> None:
    content: Any = [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    async with tracer.trace_context() as trace:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
    (span,) = calls_in(trace.spans)
    assert semconv.find_image_urls(semconv.read_input_messages(span)) == ["data:image/png;base64,AAAA"]


async def test_a_call_that_fails_is_recorded_and_raises_its_error(tracer: OtelTracer) -> None:
    async with (
        ScriptedOpenAI([Answer(status=500, error="broken")]) as server,
        AsyncOpenAI(base_url=server.endpoint, api_key="any", max_retries=0) as client,
        tracer.trace_context() as trace,
    ):
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=ASK)
    (span,) = calls_in(trace.spans)
    assert span.status.status_code == "ERROR"
    assert semconv.read_response_id(span) is None


def parent_of(traceparent: str) -> tuple[str, str]:
    _, trace_id, span_id, _ = traceparent.split("-")
    return trace_id, span_id


async def test_a_request_has_a_traceparent_header_with_its_span(
    tracer: OtelTracer, client: AsyncOpenAI, server: ScriptedOpenAI
) -> None:
    async with tracer.trace_context() as trace:
        await client.chat.completions.create(model="m", messages=ASK)
        await client.chat.completions.create(model="m", messages=ASK, extra_headers=None)
    headers = [request.headers["traceparent"] for request in server.requests]
    assert [parent_of(header) for header in headers] == [
        (span.trace_id, span.span_id) for span in calls_in(trace.spans)
    ]


async def test_headers_shared_by_calls_are_not_changed(
    tracer: OtelTracer, client: AsyncOpenAI, server: ScriptedOpenAI
) -> None:
    shared = {"x-team": "blue"}

    async def run(number: int) -> list[Span]:
        async with tracer.trace_context() as trace:
            for _ in range(3):
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": str(number)}], extra_headers=shared
                )
        return calls_in(trace.spans)

    spans = [span for spans in await asyncio.gather(*(run(i) for i in range(8))) for span in spans]
    by_id = {span.span_id: semconv.read_input_messages(span)[0]["content"] for span in spans}
    assert len(by_id) == 24
    for request in server.requests:
        assert request.headers["x-team"] == "blue"
        assert by_id[parent_of(request.headers["traceparent"])[1]] == request.body["messages"][0]["content"]
    assert shared == {"x-team": "blue"}


async def test_64_concurrent_agents_with_the_real_client_never_mix(tracer: OtelTracer, server: ScriptedOpenAI) -> None:
    """Half of the agents are async, half are sync in threads; some sync agents call the model from a thread pool."""
    store = InMemoryLightningStore()
    client = AsyncOpenAI(base_url=server.endpoint, api_key="any", max_retries=0)
    sync_client = OpenAI(base_url=server.endpoint, api_key="any", max_retries=0)

    def ask(number: int) -> None:
        for turn in range(2):
            messages: list[Any] = [{"role": "user", "content": f"{number}.{turn}"}]
            sync_client.chat.completions.create(model="m", messages=messages)

    def ask_from_pool(number: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(ask, number).result()

    async def run(number: int) -> str:
        rollout = await store.start_rollout(number)
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        async with tracer.trace_context(**ids, store=store):
            if number % 2:
                for turn in range(2):
                    messages: list[Any] = [{"role": "user", "content": f"{number}.{turn}"}]
                    await client.chat.completions.create(model="m", messages=messages)
            else:
                await run_in_thread(lambda: (ask_from_pool if number % 4 else ask)(number), name=f"agent {number}")
        return rollout.rollout_id

    rollout_ids = await asyncio.gather(*(run(i) for i in range(64)))
    for number, rollout_id in enumerate(rollout_ids):
        calls = calls_in(list(await store.query_spans(rollout_id)))
        assert [semconv.read_input_messages(call)[0]["content"] for call in calls] == [f"{number}.0", f"{number}.1"]
        assert [semconv.read_output_messages(call)[0]["content"] for call in calls] == [
            f"answer to {number}.{turn}" for turn in range(2)
        ]
    await client.close()
    sync_client.close()
    await store.close()


class TestAFunction(AgentConformance):
    """An agent function that opens its own spans; its model calls are recorded automatically."""

    @pytest.fixture
    def agent(self) -> Any:
        calculate = make_openai_agent(add_traced)

        async def agent(task: str, llm: agl.LLM) -> Any:
            with agl.operation(name=AGENT_NAME, **{"agent.name": AGENT_NAME}):
                return await calculate(task, llm)

        return agent


def add_traced(a: int, b: int) -> int:
    tracer = agl.get_active_tracer()
    assert tracer is not None
    about = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "add",
        "gen_ai.tool.call.arguments": json.dumps({"a": a, "b": b}),
    }
    with tracer.operation_context("execute_tool add", about) as span:
        result = add(a, b)
        span.set_attributes({"gen_ai.tool.call.result": result})
    return result


class TestResponses:
    """Tests of the Responses API: sync and async, whole, streamed and parsed."""

    async def calls(self, tracer: OtelTracer, ask: Any) -> tuple[Any, list[Span]]:
        before = copy.deepcopy(ASK)
        async with (
            ScriptedOpenAI(lambda request: Answer('{"value": 5}')) as server,
            AsyncOpenAI(base_url=server.endpoint, api_key="any", max_retries=0) as client,
            tracer.trace_context() as trace,
        ):
            result = await ask(client)
        assert before == ASK, "the caller's input was changed"
        return result, calls_in(trace.spans)

    def check(self, response_id: str, spans: list[Span]) -> None:
        (span,) = spans
        assert semconv.read_response_id(span) == response_id
        assert semconv.read_input_messages(span)[-1] == ASK[0]
        assert semconv.read_output_messages(span) == [{"role": "assistant", "content": '{"value": 5}'}]
        assert span.attributes[semconv.GEN_AI_OUTPUT_TOKENS] > 0

    async def test_a_whole_response_is_recorded_as_a_span(self, tracer: OtelTracer) -> None:
        response, spans = await self.calls(
            tracer, lambda client: client.responses.create(model="m", input=ASK, tools=[ADD_IN_RESPONSES])
        )
        self.check(response.id, spans)
        assert semconv.read_tools(spans[0]) == [ADD]

    async def test_a_streamed_response_is_recorded_as_a_span(self, tracer: OtelTracer) -> None:
        async def ask(client: AsyncOpenAI) -> Any:
            stream = await client.responses.create(model="m", input=ASK, stream=True)
            return [event async for event in stream][-1]

        completed, spans = await self.calls(tracer, ask)
        self.check(completed.response.id, spans)

    async def test_a_parsed_response_is_recorded_as_a_span(self, tracer: OtelTracer) -> None:
        response, spans = await self.calls(
            tracer, lambda client: client.responses.parse(model="m", input=ASK, text_format=Sum)
        )
        assert response.output_parsed == Sum(value=5)
        self.check(response.id, spans)

    async def test_the_instrumentation_keeps_a_bounded_number_of_responses(
        self, tracer: OtelTracer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from opentelemetry.instrumentation.openai.v1 import responses_wrappers

        monkeypatch.setattr(openai_integration, "_MAX_RESPONSES", 2)

        async def ask(client: AsyncOpenAI) -> Any:
            for number in range(4):
                response = await client.responses.create(model="m", input=ASK)
                kept = responses_wrappers.responses.pop(response.id)
                responses_wrappers.responses[f"{number}"] = kept

        _, spans = await self.calls(tracer, ask)
        assert len(spans) == 4
        assert list(responses_wrappers.responses) == ["2", "3"]

    async def test_a_response_of_the_sync_client_is_recorded_as_a_span(self, tracer: OtelTracer) -> None:
        def ask(endpoint: Any) -> Any:
            with OpenAI(base_url=endpoint, api_key="any", max_retries=0) as client:
                return client.responses.create(model="m", input=ASK)

        response, spans = await self.calls(tracer, lambda client: asyncio.to_thread(ask, client.base_url))
        self.check(response.id, spans)


class Sum(BaseModel):
    value: int


class TestAClient:
    """Tests of a client as an agent, which makes one call for each task."""

    @pytest.mark.parametrize("cls", [OpenAI, AsyncOpenAI])
    @pytest.mark.parametrize(
        "task",
        [
            "1+2?",
            ASK,
            {"messages": ASK, "temperature": 0.125},
            {"input": "1+2?", "top_p": 0.5},
            {"question": "1+2?"},
            {"messages": ASK, "answer": "3"},
            {"input": "1+2?", "answer": "3"},
        ],
        ids=["text", "messages", "chat", "response", "question", "chat and answer", "response and answer"],
    )
    async def test_answers_a_task_with_the_rollouts_model(self, cls: Any, task: Any) -> None:
        client = cls(base_url=NOWHERE, api_key="any", max_retries=0)
        seen: list[Any] = []
        prompts = {"instructions": "Answer with a number."}
        reward = lambda task, output, rollout: seen.append(output.id) or 1.0  # noqa: E731 # as users write it
        async with Lab(client, [Answer("3")], prompts=prompts, reward=reward) as lab:
            (rollout,) = await lab.run(task)
            spans = await lab.spans(rollout)
            (body,) = [request.body for request in lab.server.requests]
        assert rollout.attempt.error is None
        assert body["model"] == MODEL
        assert "Answer with a number." in str(body)
        assert body["temperature"] == 0.625
        (triplet,) = agl.TraceToTriplet().adapt(spans)
        assert triplet.reward == 1.0
        assert decode(triplet.response["token_ids"]) == "3"
        assert len(seen) == 1

    @pytest.mark.parametrize("task", [{"sum": "1+2?"}, {"messages": ASK, "input": "1+2?"}], ids=["none", "several"])
    async def test_an_invalid_task_is_refused_with_its_fields(self, task: Any) -> None:
        async with Lab(AsyncOpenAI(base_url=NOWHERE, api_key="any")) as lab:
            (rollout,) = await lab.run(task)
        assert rollout.attempt.error is not None
        fields = ", ".join(map(repr, task))
        assert f"a mapping with the fields {fields}; exactly one of question, input" in rollout.attempt.error.message
        assert "task_to_input" in rollout.attempt.error.message


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("raw", ["with_streaming_response", "with_raw_response"])
async def test_an_answer_parsed_from_an_http_response_is_recorded_as_a_span(
    tracer: OtelTracer, raw: str, api: str, stream: bool
) -> None:
    from opentelemetry.instrumentation.openai.v1.responses_wrappers import responses

    responses.clear()  # answers are kept by id, and the scripted server repeats its ids
    given = {"input": "1+2?"} if api == "responses" else {"messages": ASK}
    arguments: Any = {"model": "m", "stream": stream, **given}

    def resource(client: Any) -> Any:
        return getattr(client.responses if api == "responses" else client.chat.completions, raw)

    def ask(endpoint: str) -> None:
        with OpenAI(base_url=endpoint, api_key="any") as client:
            made = resource(client).create(**arguments)
            with made if raw == "with_streaming_response" else contextlib.nullcontext(made) as response:
                list(response.parse())

    async with ScriptedOpenAI([Answer("3"), Answer("3")]) as server, tracer.trace_context() as trace:
        await asyncio.to_thread(ask, server.endpoint)
        async with AsyncOpenAI(base_url=server.endpoint, api_key="any") as client:
            made = resource(client).create(**arguments)
            async with made if raw == "with_streaming_response" else contextlib.nullcontext(await made) as response:
                parsed = response.parse()
                parsed = await parsed if inspect.isawaitable(parsed) else parsed
                if stream:
                    assert [event async for event in parsed]
    calls = calls_in(trace.spans)
    assert len({semconv.read_response_id(call) for call in calls}) == len(calls) == 2
    for call in calls:
        assert semconv.read_input_messages(call) == ASK
        assert semconv.read_output_messages(call) == [{"role": "assistant", "content": "3"}]


async def test_a_stream_that_is_closed_after_its_last_event_is_recorded_with_its_answer(tracer: OtelTracer) -> None:
    async with (
        ScriptedOpenAI([Answer("3")]) as server,
        tracer.trace_context() as trace,
        AsyncOpenAI(base_url=server.endpoint, api_key="any") as client,
    ):
        stream: Any = await client.responses.create(model="m", input="1+2?", stream=True)
        async for event in stream:
            if event.type == "response.completed":
                break
        await stream.aclose()
    (call,) = calls_in(trace.spans)
    assert semconv.read_output_messages(call) == [{"role": "assistant", "content": "3"}]


def test_clients_with_default_settings_share_a_tls_context() -> None:
    def context(**settings: Any) -> Any:
        with openai.OpenAI(api_key="any", **settings) as client:
            return client._client._transport._pool._ssl_context

    own = openai.DefaultHttpxClient(verify=False)
    undo = openai_integration.instrument(TracerProvider())
    try:
        assert context() is context(base_url="http://127.0.0.1:1/v1")
        assert context(http_client=own) is not context()
    finally:
        undo()
    assert context() is not context()


def test_undo_restores_every_method() -> None:
    before = dict(_functions("openai.resources"))
    undo = openai_integration.instrument(TracerProvider())
    wrapped = {place for place, value in _functions("openai.resources") if before.get(place) is not value}
    assert (openai.resources.chat.completions.Completions, "create") in wrapped
    undo()
    after = dict(_functions("openai.resources"))
    assert {place for place in before if after[place] is not before[place]} == set()
    assert not [place for place in after if type(after[place]).__name__ == "FunctionWrapper"]
    undo()


def test_undo_keeps_wrappers_of_other_code() -> None:
    completions = openai.resources.chat.completions.Completions
    original = completions.create
    undo = openai_integration.instrument(TracerProvider())
    ours = vars(completions)["create"]

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    completions.create = theirs  # as other instrumentations do
    undo()
    assert vars(completions)["create"] is theirs
    completions.create = original


def test_instrumentation_can_be_repeated_after_undo() -> None:
    for _ in range(2):
        undo = openai_integration.instrument(TracerProvider())
        assert type(vars(openai.resources.chat.completions.Completions)["create"]).__name__ == "FunctionWrapper"
        undo()


async def test_instrumentation_by_the_user_is_kept(server: ScriptedOpenAI) -> None:
    code = f"""
import openai
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from agentlightning_integrations import openai as plugin

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
from opentelemetry.instrumentation.openai.shared.config import Config

def upload(*args): ...

OpenAIInstrumentor(upload_base64_image=upload).instrument(tracer_provider=provider)
undo = plugin.instrument(TracerProvider())
client = openai.OpenAI(base_url={server.endpoint!r}, api_key="any")
for _ in range(2):
    client.chat.completions.create(model="m", messages=[{{"role": "user", "content": "hi"}}])
    undo()
assert len(exporter.get_finished_spans()) == 2
assert Config.upload_base64_image is upload
"""
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], check=True)


async def test_openai_is_instrumented_whether_imported_before_or_after_and_undo_restores_it(
    server: ScriptedOpenAI,
) -> None:
    code = f"""
import sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from agentlightning_integrations import openai as plugin

exporter, undone, provider = InMemorySpanExporter(), InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
gone = TracerProvider()
gone.add_span_processor(SimpleSpanProcessor(undone))
plugin.instrument(gone)()
undo = plugin.instrument(provider)
assert "openai" not in sys.modules
import openai

def call():
    with openai.OpenAI(base_url={server.endpoint!r}, api_key="any") as client:
        client.chat.completions.create(model="m", messages=[{{"role": "user", "content": "hi"}}])
    return len(exporter.get_finished_spans())

assert call() == 1, "imported after us"
undo()
assert call() == 1, "undone"
undo = plugin.instrument(provider)
assert call() == 2, "imported before us"
assert undone.get_finished_spans() == ()
"""
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], check=True)


async def test_incompatible_versions_of_opentelemetry_are_logged_and_openai_can_be_imported() -> None:
    code = """
import logging, sys
logging.basicConfig()
from agentlightning_integrations import openai as plugin
plugin.instrument(object())
sys.modules["opentelemetry.instrumentation.openai"] = None
import openai
assert openai.OpenAI
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], check=True, stderr=subprocess.PIPE, text=True
    )
    (line,) = done.stderr.splitlines()
    names = ("opentelemetry-instrumentation-openai", "opentelemetry-api")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
    assert "openai is not traced: {} and {} do not work together".format(*versions) in line
    assert line.endswith("pip install --upgrade {} {}".format(*names))


def test_threads_that_read_the_first_answers_concurrently_get_every_field() -> None:
    class Deferred(BaseModel):
        model_config = ConfigDict(defer_build=True)

    fields: dict[str, Any] = {f"field_{number}": (int | str, number) for number in range(20)}
    with ThreadPoolExecutor(4) as threads:
        for _ in range(50):
            answer = create_model("Answer", __base__=Deferred, **fields).model_construct()
            together = threading.Barrier(4)

            def read(answer: BaseModel = answer, together: threading.Barrier = together) -> int:
                together.wait(LIMIT_S)
                return len(openai_integration._dump(answer))

            assert [done.result() for done in [threads.submit(read) for _ in range(4)]] == [20] * 4


def test_a_thread_waits_while_another_completes_a_model_of_the_client(tracer: OtelTracer) -> None:
    building, release = threading.Event(), threading.Event()

    class Slow:
        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
            building.set()
            release.wait(LIMIT_S)
            return core_schema.any_schema()

    answer = create_model("Answer", __base__=openai.BaseModel, field=(Slow, None))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(answer.construct, field=1)
        building.wait(LIMIT_S)
        second = threads.submit(answer.construct, field=2)
        assert wait([second], 0.2).done == set()
        release.set()
        assert [first.result().to_dict(), second.result().to_dict()] == [{"field": 1}, {"field": 2}]


async def test_spans_go_to_the_given_tracer_provider(server: ScriptedOpenAI) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    undo = openai_integration.instrument(provider)
    async with AsyncOpenAI(base_url=server.endpoint, api_key="any") as client:
        with otel.get_tracer("test", tracer_provider=provider).start_as_current_span("outer"):
            await client.chat.completions.create(model="m", messages=ASK)
    undo()
    assert [span.name for span in exporter.get_finished_spans()] == ["openai.chat", "outer"]
