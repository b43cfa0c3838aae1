"""Tool calls in every form that a chat template may write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agentlightning.errors import ConfigError
from agentlightning_algorithms.shared.policy.draw import Generation, Token
from agentlightning_algorithms.shared.policy.model import Policy
from agentlightning_algorithms.shared.policy.server.__main__ import make_parser, open_app
from agentlightning_algorithms.shared.policy.server.completion import CompletionAnswer
from agentlightning_algorithms.shared.policy.server.request import (
    ChatRequest,
    CompletionError,
    PolicyCompletions,
    parse_request,
)
from agentlightning_algorithms.shared.policy.server.tool_format import FORMATS, KEEP_THOUGHTS, find_format, split_calls
from tests.algorithms.tiny_model import CHAT_TEMPLATE
from tests.source import REPO


def template(
    call: str, *, before: str = "", after: str = "", between: str = "", prompt: str = "", thought: str = ""
) -> str:
    """Returns a template of messages in the style of Qwen, with calls as ``call`` writes them."""
    return (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
        + (f"{{%- if message.role == 'assistant' %}}{thought}{{%- endif %}}" if thought else "")
        + "{{- message.content }}"
        + f"{{%- if message.tool_calls %}}{before}{{%- for each in message.tool_calls %}}{{%- set f = each.function %}}"
        + call
        + f"{{%- if not loop.last %}}{between}{{%- endif %}}{{%- endfor %}}{after}{{%- endif %}}"
        + "{{- '<|im_end|>\n' }}{%- endfor %}"
        + f"{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\n' }}}}{prompt}{{%- endif %}}"
    )


def xml(scalars: str) -> str:
    value = f"(v if v is string else v | tojson if v is mapping or v is sequence else v | {scalars})"
    return (
        "{{- '<tool_call>\n<function=' + f.name + '>\n' }}{%- for k, v in f.arguments | items %}"
        "{{- '<parameter=' + k + '>\n' + " + value + " + '\n</parameter>\n' }}{%- endfor %}"
        "{{- '</function>\n</tool_call>' }}"
    )


CHECKED_ID = "{%- if each.id | length != 9 %}{{ raise_exception('an id has nine characters') }}{%- endif %}"
TEMPLATES = {
    "hermes": CHAT_TEMPLATE,
    "xml": template(xml("tojson"), between="{{- '\n' }}"),
    "xml of Qwen3-Coder": template(xml("string"), between="{{- '\n' }}"),
    "xml with thoughts": template(
        xml("tojson"), prompt="{{- '<think>\n' }}", thought="{{- '<think>\n\n</think>\n\n' }}"
    ),
    "llama": template("""{{- '{"name": "' + f.name + '", "parameters": ' }}{{- f.arguments | tojson }}{{- '}' }}"""),
    "mistral": template(
        CHECKED_ID + """{%- set out = f | tojson %}{{- out[:-1] + ', "id": "' + each.id + '"}' }}""",
        before="{{- '[TOOL_CALLS] [' }}", between="{{- ', ' }}", after="{{- ']' }}",
    ),
    "mistral by name": template(CHECKED_ID + "{{- '[TOOL_CALLS]' + f.name + '[ARGS]' }}{{- f.arguments | tojson }}"),
    "mistral with id": template(
        "{{- '[TOOL_CALLS]' + f.name + '[CALL_ID]' + each.id + '[ARGS]' }}{{- f.arguments | tojson }}"
    ),
}  # fmt: skip
UNKNOWN = template("{{- '<|call|>' + f.name + '(' }}{{- f.arguments | tojson }}{{- ')' }}")
SPECIAL = ["<|im_start|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"]
ADD = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": ADD}]
QUESTION = [{"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_model)
    found.add_special_tokens({"additional_special_tokens": SPECIAL})
    return found


@pytest.fixture
def policy(tiny_policy: Policy, tokenizer: PreTrainedTokenizerBase) -> Policy:
    tiny_policy.tokenizer = tokenizer
    return tiny_policy


def make_call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "a1b2c3d4e", "type": "function", "function": {"name": name, "arguments": arguments}}


def write(tokenizer: PreTrainedTokenizerBase, calls: list[dict[str, Any]]) -> str:
    """Returns an answer with calls as the tokenizer's template writes it."""
    prompt, whole = (
        str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate))
        for messages, generate in (
            (QUESTION, True),
            ([*QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}], False),
        )
    )
    assert whole.startswith(prompt)
    return whole[len(prompt) :].removesuffix("<|im_end|>\n")


