from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning_algorithms.shared.policy.model import Policy
from agentlightning_algorithms.shared.policy.server.conversation import Conversations, Prompt

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASK = {"role": "user", "content": "1 + 2?"}
END = 258  # <|im_end|>


@pytest.fixture
def conversations(tiny_policy: Policy) -> Conversations:
    return Conversations(tiny_policy.tokenizer, tiny_policy.stop_ids)


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def sent(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message in the form in which the server reads it when a client sends it back."""
    calls = [
        {**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}}
        for c in message.get("tool_calls") or []
    ]
    return {"refusal": None, **message, "content": message.get("content") or "", "tool_calls": calls}


def answer(
    conversations: Conversations, prompt: Prompt, message: dict[str, Any], text: str, *, end: bool = True
) -> list[int]:
    """Remembers an answer that was sampled as ``text``; returns the tokens of its prompt and of the answer."""
    response = [*conversations.encode(text), *([END] if end else [])]
    conversations.remember(prompt, message, response)
    return [*prompt.token_ids, *response]


def test_sampled_tokens_are_reused_although_the_template_renders_them_differently(conversations: Conversations) -> None:
    first = conversations.prompt([ASK], [TOOL])
    message = call('{"a":1,"b":2}')
    said = '<tool_call>{"arguments":{"a":1,"b":2},"name":"add"}</tool_call>'
    known = answer(conversations, first, message, said)
    result = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    prompt = conversations.prompt([ASK, sent(message), result], [TOOL])
    assert prompt.token_ids[: len(known)] == known
    assert prompt.continued == len(known)
    rest = "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.token_ids[len(known) :] == conversations.encode(rest)
    assert said not in prompt.text
    assert conversations.counts["drift_template"] == conversations.counts["prompts_continued"] == 1


def test_the_same_text_in_other_tokens_is_counted_as_token_drift(
    conversations: Conversations, tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = conversations.prompt([ASK], None)
    encode = tiny_policy.tokenizer.encode
    response = [*encode("three", add_special_tokens=False), END]
    conversations.remember(first, {"role": "assistant", "content": "three"}, response)
    known = [*first.token_ids, *response]

    def merge(text: str, **options: Any) -> list[int]:  # a tokenizer that would have used one token for "three"
        return [7] if text == "three" else encode(text, **options)

    monkeypatch.setattr(tiny_policy.tokenizer, "encode", merge)
    prompt = conversations.prompt([ASK, {"role": "assistant", "content": "three"}, ASK], None)
    assert prompt.token_ids[: len(known)] == known
    counts = conversations.counts
    assert (counts["drift_tokens"], counts["drift_template"], counts["drift_none"]) == (1, 0, 0)


def test_a_cut_off_answer_gets_the_end_that_the_template_writes(conversations: Conversations) -> None:
    first = conversations.prompt([ASK], None)
    known = answer(conversations, first, {"role": "assistant", "content": "thr"}, "thr", end=False)
    prompt = conversations.prompt([ASK, {"role": "assistant", "content": "thr"}, ASK], None)
    assert prompt.token_ids == conversations.encode(prompt.text)
    assert prompt.token_ids[: len(known) + 1] == [*known, END]
    assert conversations.counts["drift_none"] == 1


def test_every_turn_continues_the_tokens_of_the_previous_turn(conversations: Conversations) -> None:
    messages: list[dict[str, Any]] = []
    known: list[int] = []
    for turn in range(5):
        messages.append({"role": "user", "content": f"question {turn}"})
        prompt = conversations.prompt(messages, None)
        assert prompt.token_ids[: len(known)] == known
        said = {"role": "assistant", "content": f"answer {turn}"}
        known = answer(conversations, prompt, said, f"answer {turn} ")  # the agent strips it; the tokens stay
        messages.append(said)
    assert conversations.counts["prompts_continued"] == conversations.counts["drift_template"] == 4


@pytest.mark.parametrize(
    "history",
    [
        [ASK, {"role": "assistant", "content": "edited"}, ASK],
        [{"role": "user", "content": "another"}, {"role": "assistant", "content": "three"}, ASK],
        [{"role": "system", "content": "new"}, ASK, {"role": "assistant", "content": "three"}, ASK],
    ],
)
def test_a_changed_history_is_tokenized_as_a_whole(conversations: Conversations, history: list[dict[str, Any]]) -> None:
    answer(conversations, conversations.prompt([ASK], None), {"role": "assistant", "content": "three"}, "three")
    prompt = conversations.prompt(history, None)
    assert prompt.token_ids == conversations.encode(prompt.text)
    assert (prompt.continued, conversations.counts["prompts_unknown"]) == (0, 1)


def test_chat_template_arguments_reach_the_template_and_separate_conversations(
    conversations: Conversations, tiny_policy: Policy
) -> None:
    template = tiny_policy.tokenizer.chat_template
    tiny_policy.tokenizer.chat_template = f"{template}{{% if enable_thinking is false %}}<think></think>{{% endif %}}"
    plain = {"enable_thinking": False}
    first = conversations.prompt([ASK], None)
    assert "think" not in first.text
    answer(conversations, first, {"role": "assistant", "content": "three"}, "three")
    assert conversations.prompt([ASK], None, plain).text == f"{first.text}<think></think>"
    other = conversations.prompt([ASK, {"role": "assistant", "content": "three"}, ASK], None, plain)
    assert (other.continued, conversations.counts["prompts_unknown"]) == (0, 1)


def test_an_assistant_message_added_by_the_agent_keeps_the_tokens_before_it(conversations: Conversations) -> None:
    first = conversations.prompt([ASK], None)
    known = answer(conversations, first, {"role": "assistant", "content": "three"}, "three ")
    own = {"role": "assistant", "content": "I said so."}
    prompt = conversations.prompt([ASK, {"role": "assistant", "content": "three"}, ASK, own, ASK], None)
    assert prompt.token_ids[: len(known)] == known
    assert prompt.continued == len(known)


def test_a_template_that_rewrites_earlier_messages_is_detected(
    conversations: Conversations, tiny_policy: Policy
) -> None:
    # Like templates that drop the thoughts of earlier turns.
    tiny_policy.tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    message = {"role": "assistant", "content": "<think>hm</think>three"}
    answer(conversations, conversations.prompt([ASK], None), message, "<think>hm</think>three")
    prompt = conversations.prompt([ASK, message, ASK], None)
    assert prompt.token_ids == conversations.encode(prompt.text)
    assert "hm" not in prompt.text
    assert conversations.counts["prompts_rewritten"] == 1


def test_a_prompt_with_other_tools_does_not_continue_a_conversation(conversations: Conversations) -> None:
    message = {"role": "assistant", "content": "three"}
    answer(conversations, conversations.prompt([ASK], [TOOL]), message, "three")
    assert conversations.prompt([ASK, message, ASK], None).continued == 0
    assert conversations.prompt([ASK, message, ASK], [TOOL]).continued > 0


def test_memory_is_bounded_by_evicting_the_least_recently_used(tiny_policy: Policy) -> None:
    conversations = Conversations(tiny_policy.tokenizer, tiny_policy.stop_ids, max_tokens=200)
    message = {"role": "assistant", "content": "x" * 20}
    questions = [{"role": "user", "content": f"{i}"} for i in range(10)]
    for question in questions:
        answer(conversations, conversations.prompt([question], None), message, "x" * 20)
    continued = [conversations.prompt([q, message, q], None).continued > 0 for q in questions]
    assert continued == sorted(continued)
    assert 1 <= sum(continued) < 6


def test_the_rollouts_of_a_group_share_the_rendering_and_tokenization_of_their_prompt(
    conversations: Conversations, tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for name in ("apply_chat_template", "encode"):
        function = getattr(tiny_policy.tokenizer, name)

        def count(*args: Any, name: str = name, function: Any = function, **settings: Any) -> Any:
            made.append(name)
            return function(*args, **settings)

        monkeypatch.setattr(tiny_policy.tokenizer, name, count)
    prompts = [conversations.prompt([ASK], [TOOL]) for _ in range(8)]
    assert made == ["apply_chat_template", "encode"]
    prompts[0].token_ids.append(END)  # a prompt belongs to its request
    assert prompts[1].token_ids == prompts[7].token_ids == conversations.prompt([ASK], [TOOL]).token_ids
    assert conversations.counts["prompts_new"] == 9


def test_the_fields_of_a_tool_are_rendered_in_the_order_of_the_request(conversations: Conversations) -> None:
    function: Any = TOOL["function"]
    turned = {"type": "function", "function": dict(reversed(function.items()))}
    assert turned == TOOL
    first, second = (conversations.prompt([ASK], [tool]).text for tool in (TOOL, turned))
    assert json.dumps(function) in first
    assert json.dumps(turned["function"]) in second


def test_a_template_that_writes_ids_of_tool_calls_gets_the_ids_from_the_agent(
    conversations: Conversations, tiny_policy: Policy
) -> None:
    template = str(tiny_policy.tokenizer.chat_template)
    ids = "{% for message in messages if message.tool_call_id %}[{{ message.tool_call_id }}]{% endfor %}"
    tiny_policy.tokenizer.chat_template = ids + template
    for number in range(2):
        message = sent(call('{"a":1}'))
        message["tool_calls"][0]["id"] = f"call_{number}"
        result = {"role": "tool", "tool_call_id": f"call_{number}", "content": "3"}
        assert conversations.prompt([ASK, message, result], [TOOL]).text.startswith(f"[call_{number}]")


def test_an_answer_with_thoughts_continues_although_they_come_back_under_both_names(
    conversations: Conversations,
) -> None:
    first = conversations.prompt([ASK], None)
    message = {"role": "assistant", "content": "3", "reasoning_content": "Hm."}
    known = answer(conversations, first, message, "<think>Hm.</think>3")
    back = [ASK, {**message, "reasoning": "Hm."}, ASK]
    prompt = conversations.prompt(back, None)
    assert prompt.continued == len(known)
    assert conversations.counts["drift_template"] == 0
    assert conversations.prompt([ASK, {**message, "reasoning_content": "No.", "reasoning": "No."}], None).continued == 0
