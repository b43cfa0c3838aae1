from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning_algorithms.shared.policy.draw import Generation, Token
from agentlightning_algorithms.shared.policy.model import Policy
from agentlightning_algorithms.shared.policy.server.completion import CompletionAnswer, ReplyReader, TextReader
from agentlightning_algorithms.shared.policy.server.conversation import Prompt
from agentlightning_algorithms.shared.policy.server.request import (
    ChatRequest,
    PolicyCompletions,
    TextRequest,
    parse_request,
)
from agentlightning_algorithms.shared.policy.server.tool_format import FORMATS, split_calls

HERMES = FORMATS["hermes"]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def completions(tiny_policy: Policy) -> PolicyCompletions:
    return PolicyCompletions(tiny_policy, "policy", 100)


def chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, {"messages": HELLO, **fields}, ["policy"])


def generation(completions: PolicyCompletions, text: str) -> Generation:
    tokens = [*completions.prompt(TextRequest(prompt=text)).token_ids, 258]  # <|im_end|>
    return Generation([Token(token, -0.5, (), 3) for token in tokens], "stop")


def whole(completions: PolicyCompletions, request: ChatRequest | TextRequest, said: list[Generation]) -> dict[str, Any]:
    return CompletionAnswer(completions, request, Prompt([1, 2])).whole(said)


def streamed(
    completions: PolicyCompletions, request: ChatRequest | TextRequest, said: list[Generation], step: int
) -> list[dict[str, Any]]:
    """Returns the chunks of answers that are sampled ``step`` tokens at a time."""
    answer = CompletionAnswer(completions, request, Prompt([1, 2]))
    chunks = [*answer.begin(3)]
    for index, one in enumerate(said):
        chunks += [answer.feed(index, one.tokens[at : at + step]) for at in range(0, len(one.tokens), step)]
        chunks.append(answer.end(index, one))
    return [*chunks, *answer.close(said)]


# Tool calls


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (CALL, "", [("add", {"a": 1, "b": "ü"})]),
        (f"I add.\n{CALL}\n", "I add.", [("add", {"a": 1, "b": "ü"})]),
        (CALL + CALL, "", [("add", {"a": 1, "b": "ü"})] * 2),
        ('<tool_call>{"name": "f", "arguments": {"x": "</b> {"}}</tool_call>', "", [("f", {"x": "</b> {"})]),
        (" no call ", " no call ", []),
        (f"{CALL}\n\nthen {CALL} done", "then done", [("add", {"a": 1, "b": "ü"})] * 2),
    ],
)
def test_tool_calls_are_removed_from_the_text(text: str, rest: str, calls: list[tuple[str, Any]]) -> None:
    left, found, unparsed = split_calls(text, HERMES)
    assert (left, unparsed) == (rest, 0)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize(
    "block",
    [
        '{"name": "add", "arguments": {"a": 1}',
        '{"name": "add"}',
        '{"arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": {"a": NaN}}',
        "add(1, 2)",
        "[" * 100_000,
        "",
    ],
)
def test_an_invalid_tool_call_stays_in_the_text_with_all_that_follows_it(block: str) -> None:
    text = f"<tool_call>{block}</tool_call>"
    assert split_calls(text, HERMES) == (text, [], 1)
    left, found, unparsed = split_calls(CALL + text + CALL, HERMES)
    assert (left, len(found), unparsed) == (text + CALL, 1, 2)


def test_an_unclosed_tool_call_stays_in_the_text() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {}}'
    assert split_calls(text, HERMES) == (text, [], 1)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50])
@pytest.mark.parametrize(
    "text", [f"I add.\n{CALL}\n{CALL} so ", "<tool_call>no</tool_call>  <tool_call", f"a < b <tool {CALL}", " \n x \n"]
)
def test_tool_calls_are_found_however_the_text_is_split(completions: PolicyCompletions, text: str, step: int) -> None:
    reader = ReplyReader(TextReader(completions.tokenizer, ()), HERMES)
    tokens = generation(completions, text).token_ids
    pieces = [reader.feed(tokens[at : at + step]) for at in range(0, len(tokens), step)]
    said, calls, _ = split_calls(text, HERMES)
    assert ("".join(pieces) + reader.finish(), reader.text) == (said, said)
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in reader.calls] == calls
    assert said.startswith("".join(pieces))


# Answers


