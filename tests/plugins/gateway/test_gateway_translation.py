"""The translations of streams and of whole answers agree."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response
from pydantic import TypeAdapter

from agentlightning import semconv
from agentlightning.adapter import TraceToTriplet
from agentlightning.types import Span
from agentlightning_plugins.gateway.backends.model_table import ModelTable
from agentlightning_plugins.gateway.dialects.dialect import Completion
from agentlightning_plugins.gateway.dialects.messages import CountTokens, Messages, MessagesTranslation
from agentlightning_plugins.gateway.dialects.openai import CHAT, to_chunk
from agentlightning_plugins.gateway.dialects.responses import Responses, ResponsesTranslation
from agentlightning_plugins.gateway.dialects.wire import read_events
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.plugins.gateway.gateway_setup import HELLO, Case, entry, gateway, stream_reader

pytestmark = pytest.mark.environment("main")  # needs a recent version of anthropic to read events

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
ARGUMENTS = st.dictionaries(TEXT, st.integers() | TEXT, max_size=2).map(json.dumps)
CALLS = st.lists(st.fixed_dictionaries({"name": TEXT, "arguments": ARGUMENTS}), max_size=3)
ANSWERS = st.fixed_dictionaries(
    {
        "reasoning_content": st.none() | TEXT,
        "content": st.none() | TEXT,
        "refusal": st.none() | TEXT,
        "calls": CALLS,
        "finish_reason": st.sampled_from(["stop", "length", "tool_calls", "content_filter"]),
        "size": st.integers(1, 5),
    }
)
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def to_whole(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer as one response of Chat Completions."""
    message = {key: answer[key] for key in ("reasoning_content", "content", "refusal")}
    calls = [{"id": f"c{i}", "type": "function", "function": call} for i, call in enumerate(answer["calls"])]
    choice = {"index": 0, "message": message | {"role": "assistant", "tool_calls": calls}}
    choice["finish_reason"] = answer["finish_reason"]
    return {"id": "x", "created": 1, "model": "m", "choices": [choice], "usage": USAGE}


