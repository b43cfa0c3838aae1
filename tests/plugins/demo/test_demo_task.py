"""The demo's task, agent and checkpoint: what the training builds on."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from examples.demo.warm_start import demonstrate, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import agentlightning_plugins.demo
from agentlightning.resources import LLM
from agentlightning_plugins.demo.agent import CALCULATOR, SYSTEM_PROMPT, calculate, calculator_agent
from agentlightning_plugins.demo.task import SPLITS, TEMPLATES, Operator, Problem, apply, make_problems, number_pairs
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI

CHECKPOINT = Path(agentlightning_plugins.demo.__file__).with_name("checkpoint")
PROBLEM = Problem(question="Ann has 23 apples and buys 14 more. How many apples now?", answer=37)


def numbers_of(problem: Problem) -> frozenset[int]:
    return frozenset(int(word.strip(".,")) for word in problem["question"].split() if word.strip(".,").isdigit())


def test_splits_share_no_pair_of_numbers() -> None:
    pairs = {split: {numbers_of(problem) for problem in make_problems(split, 2000)} for split in SPLITS}
    assert all(len(found) > 100 for found in pairs.values())
    assert pairs["train"].isdisjoint(pairs["val"] | pairs["test"])
    assert pairs["val"].isdisjoint(pairs["test"])


def test_every_operation_has_tasks_in_every_split() -> None:
    for operator in get_args(Operator):
        for split in SPLITS:
            assert len(number_pairs(operator, split)) >= 20


def test_problems_depend_only_on_split_and_seed() -> None:
    assert make_problems("train", 50) == make_problems("train", 60)[:50]
    assert make_problems("train", 50) != make_problems("train", 50, seed=1)
    # Figures in the documentation were measured on these problems, so the generator must not change unnoticed.
    assert make_problems("test", 2) == [
        Problem(question="Ida fills 14 bags with 5 shells each. How many are inside?", answer=70),
        Problem(question="Leo buys 2 boxes of 13 cards. How many cards is that?", answer=26),
    ]


def test_every_problem_of_a_template_has_a_whole_number_up_to_99_as_its_answer() -> None:
    for template in TEMPLATES:
        for split in SPLITS:
            assert all(
                1 <= (apply(template.operator, *pair) or 0) <= 99 for pair in number_pairs(template.operator, split)
            )
    for problem in make_problems("train", 200):
        a, b = (int(word.strip(".,")) for word in problem["question"].split() if word.strip(".,").isdigit())
        assert problem["answer"] in {a + b, a - b, a * b, a / b}


def ask(expression: Any) -> str:
    return calculate(json.dumps({"expression": expression}))


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("23 + 14", "37"),
        ("7 - 9", "-2"),
        ("6*7", "42"),
        ("84 / 7", "12"),
        ("7 / 2", "3.5"),
        ("2 / 3", "0.67"),
        ("-(1 + 2) * 4", "-12"),
    ],
)
def test_the_calculator_evaluates_arithmetic_expressions(expression: str, result: str) -> None:
    assert ask(expression) == result


def test_the_model_gets_an_error_message_for_a_division_by_zero() -> None:
    assert ask("1 / (2 - 2)") == "error: division by zero"


def test_the_calculator_never_runs_code(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    attacks: list[Any] = [
        f"open({str(target)!r}, 'w')",
        "__import__('os').getpid()",
        "(1).__class__",
        "[1 for _ in '1']",
        "lambda: 1",
        "'a' * 3",
        "9 ** 9 ** 9",
        "1 if 1 else 2",
        "x",
        "",
        "1 +",
        "(" * 60,
        "\0",
        5,
        None,
        ["1"],
    ]
    for attack in attacks:
        assert ask(attack) == "error: not an arithmetic expression", attack
    assert ask("1" * 101) == "error: the expression is too long"
    assert not target.exists()


@pytest.mark.parametrize("arguments", ["", "{", "[]", "null", '"1 + 1"', '{"formula": "1 + 1"}'])
def test_the_model_gets_an_error_message_for_arguments_of_the_wrong_form(arguments: str) -> None:
    assert calculate(arguments) == "error: not an arithmetic expression"


def oracle(request: RecordedRequest) -> Answer:
    """A model that understands the question."""
    messages = request.body["messages"]
    if messages[-1]["role"] == "tool":
        return Answer(messages[-1]["content"])
    words = [word.strip(".,") for word in messages[1]["content"].split()]
    a, b = (word for word in words if word.isdigit())
    return Answer(tool_calls=[("calculator", {"expression": f"{a} + {b}"})])


async def reward_of(server: ScriptedOpenAI, task: Problem = PROBLEM) -> float:
    llm = LLM(
        endpoint=server.endpoint,
        model="tiny",
        api_key="key",
        sampling_parameters={"temperature": 0.5, "max_tokens": 12},
    )
    return await asyncio.to_thread(calculator_agent, task, llm)


async def test_a_right_answer_that_uses_the_tool_has_a_reward_of_1() -> None:
    async with ScriptedOpenAI(oracle, api_key="key") as server:
        assert await reward_of(server) == 1.0
    first, second = (request.body for request in server.requests)
    assert first["messages"] == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": PROBLEM["question"]},
    ]
    assert first["tools"] == [CALCULATOR]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("tiny", 0.5, 12)
    called, result = second["messages"][2:]
    assert called["tool_calls"][0]["function"]["arguments"] == '{"expression": "23 + 14"}'
    assert result == {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "37"}


@pytest.mark.parametrize(
    "script",
    [
        [Answer(tool_calls=[("calculator", {"expression": "23 - 14"})]), Answer("9")],
        [Answer("The answer is 37")],
        [Answer("")],
        [Answer(tool_calls=[("calculator", {"expression": "23 / 0"})]), Answer("error: division by zero")],
    ],
    ids=["wrong operator", "not only the number", "nothing", "division by zero"],
)
async def test_a_wrong_answer_has_a_reward_of_0(script: list[Answer]) -> None:
    async with ScriptedOpenAI(script) as server:
        assert await reward_of(server) == 0.0


async def test_the_model_can_recover_from_a_tool_error() -> None:
    script = [
        Answer(tool_calls=[("calculator", {"expression": "23 +"})]),
        Answer(tool_calls=[("calculator", {"expression": "23 + 14"})]),
        Answer("37"),
    ]
    async with ScriptedOpenAI(script) as server:
        assert await reward_of(server) == 1.0
    assert server.requests[1].body["messages"][-1]["content"] == "error: not an arithmetic expression"


async def test_a_model_that_never_answers_is_stopped_after_four_turns() -> None:
    async with ScriptedOpenAI([Answer(tool_calls=[("calculator", {"expression": "1 + 1"})])]) as server:
        assert await reward_of(server) == 0.0
    assert len(server.requests) == 4


async def test_a_failed_model_call_raises_and_is_not_repeated() -> None:
    async with ScriptedOpenAI([Answer(status=500)]) as server:
        with pytest.raises(Exception, match="scripted error"):
            await reward_of(server)
    assert len(server.requests) == 1


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(CHECKPOINT)
    return loaded


def conversation(turns: int) -> list[dict[str, Any]]:
    """Returns the first messages of a conversation with two tool calls, in the form of the OpenAI API."""

    def call(arguments: str) -> dict[str, Any]:
        return {"id": "call-1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}

    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": PROBLEM["question"]},
        {"role": "assistant", "content": None, "tool_calls": [call('{"expression": "23 / 0"}')]},
        {"role": "tool", "tool_call_id": "call-1", "content": "error: division by zero"},
        {"role": "assistant", "content": None, "tool_calls": [call('{"expression": "23 + 14"}')]},
        {"role": "tool", "tool_call_id": "call-1", "content": "37"},
        {"role": "assistant", "content": "37"},
    ]
    return messages[:turns]


def render(tokenizer: PreTrainedTokenizerBase, turns: int, *, ask: bool) -> str:
    text = tokenizer.apply_chat_template(
        conversation(turns), tools=[dict(CALCULATOR)], add_generation_prompt=ask, tokenize=False
    )
    assert isinstance(text, str)
    return text


def test_the_chat_template_renders_a_conversation_like_that_of_qwen(tokenizer: PreTrainedTokenizerBase) -> None:
    def call(expression: str) -> str:
        return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'

    turns = [
        f"system\n{SYSTEM_PROMPT}\n<tools>\n{json.dumps(CALCULATOR)}\n</tools>",
        f"user\n{PROBLEM['question']}",
        f"assistant\n{call('23 / 0')}",
        "tool\nerror: division by zero",
        f"assistant\n{call('23 + 14')}",
        "tool\n37",
        "assistant\n37",
    ]
    assert render(tokenizer, 7, ask=False) == "".join(f"<|im_start|>{turn}<|im_end|>" for turn in turns)


def test_tool_arguments_render_the_same_as_text_and_as_an_object(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = conversation(3)
    messages[2]["tool_calls"][0]["function"]["arguments"] = {"expression": "23 / 0"}
    as_object = tokenizer.apply_chat_template(messages, tools=[dict(CALCULATOR)], tokenize=False)
    assert as_object == render(tokenizer, 3, ask=False)


def test_the_next_prompt_begins_with_the_tokens_of_the_last_prompt_and_reply(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    for turns in (2, 4, 6):
        prompt = tokenizer(render(tokenizer, turns, ask=True))["input_ids"]
        replied = tokenizer(render(tokenizer, turns + 1, ask=False))["input_ids"]
        reply = replied[len(prompt) :]
        assert replied[: len(prompt)] == prompt
        assert reply[-1] == tokenizer.eos_token_id
        assert len(reply) <= 6
        if turns < 6:
            after = tokenizer(render(tokenizer, turns + 2, ask=True))["input_ids"]
            assert after[: len(replied)] == replied


def test_every_prompt_of_the_task_is_short(tokenizer: PreTrainedTokenizerBase) -> None:
    for problem in make_problems("test", 100):
        chat = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": problem["question"]}]
        text = tokenizer.apply_chat_template(chat, tools=[dict(CALCULATOR)], add_generation_prompt=True, tokenize=False)
        assert len(tokenizer(text)["input_ids"]) <= 24


@pytest.mark.parametrize(
    "text", ["", " ", "a  b\n\n\tc", "héllo 世界 🙂", "1234567 x*y ** -3.5 <tool", "<|im_end|><|pad|>"]
)
def test_the_tokenizer_reproduces_any_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_checkpoint_is_small_and_has_the_scripts_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 1_000_000
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    made = make_tokenizer()
    assert made.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert made.chat_template == tokenizer.chat_template


def test_the_checkpoint_calls_the_tool_in_the_right_form_but_mostly_with_the_wrong_operator(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """With greedy decoding it calls the tool with numbers, mostly with the wrong operator."""
    model: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    assert model.dtype == torch.float32
    problems = make_problems("val", 96)
    chats = [demonstrate(problem, random.Random(0))[:2] for problem in problems]
    prompts = tokenizer.apply_chat_template(chats, tools=[dict(CALCULATOR)], add_generation_prompt=True, tokenize=False)
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    output = model.generate(**batch, max_new_tokens=6, do_sample=False)[:, batch["input_ids"].shape[1] :]
    opening, closing = '<tool_call>\n{"name": "calculator", "arguments": ', "}\n</tool_call><|im_end|>"
    right = 0
    for problem, reply in zip(problems, tokenizer.batch_decode(output), strict=True):
        assert reply.startswith(opening)
        assert reply.endswith(closing)
        right += calculate(reply.removeprefix(opening).removesuffix(closing)) == str(problem["answer"])
    assert 0.1 * len(problems) <= right <= 0.3 * len(problems)
