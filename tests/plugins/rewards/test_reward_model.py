"""The reward ``model``: a reward model on a server or in the runner."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import agentlightning as agl
from agentlightning import semconv
from tests.algorithms.tiny_model import save_tiny_model

SAID = [{"question": "What says the cow?", "said": "moo"}, {"question": "What says the cow?", "said": "quack"}]


def say(task: dict[str, str]) -> str:
    return task["said"]


def fit(reward: dict[str, Any], tasks: list[Any]) -> list[tuple[Any, list[agl.Span]]]:
    """Runs the tasks and returns the rollouts with their spans."""
    store = agl.create_store("memory://")
    trainer = agl.Trainer(algorithm="baseline", store=store, strategy="shm", trackers=[], max_concurrency=1)
    trainer.fit(say, tasks, reward={"name": "model", "task_key": "question", **reward})

    async def read() -> list[tuple[Any, list[agl.Span]]]:
        rollouts = (await store.query_rollouts()).items
        return [(each, list((await store.query_spans(each.rollout_id, "latest")).items)) for each in rollouts]

    return asyncio.run(read())


def check_spans(found: list[tuple[Any, list[agl.Span]]]) -> None:
    """Checks that each score is recorded with its answer, and not as a model call that could be trained on."""
    for rollout, spans in found:
        (span,) = [each for each in spans if each.attributes.get(semconv.OPERATION_NAME) == "reward_model"]
        assert json.loads(span.attributes[semconv.OPERATION_OUTPUT])["reward"] == rollout.attempt.reward
        assert json.loads(span.attributes[semconv.OPERATION_INPUT])["output"] == rollout.input["said"]
        assert not [each for each in spans if semconv.is_llm_call(each)]
        assert agl.TraceToTriplet().adapt(spans) == []


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("has_chat_template", [True, False])
def test_a_local_classifier_scores_each_answer(tmp_path: Path, classes: int, has_chat_template: bool) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    save_tiny_model(tmp_path)
    torch.manual_seed(1)
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=classes)
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    if not has_chat_template:
        tokenizer.chat_template = None
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(tmp_path)
    found = fit({"model": str(tmp_path), "sigmoid": classes == 1, "label": 1 if classes > 1 else -1}, SAID)
    rewards = []
    for task in SAID:
        text = f"{task['question']}\n\n{task['said']}"
        if has_chat_template:
            messages = [{"role": "user", "content": task["question"]}, {"role": "assistant", "content": task["said"]}]
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
        rewards.append(float(logits.sigmoid()[0] if classes == 1 else logits.softmax(-1)[1]))
    assert [rollout.attempt.reward for rollout, _ in found] == pytest.approx(rewards, abs=1e-5)
    assert len(set(rewards)) == 2
    check_spans(found)


class Server:
    """A reward model that answers in the form of four APIs; ``moo`` scores 2."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, str | None]] = []
        self.broken = False

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.path, body, request.headers.get("Authorization")))
        if self.broken:
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        score = 2.0 if "moo" in json.dumps(body) else -1.0
        return web.json_response(
            {
                "/classify": {"data": [{"index": 0, "label": "B", "probs": [0.5 - score / 4, 0.5 + score / 4]}]},
                "/pooling": {"data": [{"index": 0, "object": "pooling", "data": [[9.0], [score]]}]},
                "/score": {"data": [{"index": 0, "object": "score", "score": score}]},
                "/predict": [{"label": "LABEL_1", "score": 0.5 + score / 4}, {"label": "LABEL_0", "score": 0.1}],
            }[request.path]
        )


def ask(server: Server, reward: dict[str, Any]) -> list[tuple[Any, list[agl.Span]]]:
    """Runs the tasks while the reward model is served."""

    async def serve() -> list[tuple[Any, list[agl.Span]]]:
        app = web.Application()
        app.router.add_post("/{path}", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/"
            return await asyncio.to_thread(fit, {"model": "rm", "endpoint": endpoint, **reward}, SAID)
        finally:
            await runner.cleanup()

    return asyncio.run(serve())


@pytest.mark.parametrize(
    ("api", "body", "rewards"),
    [
        ("classify", {"model": "rm", "input": "What says the cow?\n\nmoo"}, [1.0, 0.25]),
        ("pooling", {"model": "rm", "messages": [{"role": "user", "content": "What says the cow?"},
                                                 {"role": "assistant", "content": "moo"}]}, [2.0, -1.0]),
        ("score", {"model": "rm", "text_1": "What says the cow?", "text_2": "moo"}, [2.0, -1.0]),
        ("predict", {"inputs": "What says the cow?\n\nmoo", "truncate": True}, [1.0, 0.25]),
    ],
)  # fmt: skip
def test_a_server_scores_each_answer(api: str, body: dict[str, Any], rewards: list[float]) -> None:
    server = Server()
    found = ask(server, {"api": api, "api_key": "sk-reward-key"})
    assert [rollout.attempt.reward for rollout, _ in found] == rewards
    assert server.asked[0] == (f"/{api}", body, "Bearer sk-reward-key")
    assert len(server.asked) == 2
    assert "sk-reward-key" not in str(found)
    check_spans(found)


def test_without_a_score_the_rollout_fails_with_the_reason() -> None:
    server = Server()
    server.broken = True
    for rollout, _ in ask(server, {"api": "score"}):
        assert rollout.status == "failed"
        assert "/score answered 500:" in str(rollout)
        assert "out of memory" in str(rollout)
    server.broken = False
    for rollout, _ in ask(server, {"api": "classify", "label": 7}):
        assert rollout.attempt.error is not None
        assert rollout.attempt.error.message == "reward model: label = 7; rm has 2 classes, from 0 up."
    ((rollout, _),) = fit({"model": "rm", "endpoint": "http://127.0.0.1:9"}, SAID[:1])
    assert "http://127.0.0.1:9/classify does not answer" in str(rollout)


def test_the_sigmoid_maps_a_score_to_a_reward_between_0_and_1() -> None:
    found = ask(Server(), {"api": "score", "sigmoid": True})
    assert [rollout.attempt.reward for rollout, _ in found] == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.e)])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"template": "{task}"}, "has no {answer}"),
        ({"template": "{answer} {other}"}, "is not a template"),
        ({"api": "rank"}, "api"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"modle": "x"}, "Did you mean 'model'"),
    ],
)
def test_a_wrong_setting_is_an_error(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(agl.ConfigError, match=complaint):
        agl.wrap(say, reward={"name": "model", "model": "m", "endpoint": "http://127.0.0.1:9", **settings})