def to_chunks(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the answer as chunks of a stream, in pieces of ``size`` characters."""
    size = answer["size"]

    def cut(text: str) -> list[str]:
        return [text[start : start + size] for start in range(0, len(text), size)]

    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for key in ("reasoning_content", "content", "refusal"):
        deltas += [{key: piece} for piece in cut(answer[key] or "")]
    for index, call in enumerate(answer["calls"]):
        head = {"index": index, "id": f"c{index}", "function": {"name": call["name"], "arguments": ""}}
        deltas.append({"tool_calls": [head]})
        pieces = cut(call["arguments"])
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in pieces]
    choices: list[list[dict[str, Any]]] = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
    choices.append([{"index": 0, "delta": {}, "finish_reason": answer["finish_reason"]}])
    chunks = [{"id": "x", "created": 1, "model": "m", "choices": choice} for choice in choices]
    return [*chunks, {"id": "x", "created": 1, "model": "m", "choices": [], "usage": USAGE}]


def to_events(text: bytes) -> list[dict[str, Any]]:
    """Returns the data of server-sent events and checks that each names its type in the event field and in the data."""
    events = []
    for event in text.split(b"\n\n")[:-1]:
        kind, _, data = event.partition(b"\n")
        events.append(json.loads(data.removeprefix(b"data: ")))
        assert kind == b"event: " + events[-1]["type"].encode()
    return events


@settings(deadline=None)
@given(ANSWERS)
def test_translated_events_of_the_responses_api_add_up_to_the_translated_whole_answer(answer: dict[str, Any]) -> None:
    body = {"model": "m", "input": "hi"}
    translation = ResponsesTranslation(body)
    events = to_events(b"".join(map(translation.feed, to_chunks(answer))) + translation.close())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    whole = ResponsesTranslation(body).answer(to_whole(answer))
    Response.model_validate(whole)
    last = events[-1]["response"]
    assert last | {"completed_at": 0} == whole | {"completed_at": 0}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    for item in whole["output"]:
        deltas = [event["delta"] for event in events if "delta" in event and event["item_id"] == item["id"]]
        said = item["arguments"] if "arguments" in item else [*item["content"][0].values()][1]
        assert "".join(deltas) == said
    streamed, read = Completion(), Completion()
    for event in events:
        Responses().read_chunk(event, streamed)
    Responses().read_answer(whole, read)
    assert streamed.choices == read.choices
    assert streamed.is_ended
    assert not read.is_ended


@functools.cache
def anthropic_events() -> TypeAdapter[Any]:
    from anthropic.types import RawMessageStreamEvent  # takes seconds, in each worker that collects

    return TypeAdapter(RawMessageStreamEvent)


@settings(deadline=None, max_examples=40)
@given(ANSWERS)
def test_translated_events_of_the_messages_api_add_up_to_the_translated_whole_answer(answer: dict[str, Any]) -> None:
    from anthropic.lib.streaming._messages import accumulate_event

    body = {"model": "m", "messages": [], "max_tokens": 9}
    translation = MessagesTranslation(body)
    events = to_events(b"".join(map(translation.feed, to_chunks(answer))) + translation.close())
    whole = MessagesTranslation(body).answer(to_whole(answer))
    snapshot, buffers = None, {}
    for event in events:
        snapshot = accumulate_event(
            event=anthropic_events().validate_python(event), current_snapshot=snapshot, json_bufs=buffers
        )
    assert snapshot is not None
    shown = snapshot.to_dict(exclude_none=True)
    assert shown == {key: value for key, value in whole.items() if value is not None}
    streamed, read = Completion(), Completion()
    for event in events:
        Messages().read_chunk(event, streamed)
    Messages().read_answer(whole, read)
    assert streamed.is_ended
    streamed_calls, read_calls = streamed.choices[0].tool_calls, read.choices[0].tool_calls
    for mine, other in zip(streamed_calls.values(), read_calls.values(), strict=True):
        assert (mine.id, mine.name, json.loads(mine.arguments or "{}")) == (
            other.id,
            other.name,
            json.loads(other.arguments),
        )
    for choice in (streamed.choices[0], read.choices[0]):
        choice.tool_calls.clear()
    assert streamed.choices == read.choices


def piece(call_id: str | None, name: str | None, arguments: Any, **index: Any) -> dict[str, Any]:
    """Returns a piece of a tool call; without ``index``, the server states none."""
    given = {"id": call_id, "function": {"name": name, "arguments": arguments}}
    return {key: value for key, value in given.items() if value is not None} | index


A, B = ("a", "add", '{"x": 1}'), ("b", "sub", '{"y": {}}')
PIECES: dict[str, list[Any]] = {
    "without index": [piece("a", "add", '{"x"'), piece(None, None, ": 1}"), piece(*B)],
    "with index null": [piece("a", "add", '{"x": 1}', index=None), piece(*B, index=None)],
    "all with index 0": [piece("a", "add", ""), piece(None, None, '{"x": 1}', index=0), piece(*B, index=0)],
    "with a repeated name and id": [
        *(piece("a", "add", part, index=0) for part in ('{"x"', ": 1}", "")),
        *(piece("b", "sub", part, index=1) for part in ('{"y": {', "}", "}")),
    ],
    "with a name in two pieces": [
        *(piece("a", name, "", index=0) for name in ("ad", "d")),
        piece(None, None, '{"x": 1}', index=0),
        piece(*B, index=1),
    ],
    "with two heads in one delta": [
        [piece("a", "add", "", index=0), piece("b", "sub", "", index=1)],
        *(piece(None, None, part, index=0) for part in ('{"x"', ": 1}")),
        piece(None, None, '{"y": {}}', index=1),
    ],
    "with two heads in one delta and no index": [
        [piece("a", "add", ""), piece("b", "sub", "")],
        [piece(None, None, '{"x": 1'), piece(None, None, '{"y": {')],
        [piece(None, None, "}"), piece(None, None, "}}")],
    ],
    "interleaved": [
        piece("a", "add", '{"x"', index=0),
        piece("b", "sub", '{"y"', index=1),
        piece(None, None, ": 1", index=0),
        piece(None, None, ": {", index=1),
        piece(None, None, "}", index=0),
        piece(None, None, "}}", index=1),
    ],
    "with text between two pieces": [piece("a", "add", '{"x"', index=0), "Hm.", piece("a", None, ": 1}"), piece(*B)],
    "with arguments as objects": [piece("a", "add", {"x": 1}), piece("b", "sub", {"y": {}})],
}


def read_calls(completion: Completion) -> list[tuple[Any, ...]]:
    return [(call.id, call.name, json.loads(call.arguments)) for call in completion.choices[0].tool_calls.values()]


@pytest.mark.parametrize("name", PIECES)
def test_every_way_to_stream_two_tool_calls_is_read_as_two_calls_in_every_dialect(name: str) -> None:
    deltas = [
        {"content": each} if isinstance(each, str) else {"tool_calls": each if isinstance(each, list) else [each]}
        for each in PIECES[name]
    ]
    expected = [(*head, json.loads(arguments)) for *head, arguments in (A, B)]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    chunks = [{"id": "x", "choices": [choice]} for choice in choices]
    chunks.append({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    chat = Completion()
    for chunk in chunks:
        CHAT.read_chunk(json.loads(json.dumps(chunk)), chat)
    assert read_calls(chat) == expected
    for translation, dialect in (
        (ResponsesTranslation({"input": ""}), Responses()),
        (MessagesTranslation({"messages": []}), Messages()),
    ):
        events = to_events(b"".join(map(translation.feed, chunks)) + translation.close())
        shown = Completion()
        for event in events:
            dialect.read_chunk(event, shown)
        assert read_calls(shown) == expected
        assert shown.choices[0].text == chat.choices[0].text
        if isinstance(dialect, Messages):  # one block at a time, in order
            starts_and_stops = [
                e["index"] for e in events if e["type"] in ("content_block_start", "content_block_stop")
            ]
            assert starts_and_stops == sorted(starts_and_stops)
            assert all(starts_and_stops.count(index) == 2 for index in starts_and_stops)


@pytest.mark.parametrize("index", [{}, {"index": None}, {"index": 0}])
@pytest.mark.parametrize("ids", [("a", "b"), ("a", "a"), (None, None)])
def test_the_tool_calls_of_a_whole_answer_stay_apart_in_every_dialect(index: Any, ids: tuple[Any, Any]) -> None:
    calls = [piece(ids[n], "add", f'{{"x": {n + 1}}}', **index) for n in range(2)]
    choice = {"index": 0, "finish_reason": "tool_calls", "message": {"content": None, "tool_calls": calls}}
    answer = {"id": "x", "choices": [choice]}
    read = [Completion() for _ in range(3)]
    CHAT.read_answer(answer, read[0])
    Responses().read_answer(ResponsesTranslation({"input": ""}).answer(answer), read[1])
    Messages().read_answer(MessagesTranslation({"messages": []}).answer(answer), read[2])
    for completion in read:
        assert [call[1:] for call in read_calls(completion)] == [("add", {"x": 1}), ("add", {"x": 2})]


@pytest.mark.parametrize("translation", [ResponsesTranslation({"input": ""}), MessagesTranslation({"messages": []})])
def test_a_tool_call_that_has_begun_to_arrive_is_passed_on_at_once(translation: Any) -> None:
    def feed(call: dict[str, Any]) -> str:
        chunk = {"id": "x", "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}
        return str(translation.feed(chunk).decode())

    feed(piece("a", "add", "", index=0))
    assert "add" in feed(piece(None, None, '{"x": "first', index=0))
    assert "second" in feed(piece(None, None, 'second"}', index=0))
    assert "sub" in feed(piece(*B, index=1))
    with pytest.raises(ValueError, match="'add' after its arguments have ended"):
        feed(piece(None, None, ', "z": 1}', index=0))


LISTED = [
    {"type": "thinking", "thinking": [{"type": "text", "text": "Add "}, {"type": "text", "text": "them."}]},
    {"type": "text", "text": "The sum "},
    {"type": "text", "text": "is 3."},
]
ADD_1, SUB_2 = ("add", {"x": 1}), ("sub", {"y": {}})
KINDS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "text": ({"content": "Hello"}, ("Hello", "", "", [])),
    "nothing": ({"content": None}, ("", "", "", [])),
    "thoughts": ({"content": "Hello", "reasoning": "Hm."}, ("Hello", "Hm.", "", [])),
    "a list": ({"content": LISTED}, ("The sum is 3.", "Add them.", "", [])),
    "a refusal": ({"content": None, "refusal": "No."}, ("", "", "No.", [])),
    "calls": ({"content": None, "tool_calls": [piece(*A), piece(*B)]}, ("", "", "", [ADD_1, SUB_2])),
    "an object": ({"content": "So:", "tool_calls": [piece("a", "add", {"x": 1})]}, ("So:", "", "", [ADD_1])),
    "the old call": ({"function_call": {"name": "add", "arguments": '{"x": 1}'}}, ("", "", "", [ADD_1])),
    "listed calls": (
        {"content": LISTED, "tool_calls": [piece(*A, index=0), piece(*B, index=0)]},
        ("The sum is 3.", "Add them.", "", [ADD_1, SUB_2]),
    ),
}
REASONS = ["stop", "length", "tool_calls", "content_filter"]
APIS: Any = {
    "chat": (CHAT, lambda: None),
    "responses": (Responses(), lambda: ResponsesTranslation({"input": ""})),
    "messages": (Messages(), lambda: MessagesTranslation({"messages": []})),
}


def read_span(completion: Completion) -> tuple[Any, ...]:
    """Returns what an adapter reads in the span of an answer: text, thoughts, refusal, calls, reason."""
    choice = completion.choices[0]
    span = Span.from_attributes(attributes={semconv.GEN_AI_OUTPUT_MESSAGES: json.dumps([choice.to_message()])})
    return *read_parts(*semconv.read_output_messages(span)), choice.finish_reason


def read_parts(message: Mapping[str, Any]) -> tuple[Any, ...]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    return *(message.get(name) or "" for name in ("content", "reasoning_content", "refusal")), calls


def expect(api: str, told: tuple[Any, ...], reason: str) -> tuple[Any, ...]:
    """Returns what the span says of an answer as an API shows it."""
    text, thoughts, refusal, calls = told
    if api == "messages" and refusal:  # the API has only a text and a reason
        return refusal, thoughts, "", calls, "content_filter"
    if api != "chat" and reason in ("stop", "tool_calls") and not (api == "messages" and reason == "tool_calls"):
        reason = "tool_calls" if calls else "stop"
    return text, thoughts, refusal, calls, reason


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("api", APIS)
def test_every_answer_is_shown_and_recorded_alike_whole_streamed_and_turned_into_the_other(
    api: str, kind: str, reason: str
) -> None:
    (dialect, translate), (message, told) = APIS[api], KINDS[kind]
    answer: Any = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "usage": USAGE}
    answer["choices"] = [{"index": 0, "finish_reason": reason, "message": {"role": "assistant", **message}}]
    recorded, *shown = (Completion() for _ in range(5))
    CHAT.read_answer(copy.deepcopy(answer), recorded)
    assert read_span(recorded) == (*told, reason)
    whole, events = answer, [to_chunk(answer)]
    if api != "chat":
        whole, stream = translate().answer(copy.deepcopy(answer)), translate()
        events = read_events(stream.feed(to_chunk(answer)) + stream.close())
    dialect.read_answer(copy.deepcopy(whole), shown[0])
    for completion, seen in ((shown[1], events), (shown[2], read_events(dialect.to_events(copy.deepcopy(whole))))):
        for event in copy.deepcopy(seen):
            dialect.read_chunk(event, completion)
    dialect.read_answer(dialect.collect(copy.deepcopy(events)), shown[3])
    assert [read_span(completion) for completion in shown] == [expect(api, told, reason)] * 4
    assert all(completion.error is None for completion in shown)


NATIVE = {"chat": "openai-compatible", "responses": "openai", "messages": "anthropic"}


def serve(api: str, kind: str, reason: str, *, stream: bool) -> bytes:
    """Returns an answer as a server of an API sends it."""
    answer: Any = {"id": f"{kind} {reason}", "object": "chat.completion", "created": 1, "model": "m", "usage": USAGE}
    answer["choices"] = [{"index": 0, "finish_reason": reason, "message": {"role": "assistant", **KINDS[kind][0]}}]
    if api == "chat":
        return CHAT.to_events(answer) if stream else json.dumps(answer).encode()
    translation = APIS[api][1]()
    if stream:
        return bytes(translation.feed(to_chunk(answer)) + translation.close())
    return json.dumps(translation.answer(answer)).encode()


async def ask(case: Case, client: Any, api: str, *, stream: bool) -> dict[str, Any]:
    """Returns the whole answer that the official client of an API makes of what it gets."""
    if api == "chat":
        answer = await client.chat.completions.create(model="m", messages=HELLO, stream=stream)
        return CHAT.collect([chunk.to_dict() async for chunk in answer]) if stream else dict(answer.to_dict())
    if api == "responses":
        response = await client.responses.create(model="m", input="hi", stream=stream)
        return dict([event async for event in response][-1].response.to_dict() if stream else response.to_dict())
    messages = (await case.anthropic_client(client)).messages
    if not stream:
        return (await messages.create(model="m", max_tokens=9, messages=HELLO)).to_dict()
    async with messages.stream(model="m", max_tokens=9, messages=HELLO) as parts:
        return (await parts.get_final_message()).to_dict()


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # content as a list
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("api", "spoken"),
    [("chat", "chat"), *((api, spoken) for api in ("responses", "messages") for spoken in (api, "chat"))],
)
async def test_client_span_and_adapter_agree_on_every_answer_that_passes_a_gateway(
    api: str, spoken: str, stream: bool
) -> None:
    import anthropic

    cases = list(itertools.product(KINDS, REASONS))
    bodies = [serve(spoken, kind, reason, stream=stream) for kind, reason in cases]
    bodies.append(bodies[0][:40])  # breaks off
    content_type = "text/event-stream" if stream else "application/json"
    script = [Answer(body=body, content_type=content_type) for body in bodies]
    shown = []
    async with ScriptedOpenAI(script) as server, gateway(server, provider=NATIVE[spoken], num_retries=0) as case:
        rollout, client = await case.start()
        for _ in cases:
            completion = Completion()
            APIS[api][0].read_answer(await ask(case, client, api, stream=stream), completion)
            shown.append(read_span(completion))
        with pytest.raises((openai.APIError, anthropic.APIError)):
            await ask(case, client, api, stream=stream)
        spans = await case.spans(rollout)
    *complete, broken = spans
    assert [span.attributes[semconv.GATEWAY_COMPLETE] for span in spans] == [*[True] * len(cases), False]
    assert broken.status.status_code == "ERROR"
    triplets = TraceToTriplet().adapt(spans)
    for number, (kind, reason) in enumerate(cases):
        told, triplet = KINDS[kind][1], triplets[number]
        assert shown[number] == expect(api, told, reason)
        (message,) = semconv.read_output_messages(complete[number])
        said = *read_parts(message), *semconv.read_finish_reasons(complete[number])
        assert said == expect(spoken, told, reason)
        assert (*read_parts(*triplet.response["raw_content"]), triplet.metadata["finish_reason"]) == said
    assert len(triplets) == len(cases)


SAID = {"reasoning_content": None, "content": "Hi", "refusal": None, "calls": [], "finish_reason": "stop"}


def test_usage_is_never_below_zero_and_a_missing_total_is_the_sum() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 9}}
    answer = {**to_whole(SAID), "usage": usage}
    messages = MessagesTranslation({"messages": []}).answer(copy.deepcopy(answer))["usage"]
    assert (messages["input_tokens"], messages["cache_read_input_tokens"]) == (0, 5)
    assert ResponsesTranslation({"input": ""}).answer(answer)["usage"]["total_tokens"] == 8


@pytest.mark.parametrize("tools", [{}, {"tools": []}, {"tools": None}])
@pytest.mark.parametrize("dialect", [CHAT, Messages(), CountTokens()])
def test_a_tool_choice_without_tools_does_not_reach_a_chat_server(dialect: Any, tools: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, **tools}
    if dialect is CHAT:
        body |= {"tool_choice": "auto", "parallel_tool_calls": True}
    (backend,) = ModelTable([entry("http://127.0.0.1:1/v1")]).backends
    sent = stream_reader(dialect, body)[0].prepare(backend).body
    assert sent.keys().isdisjoint({"tools", "tool_choice", "parallel_tool_calls"})
