"""Supervised fine-tuning on recorded rollouts and on files, and training that starts from its model."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.plugin.registry import get_manager
from agentlightning_algorithms.offline import training
from agentlightning_algorithms.offline.training import SFT, make_rows
from agentlightning_algorithms.shared.policy.model import Policy, load_policy
from agentlightning_algorithms.shared.policy.settings import UpdateSettings
from agentlightning_plugins.demo.agent import calculate, calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.demo.training import CHECKPOINT
from agentlightning_plugins.shared.chat_history import FineTuningExample
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest
from tests.algorithms.glossary import find_unexplained
from tests.algorithms.grpo.grpo_program import settings
from tests.algorithms.prompt_lab import Server
from tests.plugins.commands.agl_here import run_here
from tests.plugins.importers.test_importing import SAMPLES

pytestmark = pytest.mark.usefixtures("server_thread")
QUESTION, ANSWER = "What do you say?", "moo"


def conversation(answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]}


def tune(run: Path, model: Path, source: Path, **settings: Any) -> list[dict[str, float]]:
    """Trains and returns the metrics of each epoch, which the documentation explains."""
    algorithm = {"name": "sft", "model": str(model), "source": str(source), "train_threads": 1, **settings}
    trainer = agl.Trainer(algorithm=algorithm, strategy="shm", trackers=[], run_dir=run, resume=run.exists())
    assert trainer.fit().status == "succeeded"
    store = agl.create_store(f"sqlite:///{run}/store.db")

    async def read() -> list[dict[str, float]]:
        metrics = [dict(step.values) for step in await store.query_metrics()]
        await store.close()
        return metrics

    metrics = asyncio.run(read())
    assert find_unexplained(name for epoch in metrics for name in epoch) == set()
    return metrics


def likelihood(model: Path, answer: str = ANSWER) -> float:
    """Returns the mean log-likelihood of the tokens of an answer."""
    policy = load_policy(model)
    rows, _ = make_rows(policy, [FineTuningExample(**conversation(answer))])
    (scores,) = policy.score(rows)
    return sum(scores) / len(scores)


def test_a_model_learns_the_conversations_of_a_file_and_grpo_starts_from_it(tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "good.jsonl"
    file.write_text("".join(json.dumps(conversation(ANSWER)) + "\n" for _ in range(4)))
    run = tmp_path / "runs" / "sft"
    first = tune(run, tiny_model, file, epochs=8, batch_size=2, lr=1e-2)
    assert [step["rows"] for step in first] == [4.0] * 8
    assert first[-1]["loss"] < 0.5 < 2.0 < first[0]["loss"]
    assert likelihood(run / "checkpoint") > -0.5 > -2.0 > likelihood(tiny_model)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(conversation("quack quack")))
    own = {"val_source": str(other), "weight_decay": 0.1, "warmup_updates": 2}
    initial, *epochs = tune(tmp_path / "runs" / "other", tiny_model, file, epochs=2, batch_size=2, lr=1e-2, **own)
    assert initial == {"val_loss": pytest.approx(-likelihood(tiny_model, "quack quack"), abs=1e-4)}
    assert epochs[-1]["val_loss"] == pytest.approx(
        -likelihood(tmp_path / "runs" / "other" / "checkpoint", "quack quack"), abs=1e-4
    )
    assert [step["lr"] for step in epochs] == pytest.approx([0.75e-2, 1e-2]), "the means of two steps"
    more = tune(run, tiny_model, file, epochs=9, batch_size=2, lr=1e-2)  # resumes
    assert len(more) == 9
    assert more[-1]["loss"] < first[-1]["loss"] + 0.1
    assert agl.GRPO(model=str(run)).model == str(run / "checkpoint")


def test_sft_and_dpo_train_on_what_was_imported(tmp_path: Path, tiny_model: Path) -> None:
    samples = [str(SAMPLES / name) for name in ("completions.json", "messages.json")]
    options = ("--store", "imported", "--reward", "quality")
    said = run_here(tmp_path, "import", "openai-stored-completions", *samples, *options)
    assert said.code == 0, said
    source = tmp_path / "imported"
    *_, last = tune(tmp_path / "sft", tiny_model, source, epochs=8, lr=1e-2, min_reward=0.5)
    assert last["conversations"] == 1
    assert last["loss"] < 0.5, "of the two stored answers, it learns the good one"
    *_, last = tune(tmp_path / "dpo", tiny_model, source, epochs=2, lr=1e-3, name="dpo")
    assert (last["pairs"], last["accuracy"]) == (1, 1)


def test_sft_learns_from_the_best_rollouts_of_each_task(tmp_path: Path, tiny_model: Path) -> None:
    answers = iter(["aaa", "bbb", "ccc", "ddd", "eee", "fff"])

    def model(request: RecordedRequest) -> Answer:
        return Answer(next(answers))

    def agent(task: dict[str, Any], llm: agl.LLM) -> float:
        import openai

        with openai.OpenAI(base_url=llm.endpoint, api_key="any", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": task["name"]}]
            said = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
        return {"aaa": 0.9, "bbb": 0.8, "ccc": 0.2, "ddd": 0.7, "eee": 0.1, "fff": 0.3}[said or ""]

    tasks = [{"name": name} for name in ("one", "one", "one", "two", "two", "three")]
    recorded = tmp_path / "recorded"
    with Server(model) as server:
        trainer = agl.Trainer(
            algorithm="baseline", strategy="shm", trackers=[], run_dir=recorded, max_concurrency=1,
            initial_resources={"llm": agl.LLM(endpoint=server.endpoint, model="m")},
        )  # fmt: skip
        trainer.fit(agent, tasks, [])

    def chosen(**conditions: Any) -> set[str]:
        algorithm = SFT(model=str(tiny_model), source=str(recorded), **conditions)
        return {each.messages[-1]["content"] for each in asyncio.run(algorithm.read_examples())}

    assert chosen() == {"aaa", "bbb", "ccc", "ddd", "eee", "fff"}
    assert chosen(best_of=1) == {"aaa", "ddd", "fff"}
    assert chosen(best_of=2, min_reward=0.5) == {"aaa", "bbb", "ddd"}
    with pytest.raises(agl.ConfigError, match=r"no conversation to learn from.*min_reward = 2"):
        chosen(min_reward=2.0)
    (step,) = tune(tmp_path / "sft", tiny_model, recorded, best_of=1, min_reward=0.5)
    assert (step["conversations"], step["rows"]) == (2.0, 2.0)


def solve(request: RecordedRequest) -> Answer:
    """Solves the problems of the demo: calls the calculator, then answers with its result."""
    messages = request.body["messages"]
    if messages[-1]["role"] == "tool":
        return Answer(messages[-1]["content"])
    question = messages[1]["content"]
    first, second = re.findall(r"\d+", question)
    answer = next(each["answer"] for each in make_problems("train", 48) if each["question"] == question)
    expressions = [f"{first} {sign} {second}" for sign in "+-*/"]
    expression = next(e for e in expressions if calculate(json.dumps({"expression": e})) == str(answer))
    return Answer(tool_calls=[("calculator", {"expression": expression})])


@pytest.mark.soak
def test_grpo_after_sft_begins_with_a_higher_reward_than_from_the_base_model(tmp_path: Path) -> None:
    recorded, warm = tmp_path / "recorded", tmp_path / "warm"
    problems, held_out = make_problems("train", 48), make_problems("val", 24)
    with Server(solve) as server:
        trainer = agl.Trainer(
            algorithm="baseline", strategy="shm", trackers=[], run_dir=recorded,
            initial_resources={"llm": agl.LLM(endpoint=server.endpoint, model="m")},
        )  # fmt: skip
        assert trainer.fit(calculator_agent, problems, []).status == "succeeded"
    tune(warm, CHECKPOINT, recorded, min_reward=1.0, epochs=8, lr=3e-3)

    def reward_at_step_0(model: Path) -> float:
        store = agl.create_store("memory://")
        algorithm = settings(1, model=str(model), tasks_per_step=1, eval_every=0)
        agl.Trainer(algorithm=algorithm, store=store, strategy="shm", trackers=[]).fit(
            calculator_agent, problems, held_out
        )
        return asyncio.run(store.query_metrics()).items[0].values["val_reward"]

    base, started = reward_at_step_0(CHECKPOINT), reward_at_step_0(warm)
    assert started >= base + 0.2, f"{base:.2f} before and {started:.2f} after fine-tuning"


def test_a_row_has_the_rendered_prompt_and_ends_with_the_end_of_turn_token(tiny_policy: Policy) -> None:
    tool_call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [tool_call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": "it is 3"},
    ]
    rows, too_long = make_rows(tiny_policy, [FineTuningExample(messages=messages)])
    assert too_long == 0
    decode = tiny_policy.tokenizer.decode
    assert [decode(list(row.response_ids)) for row in rows] == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "it is 3<|im_end|>",
    ]
    assert str(decode(list(rows[1].prompt_ids))).endswith("tool\n3<|im_end|>\n<|im_start|>assistant\n")
    assert make_rows(tiny_policy, [FineTuningExample(**conversation("x" * 600))]) == ([], 1)
    messages[1]["weight"] = 0
    weighted, _ = make_rows(tiny_policy, [FineTuningExample(messages=messages)])
    assert weighted == rows[1:]


def test_the_learning_rate_decays_over_the_steps_of_all_epochs(tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "good.jsonl"
    file.write_text("".join(json.dumps(conversation(answer)) + "\n" for answer in "abcde"))
    run = tmp_path / "run"
    settings: dict[str, Any] = {"batch_size": 2, "lr": 1e-3, "schedule": "linear"}
    first = tune(run, tiny_model, file, epochs=2, **settings)
    decay = UpdateSettings(lr=1e-3, schedule="linear", total_updates=6)
    rates = [decay.lr_at(step) for step in range(6)]
    assert [step["lr"] for step in first] == pytest.approx([sum(rates[:3]) / 3, sum(rates[3:]) / 3])
    assert [(step["rows"], step["response_tokens"]) for step in first] == [(5.0, 10.0)] * 2
    assert len(tune(run, tiny_model, file, epochs=3, **settings)) == 3, "a resumed run does the remaining epochs"


def test_a_line_may_contain_any_character_that_json_allows(tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "good.jsonl"
    text = "a\u2028b\u0085c"
    file.write_text(json.dumps(conversation(text), ensure_ascii=False) + "\r\n", encoding="utf-8")
    (found,) = asyncio.run(SFT(model=str(tiny_model), source=str(file)).read_examples())
    assert found.messages[1]["content"] == text


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"source": "nowhere"}, "neither a URL nor a directory with a store.db"),
        ({"source": "good.jsonl", "best_of": 2}, "min_reward and best_of select rollouts"),
        ({"source": "missing.jsonl"}, "missing.jsonl does not exist"),
        ({"source": "bad.jsonl"}, "bad.jsonl:1 is not of the form"),
        ({"source": "latin.jsonl"}, "latin.jsonl cannot be read: .*utf-8"),
    ],
)
def test_an_invalid_source_is_refused(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.jsonl").write_text(json.dumps(conversation("a")))
    Path("bad.jsonl").write_text('{"message": "a"}')
    Path("latin.jsonl").write_text('{"messages": "caf\xe9"}', encoding="latin-1")
    with pytest.raises(agl.ConfigError, match=complaint):
        asyncio.run(SFT(model=str(tiny_model), **settings).read_examples())


def test_the_error_about_a_source_without_usable_rollouts_hides_the_password(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "create_store", lambda url: agl.create_store("memory://"))
    source = "postgresql://me:hunter2@host/agl"
    for name in ("sft", "dpo"):
        algorithm = get_manager().create("algorithm", {"name": name, "model": str(tiny_model), "source": source})
        algorithm.context = agl.RunContext(store=agl.create_store("memory://"))
        with pytest.raises(agl.ConfigError, match=r"source = 'postgresql://\*\*\*@host/agl' has no"):
            asyncio.run(algorithm.run())
