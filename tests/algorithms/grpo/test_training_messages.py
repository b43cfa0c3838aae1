"""Training reads messages as serving does, in every form of content, and refuses those that it cannot read."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning_algorithms.offline.training import SFT, make_rows
from agentlightning_algorithms.shared.policy.model import Policy, load_policy
from agentlightning_algorithms.shared.policy.server.request import ChatRequest, PolicyCompletions, parse_request
from agentlightning_plugins.demo.training import CHECKPOINT
from agentlightning_plugins.shared.chat_history import FineTuningExample
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest
from tests.algorithms.grpo.test_sft import tune
from tests.algorithms.prompt_lab import Server
from tests.algorithms.tiny_model import CHAT_TEMPLATE

FORMS: dict[str, Any] = {
    "text": lambda text: text,
    "one-part": lambda text: [{"type": "text", "text": text}],
    "two-parts": lambda text: [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:]}],
}
ROLES = ("system", "user", "assistant", "tool")
TEMPLATES = {
    "hermes": CHAT_TEMPLATE,
    "demo": (CHECKPOINT / "chat_template.jinja").read_text(),
    "thinking": (
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}"
        "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def conversation(**forms: str) -> list[dict[str, Any]]:
    """Returns a conversation whose messages of a role have content of a form."""

    def say(role: str, text: str, **fields: Any) -> dict[str, Any]:
        return {"role": role, "content": FORMS[forms.get(role, "text")](text), **fields}

    return [
        say("system", "Be terse."),
        say("user", "What is it?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        say("tool", "moo, it says", tool_call_id="1"),
        say("assistant", "A cow."),
        say("user", "And now?"),
    ]


def serve(policy: Policy, messages: list[dict[str, Any]]) -> tuple[int, ...]:
    """Returns the tokens of the prompt that the policy server gives to the model."""
    request = parse_request(ChatRequest, {"messages": messages}, ["policy"])
    return tuple(PolicyCompletions(policy, "policy", 100).prompt(request).token_ids)


@pytest.mark.parametrize("template", TEMPLATES)
def test_training_renders_what_the_policy_server_renders_for_every_form_of_content(
    tiny_policy: Policy, template: str
) -> None:
    tiny_policy.tokenizer.chat_template = TEMPLATES[template]
    plain = serve(tiny_policy, conversation())
    for forms in itertools.product(FORMS, repeat=len(ROLES)):
        messages = conversation(**dict(zip(ROLES, forms, strict=True)))
        answer = {"role": "assistant", "content": FORMS[forms[2]]("Two cows.")}
        rows, _ = make_rows(tiny_policy, [FineTuningExample(messages=[*messages, answer])])
        assert [tuple(row.prompt_ids) for row in rows] == [
            serve(tiny_policy, messages[:2]), serve(tiny_policy, messages[:4]), plain
        ]  # fmt: skip
        assert "Two cows.<|im_end|>" in str(tiny_policy.tokenizer.decode(list(rows[-1].response_ids)))


def test_recorded_conversations_are_trained_as_they_were_served_with_the_reasoning_of_the_model(
    tmp_path: Path, tiny_model: Path
) -> None:
    def model(request: RecordedRequest) -> Answer:
        return Answer("Two cows.", reasoning="I count them.")

    def agent(task: dict[str, str], llm: agl.LLM) -> float:
        import openai

        with openai.OpenAI(base_url=llm.endpoint, api_key="any", max_retries=0) as client:
            messages: Any = conversation(**task)
            client.chat.completions.create(model="m", messages=messages)
        return 1.0

    tasks = [{role: form} for role in ROLES for form in FORMS]
    with Server(model) as server:
        trainer = agl.Trainer(
            algorithm={"name": "baseline", "train_split": 1.0}, strategy="shm", trackers=[], run_dir=tmp_path / "run",
            initial_resources={"llm": agl.LLM(endpoint=server.endpoint, model="m")},
        )  # fmt: skip
        assert trainer.fit(agent, tasks).status == "succeeded"
    examples = asyncio.run(SFT(model=str(tiny_model), source=str(tmp_path / "run")).read_examples())
    assert len(examples) == len(tasks)
    policy = load_policy(tiny_model)
    policy.tokenizer.chat_template = TEMPLATES["thinking"]
    exported = [FineTuningExample.model_validate_json(example.model_dump_json()) for example in examples]
    for example in (*examples, *exported):
        rows, _ = make_rows(policy, [example])
        assert tuple(rows[-1].prompt_ids) == serve(policy, conversation())
        answer = str(policy.tokenizer.decode(list(rows[-1].response_ids)))
        assert answer == "<think>I count them.</think>Two cows.<|im_end|>"


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "image": (
        {"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]},
        "content.1: this model reads only",
    ),
    "null-text": ({"role": "user", "content": [{"type": "text", "text": None}]}, "content.0: this model reads only"),
    "bare-text": ({"role": "user", "content": ["see"]}, "content.0: this model reads only"),
    "number": ({"role": "user", "content": 7}, "content must be a string or a list of parts"),
    "no-role": ({"content": "see"}, " has no role"),
    "calls": ({"role": "assistant", "tool_calls": {"name": "add"}}, "tool_calls must be a list of function calls"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_message_that_cannot_be_read_is_refused_with_its_place(tmp_path: Path, tiny_model: Path, case: str) -> None:
    message, complaint = UNREADABLE[case]
    good, answer = {"role": "user", "content": "moo"}, {"role": "assistant", "content": "moo"}
    pair = {"input": {"messages": [good]}, "preferred_output": [answer], "non_preferred_output": [answer]}
    lines = {
        "messages.1": ("sft", {"messages": [good, message, answer]}),
        "input.messages.1": ("dpo", {**pair, "input": {"messages": [good, message]}}),
        "non_preferred_output.1": ("dpo", {**pair, "non_preferred_output": [answer, message]}),
    }
    for place, (name, line) in lines.items():
        file = tmp_path / "data.jsonl"
        good_line = pair if name == "dpo" else {"messages": [good, answer]}
        file.write_text(f"{json.dumps(good_line)}\n{json.dumps(line)}\n")
        algorithm = {"name": name, "model": str(tiny_model), "source": str(file)}
        separator = "" if complaint.startswith(" ") else "."
        with pytest.raises(agl.ConfigError) as error:
            agl.Trainer(algorithm=algorithm, strategy="shm", trackers=[]).fit()
        assert "data.jsonl:2 is not of the form" in str(error.value)
        assert f": {place}{separator}{complaint}" in str(error.value)


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_a_source_whose_answers_are_all_empty_is_refused_before_the_first_update(
    tmp_path: Path, tiny_model: Path, name: str
) -> None:
    ask, empty = {"role": "user", "content": "moo?"}, {"role": "assistant", "content": ""}
    pair = {"input": {"messages": [ask]}, "preferred_output": [empty], "non_preferred_output": [empty]}
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"messages": [ask, empty]} if name == "sft" else pair))
    with pytest.raises(agl.ConfigError, match="answers to learn from are empty"):
        tune(tmp_path / "run", tiny_model, file, name=name)
