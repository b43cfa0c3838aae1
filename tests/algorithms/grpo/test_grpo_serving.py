"""Serving, evaluating, checking, comparing and exporting the trained model of a run."""

from __future__ import annotations

import json
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from agentlightning_algorithms.grpo import command
from agentlightning_plugins.shared import token
from tests.plugins.commands.agl_here import run_here
from tests.waiting import LIMIT_S

AGENT = """
import openai
import agentlightning as agl

def score(text):
    return len(set(text)) / max(1, len(text))

def agent(task, llm: agl.LLM):
    with openai.OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key or "none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["text"]}], **llm.sampling_parameters
        )
    return score(answer.choices[0].message.content)
"""
TASKS = [{"text": text} for text in ("ab", "cd", "ef", "gh")]


pytestmark = pytest.mark.usefixtures("server_thread")


@pytest.fixture(scope="module")
def folder(server_thread: None, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A user's folder with an agent, tasks, a configuration, and the run ``runs/tiny`` of two steps."""
    place = tmp_path_factory.mktemp("user")
    (place / "my_agents.py").write_text(AGENT)
    (place / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    config = {
        "name": "tiny",
        "agent": "my_agents:agent",
        "data": {"train": "tasks.jsonl", "val": "tasks.jsonl"},
        "strategy": "shm",
        "tracer": "dummy",
        "trackers": ["jsonl"],
        "algorithm": {
            "name": "grpo",
            "model": str(tiny_model),
            "steps": 2,
            "tasks_per_step": 2,
            "rollouts_per_task": 4,
            "eval_every": 0,
            "checkpoints": {"keep_every": 1},
            "sampling": {"max_tokens": 12},
            "update": {"lr": 1e-2},
            "train_threads": 1,
        },
    }
    (place / "config.yaml").write_text(yaml.safe_dump(config))
    said = run_here(place, "train", "config.yaml")
    assert said.code == 0, said.stderr
    return place


def generate(model: Path, text: str) -> str:
    """Returns the greedy answer of transformers with the weights of a directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = AutoModelForCausalLM.from_pretrained(model, dtype="float32").generate(
        **prompt, max_new_tokens=12, do_sample=False
    )
    return str(tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[str]:
    """Yields the first line that ``agl serve`` prints; SIGTERM ends it without an error."""
    command = [sys.executable, "-m", "agentlightning", "serve", *arguments]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline()
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(LIMIT_S)
    assert code == 0


@contextmanager
def serving_here(patch: pytest.MonkeyPatch, *arguments: str) -> Iterator[str]:
    """Runs ``agl serve`` in a thread; yields what it prints when it is ready."""
    said: queue.Queue[str] = queue.Queue()
    stopped = threading.Event()
    patch.setattr(command, "echo", said.put)
    patch.setattr(command, "_stopping", lambda: nullcontext(stopped))
    with ThreadPoolExecutor() as pool:
        served = pool.submit(command.serve.main, arguments, standalone_mode=False)
        try:
            yield said.get(timeout=LIMIT_S)
        finally:
            stopped.set()
        served.result()


def test_a_used_port_is_refused_in_one_sentence_before_the_model_is_read(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = run_here(tmp_path, "serve", "no-such-model", "--port", port)
        assert (said.code, said.stderr.count("\n")) == (2, 1)
        assert f"port {port} of 127.0.0.1 is in use; choose another --port, or 0" in said.stderr
        said = run_here(tmp_path, "serve", "m", "--port", "0", "--command", "vllm serve {model}", "--adapters", "a")
        assert (said.code, "--adapters is for our server" in said.stderr) == (2, True)
        said = run_here(tmp_path, "serve", "no-such-model", "--port", port, "--command", "vllm serve {model}")
        assert f"port {port} of 127.0.0.1 is in use" in said.stderr


def test_agl_serve_serves_the_weights_of_a_step_to_the_openai_client(folder: Path) -> None:
    with running(folder, "runs/tiny", "--checkpoint", "2", "--port", "0", "--name", "mine") as line:
        found = re.fullmatch(r"Serving runs/tiny \(step 2\) at (\S+/v1) as the model mine\. Try it:\n", line)
        assert found, line
        with openai.OpenAI(base_url=found[1], api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["mine"]
            for task in TASKS[:2]:
                answer = client.chat.completions.create(
                    model="mine", messages=[{"role": "user", "content": task["text"]}], max_tokens=12, temperature=0
                )
                assert answer.choices[0].message.content == generate(folder / "runs/tiny/steps/2", task["text"])


def test_beyond_loopback_the_served_model_needs_a_key_which_a_file_may_replace(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["serve", "runs/tiny", "--host", "0.0.0.0", "--port", "0"]
    said = run_here(folder, *arguments)
    assert said.code == 2
    assert "host = '0.0.0.0' lets other machines in; set an API key (--api-key, AGL_API_KEY)" in said.stderr
    keys = tmp_path / "keys"
    keys.write_text("the-key\n")
    monkeypatch.setenv("AGL_API_KEY", f"file:{keys}")
    monkeypatch.setattr(token, "READ_S", 0.0)
    monkeypatch.chdir(folder)
    with serving_here(monkeypatch, *arguments[1:]) as line:
        found = re.search(r":(\d+)/v1 ", line)
        assert found, line
        address = f"http://127.0.0.1:{found[1]}"
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        url = f"{address}/v1/chat/completions"
        assert httpx.post(url, json=body, headers={"Authorization": "Bearer the-key"}).status_code == 200
        assert httpx.get(f"{address}/health").status_code == 200
        wrong = [{}, {"Authorization": "Bearer another"}, {"Authorization": "the-key"}, {"X-Api-Key": "the-key"}]
        for headers in wrong:
            assert httpx.post(url, json=body, headers=headers).status_code == 401
            assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 401
        right = {"Authorization": "Bearer the-key"}
        assert httpx.get(f"{address}/statistics", headers=right).status_code == 401
        assert httpx.post(f"{address}/weights", json={}, headers=right).status_code == 401, (
            "only the trainer's key is accepted"
        )
        accepted = {"the-new-key\nthe-key": (200, 200), "the-new-key": (401, 200)}
        for text, statuses in accepted.items():  # a rotation
            keys.write_text(text)
            shown = [{"Authorization": f"Bearer {key}"} for key in ("the-key", "the-new-key")]
            assert tuple(httpx.get(f"{address}/v1/models", headers=key).status_code for key in shown) == statuses


def test_eval_and_doctor_start_a_server_for_the_trained_model(folder: Path) -> None:
    said = run_here(folder, "eval", "config.yaml", "--resources", "runs/tiny", "--json")
    assert said.code == 0, said.stderr
    texts = [generate(folder / "runs/tiny/best", task["text"]) for task in TASKS]
    expected = sum(len(set(text)) / max(1, len(text)) for text in texts) / len(texts)
    assert json.loads(said.stdout)["reward"] == pytest.approx(expected)
    said = run_here(folder, "doctor", "config.yaml", "--resources", "runs/tiny", "--json")
    checks = {check["name"]: check for check in json.loads(said.stdout)["checks"]}
    assert said.code == 0, checks
    assert re.search(r"http://127\.0\.0\.1:\d+/v1 answers; model policy", checks["endpoint"]["text"])
    assert checks["logprobs"]["state"] == "ok"


@pytest.mark.slow
def test_compare_continues_from_trained_weights_and_tests_the_newest_weights(folder: Path) -> None:
    stages = "[{name: grpo, steps: 1}, {name: grpo, steps: 50}]"
    first, second = (folder / "runs/compared/0-grpo-grpo-0" / name for name in ("1-grpo", "2-grpo"))

    def expected(model: Path) -> float:
        texts = [generate(model, task["text"]) for task in TASKS[1::2]]
        return sum(len(set(text)) / max(1, len(text)) for text in texts) / 2

    said = run_here(
        folder, "compare", "config.yaml", "-a", stages,
        "--budget", "26", "--run-dir", "runs/compared", "--json",
    )  # fmt: skip
    assert said.code == 0, said.stderr
    (row,) = json.loads(said.stdout)
    assert json.loads((second / "training.json").read_text())["base"] == "runs/compared/0-grpo-grpo-0/1-grpo/best"
    weights = [
        folder / place / "model.safetensors" for place in (first / "best", second / "best", second / "checkpoint")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes(), "the second stage begins with the weights of the first"
    assert weights[1].read_bytes() != weights[2].read_bytes(), (
        "the second stage was stopped after a step, before a validation"
    )
    assert row["reward"] == pytest.approx(expected(second / "checkpoint"))
    assert row["missing"] == 0
    assert 26 < row["rollouts"] <= 32


def test_the_command_of_another_server_gets_the_directory_of_the_model(folder: Path) -> None:
    code = "import pathlib, sys; print(sorted(p.name for p in pathlib.Path(sys.argv[1]).iterdir()), *sys.argv[2:])"
    own = f'"{sys.executable}" -c "{code}" {{model}} {{port}} \'{{"a": 1}}\''
    done = subprocess.run(
        [sys.executable, "-m", "agentlightning", "serve", "runs/tiny", "--port", "1234", "--command", own],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "Serving runs/tiny (best): " in done.stdout
    assert re.search(r"'config.json', .*'model.safetensors', .*\] 1234 \{\"a\": 1\}\n", done.stdout), done.stdout


def test_an_unknown_checkpoint_is_refused_with_the_checkpoints_of_the_run(folder: Path) -> None:
    said = run_here(folder, "serve", "runs/tiny", "--checkpoint", "7")
    assert said.code == 2
    assert "runs/tiny holds no 7 model; it has: best, latest, 1, 2" in said.stderr


def test_an_exported_model_has_a_card_with_base_data_curve_settings_and_versions(
    folder: Path, tiny_model: Path
) -> None:
    said = run_here(folder, "export", "runs/tiny", "exported", "--checkpoint", "2")
    assert said.code == 0, said.stderr
    assert generate(folder / "exported", "ab") == generate(folder / "runs/tiny/steps/2", "ab")
    assert not list((folder / "exported").glob("*.pt"))
    _, head, card = (folder / "exported" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["tags"] == ["reinforcement-learning", "grpo"]
    assert "The weights of checkpoint `2`" in card
    assert f"| base model | `{tiny_model}` |" in card
    assert "| data | 4 training tasks, 4 validation tasks |" in card
    steps = [json.loads(line) for line in (folder / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    last = next(step for step in steps if step.get("step") == 2)
    assert f"| 2 | {last['reward']:.3f} | {last['val_reward']:.3f} |" in card
    block = re.search(r"```yaml\n(.*)\n```", card, re.DOTALL)
    assert block
    settings = yaml.safe_load(block[1])
    assert settings["rollouts_per_task"] == 4
    assert settings["update"]["lr"] == 0.01
    assert re.search(r"\| torch \| 2\.", card)