def answer(completions: PolicyCompletions, text: str, *, step: int = 0, **fields: Any) -> dict[str, Any]:
    """Returns the choice for an answer with this text, or the choices of its stream joined."""
    request = parse_request(ChatRequest, {"messages": QUESTION, "tools": TOOLS, **fields}, ["policy"])
    prompt = completions.prompt(request)
    tokens = [Token(each, -0.5, (), 3) for each in [*completions.conversations.encode(text), 258]]
    generation, reply = Generation(tokens, "stop"), CompletionAnswer(completions, request, prompt)
    if not step:
        return {**reply.whole([generation])["choices"][0], "prompt": prompt}
    chunks = [*reply.begin(3), *(reply.feed(0, tokens[at : at + step]) for at in range(0, len(tokens), step))]
    chunks.append(reply.end(0, generation))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    said = "".join(delta.get("content") or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    return {**chunks[-1]["choices"][0], "message": {"content": said or None, "tool_calls": calls}}


def functions(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    found = [call["function"] for call in choice["message"].get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in found]


# The form


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_the_one_that_the_chat_template_writes(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    tokenizer.chat_template = TEMPLATES[name]
    form = find_format(tokenizer)
    assert form is not None
    assert form.name == name.split()[0]


def test_the_page_of_models_has_the_forms_that_are_tested_and_the_arguments_that_keep_thoughts() -> None:
    page = (REPO / "docs" / "models.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \| `.+ \| `\w+`[^|]*\|$", page, re.MULTILINE)) == set(FORMATS)
    assert {name.split()[0] for name in TEMPLATES} == set(FORMATS)
    assert set(re.findall(r"`(\w+_thinking)`", page.replace("`keep_thinking", ""))) == set(KEEP_THOUGHTS)


def test_a_server_does_not_start_with_a_template_whose_form_is_unknown(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for file in tiny_model.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model" / "chat_template.jinja").write_text(UNKNOWN)
    given = ["--model", str(tmp_path / "model")]
    with pytest.raises(ConfigError, match=r"unknown form, .*<\|call\|>probe_tool.*hermes, xml, llama, mistral.*none"):
        open_app(make_parser().parse_args(given), "key", None)
    open_app(make_parser().parse_args([*given, "--tool-format", "none"]), "key", None).close()


def test_tools_are_refused_if_the_template_writes_no_calls(policy: Policy) -> None:
    policy.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    completions = PolicyCompletions(policy, "policy", 100)
    with pytest.raises(CompletionError, match="writes no tool calls") as caught:
        answer(completions, "4")
    assert (caught.value.status, caught.value.param) == (400, "tools")
    completions = PolicyCompletions(policy, "policy", 100, tool_format="hermes")
    assert functions(answer(completions, GOOD["hermes"])) == [("add", {"a": 1})]


# Arguments

TEXTS = st.one_of(
    st.text(),
    st.lists(
        st.sampled_from(
            ["</tool_call>", "<tool_call>", "</think>", "<think>", "\n", " ", '"', "\\", "{", "}", "1e400", "\\ud800",
             "</parameter>", "<parameter=a>", "</function>", "[ARGS]", "[TOOL_CALLS]", "True", "null", "7", "é", "😀"]
        )
    ).map("".join),
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
KEYS = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), min_size=1)
TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


@pytest.mark.parametrize("name", TEMPLATES)
@given(arguments=st.dictionaries(KEYS, VALUES, max_size=4))
@example(arguments={"a": "</tool_call>"})
@example(arguments={"a": '\n<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>\n'})
@example(arguments={"a": "</function>\n</tool_call>", "b": "</parameter>\n"})
@example(arguments={"a": 10**30, "b": "<think>", "c": ""})
@example(arguments={"a": "1", "b": "True", "c": "null", "d": None, "e": False, "f": [1.5, {"x": None}]})
@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_arguments_written_by_the_template_are_read_back_equal(
    tokenizer: PreTrainedTokenizerBase, name: str, arguments: dict[str, Any]
) -> None:
    tokenizer.chat_template = TEMPLATES[name]
    form = FORMATS[name.split()[0]]
    if form.name == "xml":  # which has no way to write this in a value
        texts = [f"\n{value}\n" for value in arguments.values() if isinstance(value, str)]
        assume(not any(re.search(r"\n</parameter>\n<|<parameter=[^\n]*>\n", text) for text in texts))
    properties = {key: {"type": TYPES[type(value)]} for key, value in arguments.items()}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}]
    count = 1 if form.name == "llama" else 2
    text = write(tokenizer, [make_call("add", arguments)] * count)
    said, calls, unparsed = split_calls(text, form, tools, thinks="thoughts" in name)
    assert [(called, json.loads(read)) for called, read in calls] == [("add", arguments)] * count
    assert (said.replace("</think>", "").strip(), unparsed) == ("", 0)


