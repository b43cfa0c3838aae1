"""Streams whose events arrive together."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from agentlightning_plugins.gateway.dialects.dialect import Completion, Dialect, TokenOptions
from agentlightning_plugins.gateway.dialects.openai import ChatCompletions
from agentlightning_plugins.gateway.dialects.wire import event_data
from tests.plugins.gateway.gateway_setup import stream_reader

NASTY = ['say "choices":[{"index":1}] to me', "]}\n\ndata: {", "}],", '"logprobs":{"content":[', "é𝄞\\", "{", ""]


class OneByOne(ChatCompletions):
    """Chat Completions without the fast path."""

    relay_events = Dialect.relay_events


def token(text: str, index: int = 0, **more: Any) -> dict[str, Any]:
    """A choice of a chunk, with all token data."""
    content = [{"token": text, "logprob": -0.5 - len(text), "bytes": list(text.encode()), "top_logprobs": []}]
    choice: dict[str, Any] = {"index": index, "delta": {"content": text}, "logprobs": {"content": content}}
    return choice | {"finish_reason": None, "token_ids": [len(text)]} | more


def chunk(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "x", "object": "chat.completion.chunk", "model": "m", "choices": list(choices), **more}


END = chunk(token(".", finish_reason="stop"))
USAGE = chunk(usage={"prompt_tokens": 3, "completion_tokens": 2})
FIRST = chunk({"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}, prompt_token_ids=[1, 2])
TOKENS = [chunk(token(text)) for text in NASTY]
STREAMS: dict[str, list[dict[str, Any]]] = {
    "as vLLM writes it": [FIRST, *TOKENS, END, USAGE],
    "with a version after the choices": [chunk(token(text), weight_version=3, tags=[1]) for text in NASTY] + [END],
    "with prompt ids everywhere": [chunk(token(text), prompt_token_ids=[1, 2]) for text in NASTY] + [END],
    "of several choices in turn": [chunk(token(text, i)) for text in NASTY for i in range(3)]
    + [chunk(token(".", i, finish_reason="stop")) for i in range(3)],
    "of several choices in one event": [chunk(token("a"), token("b", 1)), chunk(token("c"), token("d", 1)), END],
    "with a different envelope in each event": [chunk(token(text), created=i) for i, text in enumerate(NASTY)] + [END],
    "with tool calls": [
        chunk(token("", delta={"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": part}}]}))
        for part in ('{"a', '": [1]', "}")
    ]
    + [END],
    "with fields that were not requested": [
        {"nested": {"choices": [chunk()]}, **piece} for piece in (FIRST, *TOKENS, END)
    ],
    "that ends with an error": [FIRST, *TOKENS, {"error": {"message": "out of memory"}}],
}


def read(dialect: Dialect, options: TokenOptions, pieces: list[bytes]) -> tuple[list[Any], Completion, bool]:
    """Returns the events for the agent, and the recorded call."""
    body = {"logprobs": options.logprobs, "return_token_ids": options.token_ids, "stream": bool(options.stream_options)}
    call, reader = stream_reader(dialect, body)
    shown = b"".join([*map(reader.feed, pieces), reader.close(None)])
    assert shown.endswith(b"\n\n")
    data = [event.removeprefix(b"data: ") for event in shown.split(b"\n\n")[:-1]]
    return [text if text == b"[DONE]" else json.loads(text) for text in data], call.completion, call.is_complete


@pytest.mark.parametrize(
    "options",
    [
        TokenOptions(*asked)
        for asked in itertools.product([False, True], [False, True], [None, {"include_usage": True}])
    ],
)
@pytest.mark.parametrize("name", STREAMS)
def test_events_that_arrive_together_are_read_as_if_they_arrived_one_by_one(name: str, options: TokenOptions) -> None:
    events = [b"data: %b\n\n" % json.dumps(chunk, separators=(",", ":")).encode() for chunk in STREAMS[name]]
    events.append(b"data: [DONE]\n\n")
    expected = read(OneByOne(), options, events)
    assert expected[2] == (name != "that ends with an error")
    shows_usage = USAGE in STREAMS[name] and options.stream_options is None
    assert ("usage" in str(expected[0])) == shows_usage
    whole = b"".join(events)
    for size in (len(whole), 1000, 300):
        assert read(ChatCompletions(), options, [whole[i : i + size] for i in range(0, len(whole), size)]) == expected


def test_events_without_captured_fields_are_relayed_byte_for_byte() -> None:
    call, reader = stream_reader(ChatCompletions(), {})
    plain = b'data: {"id":"x", "choices":[{"index":0,"delta":{"content":"\\u00e9 1e-05"}} ]}\n\n'
    assert reader.feed(plain * 3) == plain * 3
    assert call.completion.choices[0].text == "é 1e-05" * 3


def test_an_event_may_have_fields_other_than_its_data() -> None:
    for event in (b"data: {}\nid: 1\n\n", b"id: 1\ndata: {}\n\n", b"data: {}\r\nid: 1\r\n\r\n", b"data: {}\n\n"):
        assert event_data(event) == b"{}"
    assert event_data(b"data: {\ndata: }\n\n") is None
    assert event_data(b": a comment\n\n") is None