@pytest.mark.parametrize(("parallel", "count"), [(None, 2), (True, 2), (False, 1)])
def test_an_answer_has_only_its_first_call_without_parallel_tool_calls(
    completions: PolicyCompletions, parallel: bool | None, count: int
) -> None:
    request = chat(tools=[TOOL], parallel_tool_calls=parallel)
    prompt, said = completions.prompt(request), generation(completions, CALL + CALL)
    (choice,) = CompletionAnswer(completions, request, prompt).whole([said])["choices"]
    assert len(choice["message"]["tool_calls"]) == count
    chunks = streamed(completions, request, [said], 7)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert [call["index"] for delta in deltas for call in delta.get("tool_calls", ())] == [*range(count)]
    # The next prompt continues with the sampled tokens only if the agent got all of them.
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in choice["message"]["tool_calls"]]
    following = completions.prompt(chat(tools=[TOOL], messages=[*HELLO, choice["message"], *results]))
    assert bool(following.continued) == (count == 2)
    assert completions.tokenizer.decode(following.token_ids).count("</tool_call>") == count


def test_an_answer_with_a_tool_call_has_openais_format(completions: PolicyCompletions) -> None:
    request = chat(tools=[TOOL], logprobs=True, return_token_ids=True)
    said = generation(completions, f"I add. {CALL}")
    answer = whole(completions, request, [said])
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I add."
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "ü"}
    assert answer["prompt_token_ids"] == [1, 2]
    assert choice["token_ids"] == said.token_ids
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [token.logprob for token in said.tokens]
    assert choice["logprobs"]["content"][-1]["token"] == "<|im_end|>"
    assert answer["weight_version"] == 3
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": len(said.token_ids),
        "total_tokens": 2 + len(said.token_ids),
        "prompt_tokens_details": {"cached_tokens": 0, "continued_tokens": 0},
    }


def test_a_tool_call_stays_text_if_the_request_has_no_tools(completions: PolicyCompletions) -> None:
    answer = whole(completions, chat(), [generation(completions, CALL)])
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": CALL}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]


def test_text_ends_before_the_stop_string(completions: PolicyCompletions) -> None:
    answer = whole(completions, chat(stop=["two", "three"]), [generation(completions, "one two")])
    assert answer["choices"][0]["message"]["content"] == "one "


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
def test_a_stream_has_the_same_content_as_the_whole_answer(completions: PolicyCompletions, step: int) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "logprobs": True, "return_token_ids": True, "n": 3, "stop": ["never"]}
    request = chat(stream_options={"include_usage": True}, **fields)
    said = [generation(completions, text) for text in ("plain wörds 🙂 nev", f"I add.\n{CALL} {CALL}", "x never y")]
    answer = whole(completions, request, said)
    chunks = streamed(completions, request, said, step)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["prompt_token_ids"] == [1, 2]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert [chunk["usage"] for chunk in chunks] == [None] * (len(chunks) - 1) + [answer["usage"]]
    assert {chunk["weight_version"] for chunk in chunks} == {3}
    for choice in answer["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"].get("content") or "" for part in parts) == (choice["message"]["content"] or "")
        assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]
        entries = [entry for part in parts for entry in (part["logprobs"] or {"content": []})["content"]]
        assert entries == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
        assert [call["index"] for call in calls] == [*range(len(calls))]
        functions = [call["function"] for call in choice["message"].get("tool_calls", [])]
        assert [call["function"] for call in calls] == functions


def test_a_stream_holds_text_back_only_while_the_text_may_still_change(completions: PolicyCompletions) -> None:
    said = generation(completions, "ab stoap üz")
    chunks = streamed(completions, chat(stop="stop"), [said], 1)[1:]
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert deltas == ["a", "b", " ", "", "", "", "stoa", "p", " ", "", "ü", "z", "", ""]


def test_text_completions_carry_token_ids_on_each_choice(completions: PolicyCompletions) -> None:
    request = TextRequest(prompt="x", logprobs=0, return_token_ids=True)
    said = generation(completions, "héllo")
    answer = whole(completions, request, [said])
    (choice,) = answer["choices"]
    assert choice["text"] == "héllo"
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2], said.token_ids)
    assert choice["logprobs"]["token_logprobs"] == [token.logprob for token in said.tokens]
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == len(said.token_ids)
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]
    chunks = [chunk["choices"][0] for chunk in streamed(completions, request, [said], 2)]
    assert "".join(chunk["text"] for chunk in chunks) == "héllo"
    offsets = [offset for chunk in chunks if chunk["logprobs"] for offset in chunk["logprobs"]["text_offset"]]
    assert offsets == choice["logprobs"]["text_offset"]
    assert ["prompt_token_ids" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


def test_tokens_of_probability_zero_have_a_finite_logprob_in_json(completions: PolicyCompletions) -> None:
    said = Generation([Token(1, -0.1, [(1, -0.1), (2, float("-inf"))], 0)], "length")
    answer = whole(completions, chat(logprobs=True, top_logprobs=2), [said])
    entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["logprob"] for entry in entries] == [-0.1, -9999.0]
