"""On-policy distillation: training towards the distribution of a teacher model."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI

import agentlightning as agl
from agentlightning_algorithms.grpo import teacher as teacher_module
from agentlightning_algorithms.grpo.settings import TeacherSettings
from agentlightning_algorithms.grpo.teacher import ServedTeacher, Teacher
from agentlightning_algorithms.shared.policy.model import Policy, load_policy
from agentlightning_algorithms.shared.policy.settings import UpdateSettings
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_algorithms.shared.policy.updater import Updater
from agentlightning_algorithms.shared.trained_model import serve_model
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.demo.training import CHECKPOINT
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.algorithms.grpo.grpo_program import settings
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.usefixtures("server_thread")


def never_rewarded(task: dict[str, Any], llm: agl.LLM) -> float:
    calculator_agent(task, llm)
    return 0.0


def test_the_divergence_from_the_teacher_falls(tiny_model: Path) -> None:
    student = load_policy(tiny_model)
    model = load_policy(tiny_model)
    teacher = Teacher(model, TeacherSettings(model=str(tiny_model), reward_coefficient=0.0))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    updater = Updater(student, UpdateSettings(lr=3e-3, minibatches=4))
    prompt = torch.tensor([[5, 6, 7]])

    def next_token(policy: Policy) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(policy.logits(prompt)[-1], -1)

    def divergence() -> float:
        own = next_token(student)
        return float((own.exp() * (own - next_token(model))).sum())

    before = divergence()
    for _ in range(25):
        own = next_token(student)
        rows = [
            TrainingRow([5, 6, 7], [token], [float(own[token])], 1.0)
            for token in torch.multinomial(own.exp(), 128, replacement=True).tolist()
        ]
        guided, _ = teacher.guide(rows, temperature=1.0, max_tokens=1024)
        updater.update(guided)
    assert before > 0.05
    assert divergence() < 0.3 * before


@pytest.mark.parametrize("is_served", [False, True])
def test_a_run_learns_from_the_teacher_if_no_rollout_is_rewarded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_served: bool
) -> None:
    teacher = load_policy(str(CHECKPOINT))
    teacher.model.base_model.norm.weight.data *= 1.5
    teacher.save(tmp_path / "teacher")
    with contextlib.ExitStack() as stack:
        own: dict[str, Any] = {"model": str(tmp_path / "teacher"), "reward_coefficient": 0.0}
        if is_served:
            served = stack.enter_context(serve_model(str(tmp_path / "teacher"), name="large"))
            own |= {"model": "large", "endpoint": served.endpoint}
        algorithm = settings(2, rollouts_per_task=1, teacher=own)
        trainer = agl.Trainer(algorithm=algorithm, strategy="shm", trackers=["jsonl"], run_dir=tmp_path / "run")
        assert trainer.fit(never_rewarded, make_problems("train", 8)).status == "succeeded"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "teacher_kl" in line]
    assert len(steps) == 2
    assert all(step["grad_norm"] > 0 and step["rows"] == step["calls"] > 0 for step in steps)
    assert all(step["advantage_std"] > 0 for step in steps), "the teacher's part counts"
    assert "nothing to learn" not in caplog.text


def test_the_teacher_adds_its_preference_to_each_sampled_token(tiny_policy: Policy, tiny_model: Path) -> None:
    prompt, response = [5, 6, 7], [8, 9, 10, 11]
    mask = [1, 0, 1, 1]
    scored = TrainingRow(prompt, response, [0.0] * 4, 0.0, mask=mask)
    teacher = Teacher(load_policy(tiny_model), TeacherSettings(model=str(tiny_model), coefficient=2.0))
    (theirs,) = tiny_policy.score([scored], 0.7)
    own = [theirs[0] - 0.25, -1.0, theirs[2] + 0.5, theirs[3] - 100.0]
    row = TrainingRow(prompt, response, own, 3.0, mask=mask)
    (guided,), metrics = teacher.guide([row], temperature=0.7, max_tokens=64)
    mean = (0.25 - 0.5 + 10.0) / 3
    expected = [3 + 2 * (gap - mean) for gap in (0.25, -0.5, 10.0)]
    assert guided.advantages == pytest.approx(expected, abs=1e-5)
    assert metrics["teacher_kl"] == pytest.approx(-mean, abs=1e-5)
    long = TrainingRow(prompt, [8] * tiny_policy.max_length, [0.0] * tiny_policy.max_length, 0.0)
    with pytest.raises(agl.ConfigError, match="teacher: 1 rows are longer than"):
        teacher.guide([long], temperature=1.0, max_tokens=64)


def test_a_teacher_with_another_vocabulary_is_refused(tiny_model: Path) -> None:
    student = load_policy(str(CHECKPOINT))
    with pytest.raises(agl.ConfigError, match="teacher: the tokenizer of .* has another vocabulary"):
        Teacher.load(TeacherSettings(model=str(tiny_model)), student, dtype="float32")


def test_groups_of_one_rollout_are_allowed_only_with_a_teacher_and_without_rewards(tiny_model: Path) -> None:
    own = {"model": str(tiny_model), "rollouts_per_task": 1}
    agl.GRPO(**own, teacher=TeacherSettings(model=str(tiny_model), reward_coefficient=0.0))
    with pytest.raises(agl.ConfigError, match="a group needs at least 2"):
        agl.GRPO(**own, teacher=TeacherSettings(model=str(tiny_model)))
    with pytest.raises(agl.ConfigError, match=r"coefficient = 0.0; it must be above 0"):
        TeacherSettings(model=str(tiny_model), coefficient=0)


def test_a_served_teacher_gives_the_same_advantages_as_one_in_this_process(
    tiny_policy: Policy, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        TrainingRow([5, 6, 7], [8, 9, 10, 11], [-1.0] * 4, 1.0, mask=[1, 0, 1, 1]),
        TrainingRow([20], [30, 40], [-2.0] * 2, -1.0),
    ]
    local = Teacher(load_policy(tiny_model), TeacherSettings(model=str(tiny_model)))
    expected, metrics = local.guide(rows, temperature=1.0, max_tokens=1024)
    with serve_model(str(tiny_model), name="large") as served:
        settings = TeacherSettings(model="large", endpoint=served.endpoint)
        teacher = Teacher.load(settings, tiny_policy, dtype="float32")
        guided, found = teacher.guide(rows, temperature=1.0, max_tokens=1024)
        assert teacher.scorer.max_length == tiny_policy.max_length - 1
        with pytest.raises(agl.ConfigError, match=r"has no model 'other'; it has: large"):
            Teacher.load(TeacherSettings(model="other", endpoint=served.endpoint), tiny_policy, dtype="float32")
        with pytest.raises(agl.ConfigError, match="is not in 0 to 258.* both need the same tokenizer"):
            Teacher.load(settings, load_policy(str(CHECKPOINT)), dtype="float32")
        with monkeypatch.context() as patch:
            patch.setattr(tiny_policy.tokenizer, "decode", lambda ids: "other")
            with pytest.raises(agl.ConfigError, match="reads tokens as other texts, such as .* for 'other'"):
                Teacher.load(settings, tiny_policy, dtype="float32")
        with OpenAI(base_url=served.endpoint, api_key="none", max_retries=0) as client:
            asked: Any = {"model": "large", "prompt": [5, 6], "max_tokens": 1}
            with pytest.raises(BadRequestError, match="prompt_logprobs cannot be streamed"):
                client.completions.create(**asked, stream=True, extra_body={"prompt_logprobs": 0})
            with pytest.raises(BadRequestError, match="prompt_logprobs"):
                client.completions.create(**asked, extra_body={"prompt_logprobs": 5})
    assert metrics["teacher_kl"] == pytest.approx(found["teacher_kl"], abs=1e-5)
    for row, other in zip(guided, expected, strict=True):
        assert list(row.advantages) == pytest.approx(list(other.advantages), abs=1e-5)
    with pytest.raises(agl.LightningError, match="does not answer"):
        Teacher.load(settings, tiny_policy, dtype="float32")


def test_a_teacher_without_prompt_logprobs_or_with_another_temperature_is_refused(tiny_policy: Policy) -> None:
    with ScriptedOpenAI([Answer("a")], models=["large"]) as server:
        settings = TeacherSettings(model="large", endpoint=server.endpoint)
        with pytest.raises(agl.ConfigError, match="returns no prompt_logprobs; use vLLM, or `agl serve`"):
            Teacher.load(settings, tiny_policy, dtype="float32")
    for sampling in ({"temperature": 0.7}, {"force": False}):
        with pytest.raises(agl.ConfigError, match="log-probabilities at temperature 1 only"):
            agl.GRPO(model=str(CHECKPOINT), teacher=settings, sampling=sampling)


@contextlib.contextmanager
def scoring_server(statuses: list[int]) -> Iterator[TeacherSettings]:
    """Runs a server that answers completions with these statuses in order and repeats the last one.

    With status 0 it closes the connection without an answer; with -1 it does not answer until it closes.
    """
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": "large"}]})

        def do_POST(self) -> None:
            prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
            status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
            told = [None, *({str(token): {"logprob": -0.5}} for token in prompt[1:])]
            if status < 0:
                closing.wait(LIMIT_S)
            elif status:
                self.reply(status, {"choices": [{"prompt_logprobs": told}]})

        def reply(self, status: int, body: Any) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield TeacherSettings(model="large", endpoint=f"http://127.0.0.1:{server.server_address[1]}/v1")
        closing.set()
        server.shutdown()
        thread.join()


def test_failed_requests_to_a_served_teacher_are_repeated(tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_module, "_DELAYS_S", (0.0, 0.0, 0.0))
    rows = [TrainingRow([1, 2], [3, 4], [-1.0, -1.0], 0.0)]
    with scoring_server([200, 503, 0, 429, 200]) as settings:
        assert ServedTeacher.connect(settings, tiny_policy).score(rows) == [[-0.5, -0.5]]
    for statuses, said in (([200, 503, 503, 503, 503, 200], "503"), ([200, 400, 200], "400")):
        with scoring_server(statuses) as settings:
            teacher = ServedTeacher.connect(settings, tiny_policy)
            with pytest.raises(agl.LightningError, match=f"answered {said}"):
                teacher.score(rows)
            assert statuses == [200]


def test_each_repetition_of_a_request_to_a_teacher_is_logged_without_the_password(
    tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(teacher_module, "_DELAYS_S", (0.01, 0.02, 0.03))
    rows = [TrainingRow([1, 2], [3, 4], [-1.0, -1.0], 0.0)]
    with scoring_server([200, 503, 0, 429, 500]) as settings:
        assert settings.endpoint is not None
        shown = settings.endpoint.replace("://", "://***@") + "/completions"
        hidden = replace(settings, endpoint=settings.endpoint.replace("://", "://user:secret@"))
        teacher = ServedTeacher.connect(hidden, tiny_policy)
        with pytest.raises(agl.LightningError, match="answered 500") as caught:
            teacher.score(rows)
    logged = [record.getMessage() for record in caplog.records if record.name == "agentlightning"]
    assert len(logged) == 3
    assert f"try 1 of 4 failed, the next is in 0.01 s: {shown} answered 503" in logged[0]
    assert f"try 2 of 4 failed, the next is in 0.02 s: {shown} does not answer (Server" in logged[1]
    assert f"try 3 of 4 failed, the next is in 0.03 s: {shown} answered 429" in logged[2]
    assert "secret" not in f"{logged} {caught.value}"


def test_a_request_to_a_teacher_that_timed_out_is_not_repeated(
    tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_module, "_DELAYS_S", (0.0, 0.0, 0.0))
    with scoring_server([200, -1, 200]) as settings:
        teacher = ServedTeacher.connect(settings, tiny_policy)
        teacher._settings = replace(settings, timeout_s=0.2)
        with pytest.raises(agl.LightningError, match=r"/completions did not answer within timeout_s = 0.2 s"):
            teacher.score([TrainingRow([1, 2], [3, 4], [-1.0, -1.0], 0.0)])


def test_a_teacher_whose_first_answer_is_an_error_is_refused_without_a_retry(
    tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_module, "_DELAYS_S", (1000.0,))
    with scoring_server([503]) as settings, pytest.raises(agl.ConfigError, match="answered 503"):
        ServedTeacher.connect(settings, tiny_policy)
