"""The translations of streams and of whole answers agree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response
from pydantic import TypeAdapter

from agentlightning_plugins.gateway.dialects.dialect import Completion
from agentlightning_plugins.gateway.dialects.messages import Messages, MessagesTranslation
from agentlightning_plugins.gateway.dialects.responses import Responses, ResponsesTranslation

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


@settings(deadline=None, max_examples=40)
@given(ANSWERS)
def test_translated_events_of_the_messages_api_add_up_to_the_translated_whole_answer(answer: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [], "max_tokens": 9}
    translation = MessagesTranslation(body)
    events = to_events(b"".join(map(translation.feed, to_chunks(answer))) + translation.close())
    whole = MessagesTranslation(body).answer(to_whole(answer))
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    snapshot, buffers = None, {}
    for event in events:
        snapshot = accumulate_event(event=adapter.validate_python(event), current_snapshot=snapshot, json_bufs=buffers)
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


@pytest.mark.parametrize("translation", [ResponsesTranslation({"input": ""}), MessagesTranslation({"messages": []})])
def test_tool_calls_that_a_backend_interleaves_are_refused(translation: Any) -> None:
    def chunk(index: int) -> dict[str, Any]:
        call = {"index": index, "id": f"c{index}", "function": {"name": "f", "arguments": "{"}}
        return {"id": "x", "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}

    translation.feed(chunk(0))
    translation.feed(chunk(1))
    with pytest.raises(ValueError, match="interleaves"):
        translation.feed(chunk(0))