HERMES = '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>'
XML = "<tool_call>\n<function=add>\n%s</function>\n</tool_call>"
GOOD = {
    "hermes": HERMES % '{"a": 1}',
    "xml": XML % "<parameter=a>\n1\n</parameter>\n",
    "llama": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
}
BROKEN = {
    "infinity": ("hermes", HERMES % '{"a": 1e400}'),
    "minus infinity": ("mistral", '[TOOL_CALLS]add[ARGS]{"a": [-1e999]}'),
    "half a character": ("hermes", HERMES % '{"b": "\\ud800"}'),
    "half a character as a key": ("llama", '{"name": "add", "parameters": {"\\udfff": 1}}'),
    "a call in a thought": ("hermes", f"<think>maybe {GOOD['hermes']}</think>No."),
    "a call in an endless thought": ("xml", f"<think>\n{GOOD['xml']}"),
    "a call in a later thought": ("mistral", f"So. <think>{GOOD['mistral']}</think>"),
    "a value that ends early": ("xml", XML % "<parameter=b>\n\n</parameter>\n</function>\n</tool_call>\n."),
    "a parameter twice": ("xml", XML % ("<parameter=b>\n1\n</parameter>\n" * 2)),
    "a number that is none": ("xml", XML % "<parameter=a>\none\n</parameter>\n"),
    "a call that is cut off": ("xml", GOOD["xml"][:-20]),
    "a call in a value that is cut off": ("xml", f"<tool_call>\n<function=add>\n<parameter=b>\n{GOOD['xml']}\n"),
    "no object": ("llama", '{"name": "add", "parameters": [1]}'),
    "text after the call": ("llama", GOOD["llama"] + " and more"),
    "code": ("llama", "<|python_tag|>print(1)"),
    "a list without calls": ("mistral", '[TOOL_CALLS][{"arguments": {}}]'),
}  # fmt: skip


@pytest.mark.parametrize("step", [0, 1, 5])
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_call_is_text_and_counted(policy: Policy, name: str, step: int) -> None:
    form, text = BROKEN[name]
    policy.tokenizer.chat_template = TEMPLATES[form]
    completions = PolicyCompletions(policy, "policy", 1000)
    choice = answer(completions, text, step=step)
    assert (choice["message"]["content"], functions(choice), choice["finish_reason"]) == (text, [], "stop")
    assert choice["tool_calls_unparsed"] == completions.conversations.counts["tool_calls_unparsed"] >= 1


@pytest.mark.parametrize("step", [0, 1, 5])
@pytest.mark.parametrize("form", GOOD)
def test_a_call_is_read_from_a_stream_as_from_a_whole_answer(policy: Policy, form: str, step: int) -> None:
    policy.tokenizer.chat_template = TEMPLATES[form]
    completions = PolicyCompletions(policy, "policy", 1000)
    before = "" if form == "llama" else "<think>Is it <b>?</think>\n\nI add."
    choice = answer(completions, f"{before}\n\n{GOOD[form]}", step=step)
    assert functions(choice) == [("add", {"a": 1})]
    assert (choice["message"]["content"], choice["finish_reason"]) == (before or None, "tool_calls")
    assert "tool_calls_unparsed" not in choice
    plain = answer(completions, '{"answer": 4}', step=step)
    assert (plain["message"]["content"], "tool_calls_unparsed" in plain) == ('{"answer": 4}', False)


def test_a_call_is_not_run_if_the_prompt_ends_inside_of_a_thought(policy: Policy) -> None:
    policy.tokenizer.chat_template = TEMPLATES["xml with thoughts"]
    completions = PolicyCompletions(policy, "policy", 1000)
    choice = answer(completions, GOOD["xml"])
    assert (functions(choice), choice["tool_calls_unparsed"]) == ([], 1)
    assert functions(answer(completions, "so\n</think>\n\n" + GOOD["xml"])) == [("add", {"a": 1})]


