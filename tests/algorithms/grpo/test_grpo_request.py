"""Fields that the policy server accepts in a request, and the values that it passes to the chat template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning_algorithms.shared.policy.model import Policy
from agentlightning_algorithms.shared.policy.server import request
from agentlightning_algorithms.shared.policy.server.request import (
    ChatRequest,
    CompletionError,
    PolicyCompletions,
    TextRequest,
    parse_request,
)

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello"}]
EFFORT = "{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"
THINKING = "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"


@pytest.fixture
def completions(tiny_policy: Policy) -> PolicyCompletions:
    return PolicyCompletions(tiny_policy, "policy", 100)


def chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, {"messages": HELLO, **fields}, ["policy"])


def test_the_prompt_is_what_the_chat_template_renders(completions: PolicyCompletions, tiny_policy: Policy) -> None:
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "text", "text": "on"}, {"type": "text", "text": "e"}],
        },
    ]
    text = tiny_policy.tokenizer.decode(completions.prompt(chat(messages=messages, tools=[TOOL])).token_ids)
    assert text == (
        f"<|im_start|>system\n{json.dumps(TOOL)}\n<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\none<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_hidden_from_the_model_when_tool_choice_is_none(completions: PolicyCompletions) -> None:
    hidden = completions.prompt(chat(tools=[TOOL], tool_choice="none"))
    assert hidden.token_ids == completions.prompt(chat()).token_ids


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "has no role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "must be a string"),
        ({"messages": [{"role": "user", "tool_calls": 1.5}]}, "messages.0.tool_calls", "list of function calls"),
        (
            {"messages": [{"role": "user", "tool_calls": [{"function": 1}]}]},
            "messages.0.tool_calls",
            "list of function calls",
        ),
        ({"messages": [{"role": "user", "tool_calls": ["x"]}]}, "messages.0.tool_calls", "list of function calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "only text"),
        ({"messages": [{"role": "refused", "content": ""}]}, "messages", "no such role"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"n": 1000}, "n", "less than or equal to 128"),
        ({"stop": ""}, "stop", "empty string"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"response_format": {"type": "grammar"}}, "response_format", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"typical_p": 0.9}, "typical_p", "not supported"),
        ({"min_tokens": 5}, "min_tokens", "not supported"),
        ({"stop_token_ids": [65]}, "stop_token_ids", "not supported"),
        ({"ignore_eos": True}, "ignore_eos", "not supported"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs", "not supported"),
        ({"chat_template": "{{ messages }}"}, "chat_template", "not supported"),
        ({"documents": [{"title": "a", "text": "b"}]}, "documents", "not supported"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "not supported"),
        ({"stop_regex": "a+"}, "stop_regex", "not supported"),
        ({"logits_processors": ["module.Processor"]}, "logits_processors", "not supported"),
        ({"add_special_tokens": True}, "add_special_tokens", "not supported"),
        ({"echo": True}, "echo", "not supported"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "not supported"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "not supported"),
        ({"thinking_token_budget": 0}, "thinking_token_budget", "not supported"),
        ({"repetition_detection": {"max_pattern_size": 4}}, "repetition_detection", "not supported"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "not supported"),
        ({"truncate_prompt_tokens": 8}, "truncate_prompt_tokens", "not supported"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "may not have tools"),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "chat_template_kwargs may not have messages",
        ),
        (
            {"chat_template_kwargs": {"documents": 3}},
            "chat_template_kwargs",
            "refuses these messages and chat_template_kwargs: .*not iterable",
        ),
        ({"max_tokens": 90}, "messages", "room for 100 together"),
    ],
)
def test_an_invalid_field_is_named_in_the_error(
    completions: PolicyCompletions, fields: dict[str, Any], param: str, message: str
) -> None:
    def serve() -> None:
        request = chat(**fields)
        completions.sampling_params(request, len(completions.prompt(request).token_ids))

    with pytest.raises(CompletionError, match=message) as caught:
        serve()
    assert (caught.value.status, caught.value.param) == (400, param)


def test_fields_of_vllm_are_accepted_with_values_that_have_no_effect(completions: PolicyCompletions) -> None:
    fields = {"min_tokens": 0, "ignore_eos": False, "stop_token_ids": [], "guided_json": None, "typical_p": 1.0}
    fields |= {"chat_template": "", "documents": [], "stop_regex": "", "logits_processors": []}
    fields |= {"add_generation_prompt": True, "truncate_prompt_tokens": -1, "add_special_tokens": False}
    fields |= {"skip_special_tokens": True, "include_stop_str_in_output": False, "echo": False}
    assert completions.sampling_params(chat(**fields), 10) == completions.sampling_params(chat(), 10)
    assert completions.prompt(chat(**fields)) == completions.prompt(chat(**dict.fromkeys(fields)))


def test_fields_of_the_chat_template_have_no_effect_on_a_text_completion(completions: PolicyCompletions) -> None:
    fields = {"messages": [], "chat_template_kwargs": {"tools": []}, "reasoning_effort": "low"}
    parse_request(TextRequest, {"prompt": "x", **fields}, ["policy"])
    with pytest.raises(CompletionError, match="truncate_prompt_tokens = 1 is not supported"):
        parse_request(TextRequest, {"prompt": "x", "truncate_prompt_tokens": 1}, ["policy"])


def test_a_form_of_the_answer_is_not_enforced_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    request._warn_of_format.cache_clear()
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}) * 2:
        parse_request(ChatRequest, {"messages": HELLO, "response_format": form}, ["policy"])
    assert caplog.text.count("does not enforce") == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)
def test_a_text_completion_refuses_fields_that_would_change_it(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(CompletionError, match=f"{param} = .* is not supported"):
        parse_request(TextRequest, {"prompt": "x", **fields}, ["policy"])


def test_add_special_tokens_says_whether_a_text_prompt_gets_them(
    completions: PolicyCompletions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        return [1, 5] if add_special_tokens else [5]

    monkeypatch.setattr(completions.tokenizer, "encode", encode)
    for given, expected in ((None, [1, 5]), (True, [1, 5]), (False, [5])):
        request = parse_request(TextRequest, {"prompt": "x", "add_special_tokens": given}, ["policy"])
        assert completions.prompt(request).token_ids == expected


def test_chat_template_kwargs_reach_the_chat_template(completions: PolicyCompletions) -> None:
    completions.tokenizer.chat_template += "{% if enable_thinking is false %}<think></think>{% endif %}"
    request = chat(chat_template_kwargs={"enable_thinking": False})
    assert completions.tokenizer.decode(completions.prompt(request).token_ids).endswith("<think></think>")


@pytest.mark.parametrize(
    ("template", "effort", "arguments", "rendered"),
    [
        (EFFORT, "low", None, "[low]"),
        (EFFORT, "low", {"reasoning_effort": "high"}, "[low]"),
        (EFFORT, None, {"reasoning_effort": "high"}, "[high]"),
        (EFFORT, None, None, ""),
        (EFFORT + THINKING, "low", None, "[low][True]"),
        (EFFORT + THINKING, "none", None, "[none][False]"),
        (EFFORT + THINKING, "none", {"enable_thinking": True}, "[none][True]"),
        (THINKING, None, None, ""),
        ("", "low", None, ""),
    ],
)
def test_reasoning_effort_reaches_a_chat_template_that_reads_it(
    completions: PolicyCompletions, template: str, effort: str | None, arguments: dict[str, Any] | None, rendered: str
) -> None:
    plain = completions.prompt(chat()).text
    completions.tokenizer.chat_template += template
    request = chat(reasoning_effort=effort, chat_template_kwargs=arguments)
    assert completions.prompt(request).text == plain + rendered


def test_an_error_of_a_chat_template_names_the_request_fields_passed_to_it(completions: PolicyCompletions) -> None:
    completions.tokenizer.chat_template += "{% if reasoning_effort %}{{ raise_exception('no effort') }}{% endif %}"
    for fields, said in (
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"}, "chat_template_kwargs and reasoning_effort"),
    ):
        with pytest.raises(
            CompletionError, match=f"the chat template refuses these messages and {said}: no "
        ) as caught:
            completions.prompt(chat(**fields))
        assert caught.value.param == said.split()[0]


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(CompletionError, match="'gpt-5' does not exist; this server has 'policy'") as caught:
        chat(model="gpt-5")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_a_body_that_is_not_an_object_is_refused() -> None:
    with pytest.raises(CompletionError, match="body: Input should be a valid dictionary"):
        parse_request(ChatRequest, ["{"], ["policy"])


def test_token_ids_outside_the_vocabulary_are_refused(completions: PolicyCompletions) -> None:
    assert completions.prompt(TextRequest(prompt=[0, 258])).token_ids == [0, 258]
    with pytest.raises(CompletionError, match="token id 259 is not in 0 to 258"):
        completions.prompt(TextRequest(prompt=[259]))


def test_null_and_absent_fields_mean_the_defaults(completions: PolicyCompletions) -> None:
    null = dict.fromkeys(("temperature", "top_p", "top_k", "stop", "seed", "n", "max_tokens", "logprobs", "tools"))
    assert completions.sampling_params(chat(**null), 10) == completions.sampling_params(chat(), 10)
    (params,) = completions.sampling_params(chat(), 10)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 90)


def test_every_choice_has_its_own_seed(completions: PolicyCompletions) -> None:
    params = completions.sampling_params(chat(n=3, seed=5, top_k=-1, stop="x", max_completion_tokens=7), 10)
    assert len({p.seed for p in params}) == 3
    assert {(p.top_k, p.stop, p.max_tokens) for p in params} == {(0, ("x",), 7)}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "x" * 4_000_000}]},
        {"messages": [{"role": "user", "content": "x" * 500}]},
        {"messages": [{"role": "user", "content": "x"}] * 100_000},
        {"messages": HELLO, "tools": [{**TOOL, "description": "x" * 4_000_000}]},
        {"messages": HELLO, "chat_template_kwargs": {"more": ["x"] * 1_000_000}},
        {"prompt": "x" * 4_000_000},
        {"prompt": [1] * 4_000_000},
    ],
)
def test_a_prompt_that_is_too_long_is_refused_before_it_is_tokenized(
    completions: PolicyCompletions, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    tokenized: list[int] = []
    encode = completions.tokenizer.encode

    def count(text: str, **options: Any) -> list[int]:
        tokenized.append(len(text))
        return list(encode(text, **options))

    monkeypatch.setattr(completions.tokenizer, "encode", count)
    request = parse_request(TextRequest if "prompt" in fields else ChatRequest, fields, ["policy"])
    with pytest.raises(CompletionError) as caught:
        completions.sampling_params(request, len(completions.prompt(request).token_ids))
    assert caught.value.code == "context_length_exceeded"
    assert sum(tokenized) <= 400, "at most the room for 100 tokens of four characters"


def test_a_prompt_of_many_characters_per_token_is_tokenized(tiny_policy: Policy) -> None:
    completions = PolicyCompletions(tiny_policy, "policy", 100)
    text = "<|im_start|>" * 90
    request = parse_request(TextRequest, {"prompt": text}, ["policy"])
    assert len(completions.prompt(request).token_ids) == 90


def test_long_stop_strings_are_refused_and_a_tiny_temperature_takes_the_likeliest_token(
    completions: PolicyCompletions,
) -> None:
    for stop in (["x"] * 65, ["x" * 1001]):
        with pytest.raises(CompletionError, match="stop: at most 64 strings of 1000 characters"):
            completions.sampling_params(chat(stop=stop), 3)
    assert completions.sampling_params(chat(temperature=1e-38), 3)[0].temperature == 0.0
    assert completions.sampling_params(chat(temperature=0.01), 3)[0].temperature == 0.01