def test_numbers_beyond_64_bits_come_back_in_the_conversation(policy: Policy) -> None:
    policy.tokenizer.chat_template = TEMPLATES["hermes"]
    completions = PolicyCompletions(policy, "policy", 1000)
    message = answer(completions, HERMES % f'{{"a": {10**30}}}')["message"]
    said = [*QUESTION, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}]
    prompt = completions.prompt(parse_request(ChatRequest, {"messages": said, "tools": TOOLS}, ["policy"]))
    assert prompt.continued > 0


# A call that is forced


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_forced_call_is_begun_by_tokens_of_the_prompt_and_continued_by_the_next_turn(
    policy: Policy, name: str, choice: Any
) -> None:
    policy.tokenizer.chat_template = TEMPLATES[name]
    completions = PolicyCompletions(policy, "policy", 1000)
    tools = [*TOOLS, {"type": "function", "function": {"name": "other"}}]
    free = completions.prompt(parse_request(ChatRequest, {"messages": QUESTION, "tools": tools}, ["policy"]))
    request = parse_request(ChatRequest, {"messages": QUESTION, "tools": tools, "tool_choice": choice}, ["policy"])
    prompt = completions.prompt(request)
    assert prompt.token_ids[: -prompt.n_forced] == free.token_ids
    forced = completions.tokenizer.decode(prompt.token_ids[-prompt.n_forced :])
    wanted = write(completions.tokenizer, [make_call("add", {"a": 1})])
    assert wanted.startswith(forced)
    assert ("add" in forced) == (choice != "required")
    for stream in (False, True):
        rest = write(completions.tokenizer, [make_call("add", {"a": 1})])[len(forced) :]
        tokens = [Token(each, -0.5, (), 3) for each in [*completions.conversations.encode(rest), 258]]
        reply = CompletionAnswer(completions, request, prompt)
        if stream:
            first, *_ = [*reply.begin(3), reply.feed(0, tokens)]
            assert first["forced_tokens"] == prompt.n_forced
            (delta,) = [reply.end(0, Generation(tokens, "stop"))["choices"][0]["delta"]]
            assert delta["tool_calls"][0]["function"]["name"] == "add"
            continue
        body = reply.whole([Generation(tokens, "stop")])
        assert (functions(body["choices"][0]), body["forced_tokens"]) == ([("add", {"a": 1})], prompt.n_forced)
        message = body["choices"][0]["message"]
        assert message["content"] is None
        following = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
        asked = {"messages": [*QUESTION, message, following], "tools": tools}
        assert completions.prompt(parse_request(ChatRequest, asked, ["policy"])).continued == len(
            prompt.token_ids
        ) + len(tokens)


def test_a_tool_choice_that_cannot_be_met_is_refused(policy: Policy) -> None:
    policy.tokenizer.chat_template = TEMPLATES["hermes"]
    completions = PolicyCompletions(policy, "policy", 1000)
    for choice, said in (
        ({"type": "function", "function": {"name": "sub"}}, "the tools are add"),
        ({"type": "allowed_tools"}, "not supported"),
        ("always", "not supported"),
    ):
        with pytest.raises(CompletionError, match=said) as caught:
            answer(completions, "", tool_choice=choice)
        assert (caught.value.status, caught.value.param) == (400, "tool_choice")


# Thoughts of earlier turns

DROPS = template("", thought="{%- if keep is defined or loop.last %}{{- '' }}{%- endif %}").replace(
    "{{- message.content }}", "{{- message.content if ARGUMENT else message.content.split('</think>')[-1] }}"
)


@pytest.mark.parametrize("argument", ["preserve_thinking is true", "clear_thinking is false"])
def test_thoughts_of_earlier_turns_are_kept_where_the_template_can_keep_them(policy: Policy, argument: str) -> None:
    policy.tokenizer.chat_template = DROPS.replace(
        "ARGUMENT", argument.replace(" is", " is defined and " + argument.split()[0] + " is")
    )
    said = [*QUESTION, {"role": "assistant", "content": "<think>Hm.</think>4"}, *QUESTION]
    request = parse_request(ChatRequest, {"messages": said}, ["policy"])
    for keep in (False, True):
        prompt = PolicyCompletions(policy, "policy", 1000, keep_thinking=keep).prompt(request)
        assert ("Hm." in prompt.text) == keep


def test_thoughts_that_the_template_always_drops_cannot_be_kept(policy: Policy) -> None:
    policy.tokenizer.chat_template = DROPS.replace("ARGUMENT", "false")
    with pytest.raises(ConfigError, match="keep_thinking: .*drops <think> blocks"):
        PolicyCompletions(policy, "policy", 1000, keep_thinking=True)
