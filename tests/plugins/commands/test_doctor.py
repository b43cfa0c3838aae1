"""``agl doctor``: each check is broken on purpose, and the right line reports it."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest
from aiohttp import web
from click.testing import CliRunner
from openai import OpenAI

from agentlightning.adapter import TraceToTriplet
from agentlightning.plugin.offer import Plugin
from agentlightning.plugin.registry import get_manager
from agentlightning.types import Attempt, AttemptedRollout
from agentlightning_plugins.commands.doctor import command
from agentlightning_plugins.commands.doctor.checks import NAMES, Check, RolloutChecks
from agentlightning_plugins.commands.doctor.run import Request, answer_request, check_environment, run_checks
from agentlightning_plugins.shared.configuration.config import CommandConfig
from agentlightning_plugins.shared.scripted_model.server import EOS, Answer, ScriptedOpenAI, encode
from tests.algorithms.tiny_model import save_tiny_model
from tests.http_site import serving

AGENTS = """
import asyncio
import time
from openai import OpenAI
import agentlightning as agl

def client(llm):
    return OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key, max_retries=0)

def ask(llm, messages):
    with client(llm) as openai:
        return openai.chat.completions.create(model=llm.model, messages=messages).choices[0].message.content

def good(task, llm: agl.LLM) -> float:
    messages = [{"role": "user", "content": str(task)}]
    for turn in ("and?", "so?"):
        messages += [{"role": "assistant", "content": ask(llm, messages)}, {"role": "user", "content": turn}]
    ask(llm, messages)
    return 0.5

async def blocks_its_loop(task, llm) -> float:
    return good(task, llm)

def no_reward(task, llm):
    ask(llm, [{"role": "user", "content": str(task)}])

def judge(task, output, rollout):
    return 0.25

def edits_history(task, llm):
    messages = [{"role": "user", "content": "go"}]
    ask(llm, messages)
    ask(llm, [*messages, {"role": "assistant", "content": "mine"}, {"role": "user", "content": "x"}])
    return 1.0

def ignores_endpoint(task, llm):
    with OpenAI(base_url=ELSEWHERE, api_key="any", max_retries=0) as openai:
        openai.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    return 1.0

def makes_no_call(task, llm):
    return 1.0

def fails(task, llm):
    return task["question"]

def hangs(task, llm):
    time.sleep(30)

def wants_prompt(task, prompt_template, llm):
    ask(llm, [{"role": "user", "content": prompt_template.format()}])
    return 1.0

def survives(task, llm):
    try:
        ask(llm, [{"role": "user", "content": "hi"}])
    except Exception:
        pass
    return 0.0

def swallows(task, prompt):
    try:
        with OpenAI(base_url="http://127.0.0.1:9/v1", api_key="any", max_retries=0) as openai:
            openai.chat.completions.create(model="m", messages=[{"role": "user", "content": prompt.format()}])
    except Exception:
        pass
    return 0.0

def reminds(task, llm):
    ask(llm, [{"role": "user", "content": "hi"}, {"role": "system", "content": "Today is Monday."}])
    return 1.0

def survives_twice(task, llm):
    survives(task, llm)
    survives(task, llm)
    return 1.0

def uses_both(task, llm, system):
    ask(llm, [{"role": "user", "content": system.format(question=task["question"])}])
    return 1.0

async def named(task, llm):
    with agl.operation(name="solver", **{"agent.name": "solver"}):
        await asyncio.to_thread(ask, llm, [{"role": "user", "content": "hi"}])
    return 1.0

def with_tools(task, llm: agl.LLM) -> float:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": str(task)}]
    with client(llm) as openai:
        openai.chat.completions.create(model=llm.model, messages=messages, tools=[tool])
    return 0.5

NOT_AN_AGENT = 3
"""


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("doctor") / "doctors_patients.py"
    file.write_text(AGENTS, encoding="utf-8")
    return str(file)


@pytest.fixture(autouse=True, scope="module")
def environment_is_checked_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "agentlightning_plugins.commands.doctor.run.check_environment", functools.cache(check_environment)
        )
        yield


async def check(agents: str, agent: str = "good", **request: Any) -> dict[str, Check]:
    checks = await run_checks(Request(agent=f"{agents}:{agent}", **request))
    assert tuple(check.name for check in checks) == NAMES
    return {check.name: check for check in checks}


def broken(checks: Mapping[str, Check]) -> list[str]:
    assert all(check.fix for check in checks.values() if check.state == "broken"), "a broken check says how to fix it"
    return [check.name for check in checks.values() if check.state == "broken"]


class Server:
    """A model server whose tokens continue from call to call, unless a test changes them."""

    def __init__(self) -> None:
        self.spoil_answer: Callable[[dict[str, Any]], Any] = lambda choice: None
        self.spoil_answers: Callable[[dict[str, Any]], Any] = lambda answer: None
        self.spoil_history: Callable[[list[int]], list[int]] = lambda tokens: tokens
        self.url = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt: list[int] = []
        for message in body["messages"]:
            if message["role"] == "assistant":
                prompt += self.spoil_history([*encode(message["content"]), EOS])
            else:
                prompt += encode(f"<{message['role']}>{message['content']}<assistant>")
        text = f"this is answer number {len(body['messages'])}"
        tokens = [*encode(text), EOS]
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": text},
            "token_ids": tokens,
            "logprobs": {"content": [{"token": "", "logprob": -0.5, "bytes": [], "top_logprobs": []} for _ in tokens]},
        }
        self.spoil_answer(choice)
        answer = {
            "id": f"id-{len(body['messages'])}",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
            "prompt_token_ids": prompt,
        }
        self.spoil_answers(answer)
        return web.json_response(answer)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    routes = web.get("/v1/models", server.models), web.post("/v1/chat/completions", server.complete)
    async with serving(*routes) as url:
        server.url = f"{url}/v1"
        yield server


async def test_every_check_of_a_working_agent_passes(agents: str, server: Server) -> None:
    checks = await check(agents, endpoint=server.url)
    assert {name for name, check in checks.items() if check.state != "ok"} == {"task", "prompts", "tools", "model"}, (
        "none were given"
    )
    assert checks["calls"].text == "3 model calls went through the rollout's endpoint"
    assert checks["endpoint"].text == f"{server.url} answers; model m"
    assert checks["reward"].text == "the rollout's reward is 0.5"
    assert checks["triplets"].text == "3 triplets to learn from"
    assert checks["template"].text == "2 calls begin exactly with the tokens of the previous call"


@pytest.mark.parametrize("agent", ["good", "blocks_its_loop"])
async def test_without_an_endpoint_a_scripted_server_answers_and_this_is_reported(agents: str, agent: str) -> None:
    checks = await check(agents, agent)
    assert broken(checks) == []
    assert "a scripted server answers" in checks["endpoint"].text
    assert checks["template"].state == "unchecked"


# Environment.


def distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


def test_pytorch_lightning_is_distinguished_from_our_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_environment().state == "ok"
    distribution(tmp_path, "lightning", "2.5.0")
    monkeypatch.syspath_prepend(tmp_path)
    check = check_environment()
    assert check.state == "broken"
    assert check.text == "PyTorch Lightning (distribution lightning 2.5.0) is installed here"
    assert "create a new one" in check.fix


def test_a_module_named_lightning_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert "a module named lightning can be imported" in check_environment().text


def test_an_unsupported_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "openai", "1.3.0")
    distribution(tmp_path, "pydantic", "1.10.0")
    monkeypatch.syspath_prepend(tmp_path)
    check = check_environment()
    assert check.state == "broken"
    assert "openai 1.3.0 is installed, but >=1.109 is required" in check.text
    assert "pydantic 1.10.0 is installed, but >=2.11.4 is required" in check.text


def test_a_framework_that_is_too_old_is_named_and_one_that_is_missing_needs_no_other_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution(tmp_path, "strands-agents", "0.1.3")  # what pip installs beside pydantic-ai
    monkeypatch.syspath_prepend(tmp_path)
    check = check_environment()
    assert check.text == "strands-agents 0.1.3 is installed, but >=1.60 is required"  # and not openai, for pydantic-ai


def test_a_plugin_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "ImportError: no module named there"
    faulty = Plugin("mine", "my-company", "my-company 1.0", "mine.plugin", state="broken", error=why)
    monkeypatch.setitem(get_manager().plugins, "mine", faulty)
    check = check_environment()
    assert check.state == "broken"
    assert "mine of my-company 1.0: ImportError: no module named there" in check.text


# Agent.


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("goood", "has no goood. Did you mean 'good'?"),
        ("NOT_AN_AGENT", "3 is not an agent, and no plugin supports its framework"),
    ],
)
async def test_an_object_that_is_not_an_agent_is_reported(agents: str, agent: str, message: str) -> None:
    checks = await check(agents, agent)
    assert broken(checks) == ["agent"]
    assert message in checks["agent"].text
    assert checks["rollout"] == Check("rollout", "unchecked", "depends on the check 'agent'")


async def test_the_reason_why_a_module_cannot_be_imported_is_reported(tmp_path: Path) -> None:
    (tmp_path / "broken_patient.py").write_text("import no_such_package_anywhere\n", encoding="utf-8")
    checks = await run_checks(Request(agent=f"{tmp_path}/broken_patient.py:agent"))
    assert checks[1].state == "broken"
    assert "No module named 'no_such_package_anywhere'" in checks[1].text
    assert "import" in checks[1].fix


# Endpoint.


async def test_an_unreachable_endpoint_is_reported(agents: str) -> None:
    checks = await check(agents, endpoint="http://127.0.0.1:9/v1")
    assert broken(checks) == ["endpoint"]
    assert "http://127.0.0.1:9/v1 cannot be reached: [Errno 111] Connection refused" in checks["endpoint"].text
    assert "start the model server" in checks["endpoint"].fix


async def test_a_base_url_without_v1_is_reported(agents: str, server: Server) -> None:
    checks = await check(agents, endpoint=server.url.removesuffix("/v1"))
    assert broken(checks) == ["endpoint"]
    assert "the base URL usually ends in /v1" in checks["endpoint"].fix


@pytest.mark.parametrize(
    ("greeting", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH-2.0-OpenSSH_9.6"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", "Expecting value: line 1 column 1"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"models": 3}', "the response is not a list of models"),
    ],
)
async def test_a_server_that_is_not_openai_compatible_is_reported(agents: str, greeting: bytes, said: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(greeting)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        checks = await check(agents, endpoint=endpoint)
    assert broken(checks) == ["endpoint"]
    assert f"{endpoint}/models is not an OpenAI-compatible server: {said}" in checks["endpoint"].text
    assert "give the base URL" in checks["endpoint"].fix


async def test_an_endpoint_that_is_not_a_url_is_reported(agents: str) -> None:
    checks = await check(agents, endpoint="http://127.0.0.1:80x/v1")
    assert broken(checks) == ["endpoint"]
    assert "nonnumeric port: '80x'" in checks["endpoint"].text


async def test_a_model_that_the_server_does_not_have_is_reported(agents: str, server: Server) -> None:
    checks = await check(agents, endpoint=server.url, model="n")
    assert broken(checks) == ["endpoint"]
    assert "has no model 'n'; it has: m" in checks["endpoint"].text


# Rollout.


async def test_the_error_and_line_of_a_failing_agent_are_reported(agents: str) -> None:
    checks = await check(agents, "fails")
    assert broken(checks) == ["rollout"], "checks that depend on it are not reported as broken"
    assert "TypeError: string indices must be integers" in checks["rollout"].text
    assert f"at {agents}:" in checks["rollout"].text
    assert "the task was 'Say hello.'; give a task that the agent accepts" in checks["rollout"].fix
    assert checks["calls"] == Check("calls", "unchecked", "the rollout failed before its first model call")
    assert checks["reward"].text == "the rollout failed before it returned a reward"
    with_task = await check(agents, "fails", task={"question": 0.5})
    assert with_task["rollout"].state == "ok"


async def test_an_agent_that_never_ends_is_stopped(agents: str) -> None:
    checks = await check(agents, "hangs", timeout_s=0.3)
    assert broken(checks)[0] == "rollout"
    assert "no result within timeout_seconds=0.3" in checks["rollout"].text
    assert "--timeout" in checks["rollout"].fix


async def test_a_prompt_that_the_agent_asks_for_can_be_given(agents: str) -> None:
    checks = await check(agents, "wants_prompt")
    assert broken(checks)[0] == "rollout"
    assert "asks for 'prompt_template' but no resource has this name" in checks["rollout"].text
    assert "--resource NAME=TEXT" in checks["rollout"].fix
    assert broken(await check(agents, "wants_prompt", resources={"prompt_template": "be nice"})) == []


# Calls and spans.


async def test_an_agent_that_calls_another_server_is_reported(agents: str) -> None:
    async with ScriptedOpenAI() as elsewhere:
        await check(agents, "makes_no_call")  # imports the module
        sys.modules["doctors_patients"].ELSEWHERE = elsewhere.endpoint
        checks = await check(agents, "ignores_endpoint")
    assert broken(checks)[0] == "calls"
    assert checks["calls"].text.startswith(
        f"the agent made 1 model call, none of them through the rollout's endpoint: m at {elsewhere.endpoint}"
    )
    assert "OpenAI(base_url=llm.get_base_url()" in checks["calls"].fix


async def test_an_agent_that_makes_no_call_is_reported(agents: str) -> None:
    checks = await check(agents, "makes_no_call")
    assert broken(checks) == ["calls", "triplets"]
    assert checks["calls"].text == "the agent made no model call"
    assert checks["triplets"].text == "no triplets: no span is a model call"


async def test_an_agent_whose_model_is_not_traced_is_reported_because_critics_see_nothing(agents: str) -> None:
    checks = await check(agents, "makes_no_call", trains_weights=False)
    assert broken(checks) == ["calls"]
    assert "critics would see only tasks and rewards" in checks["calls"].text
    assert checks["triplets"].state == "unchecked"


async def test_a_connection_error_that_the_agent_swallows_is_reported_with_url_and_model(agents: str) -> None:
    checks = await check(agents, "swallows", trains_weights=False, resources={"prompt": "be nice"})
    assert broken(checks) == ["calls"]
    assert checks["calls"].text == "1 of 1 model call failed: m at http://127.0.0.1:9/v1/: Connection error."
    checks = await check(agents, "swallows", resources={"prompt": "be nice"})
    assert broken(checks)[0] == "calls"
    assert "m at http://127.0.0.1:9/v1/" in checks["calls"].text


async def test_a_failed_call_among_answered_calls_is_reported(agents: str) -> None:
    async with ScriptedOpenAI([Answer("one"), Answer(status=400, error="context too long")]) as server:
        checks = await check(agents, "survives_twice", endpoint=server.endpoint, trains_weights=False)
    assert broken(checks) == ["rollout", "calls"]
    assert f"1 of 2 model calls to scripted at {server.endpoint} failed; the last: " in checks["calls"].text


@pytest.mark.parametrize("trains_weights", [True, False])
async def test_a_prompt_and_a_task_that_no_model_call_contains_are_reported(agents: str, trains_weights: bool) -> None:
    task = {"question": "How many legs has a spider?", "answer": 8}
    prompts = {"system": 'Answer in JSON, {{"legs": 4}}: {question}'}
    checks = await check(agents, "named", task=task, resources=prompts, trains_weights=trains_weights)
    assert broken(checks) == ["task", "prompts"]
    assert "how many legs" in checks["task"].text.lower()
    assert checks["prompts"].text == "no model call contains the text of system"
    used = await check(agents, "uses_both", task=task, resources=prompts, trains_weights=trains_weights)
    assert broken(used) == []
    assert (used["task"].state, used["prompts"].state) == ("ok", "ok")


async def test_for_a_command_without_a_traced_call_critics_read_its_output() -> None:
    command = CommandConfig(command=[sys.executable, "-c", "print(1)"], reward=None)
    checks = {each.name: each for each in await run_checks(Request(agent=command, trains_weights=False))}
    assert checks["calls"].text == "the agent made no traced model call; critics read its output"


@pytest.mark.parametrize("algorithm", ["apo", "my_algorithm.py:PromptTuner"])
@pytest.mark.parametrize(
    "models",
    [
        "resources: {llm: {resource_type: llm, endpoint: URL, model: scripted}}",
        "gateway: {name: gateway, model_list: [{endpoint: URL, model: scripted, api_key: '${KEY_OF_TEST}'}]}",
    ],
    ids=["resource", "gateway"],
)
async def test_agent_models_task_and_algorithm_are_read_from_a_configuration(
    agents: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, models: str
) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "any")
    (tmp_path / "my_algorithm.py").write_text(
        "import agentlightning as agl\nclass PromptTuner(agl.Algorithm):\n    pass\n"
    )
    async with ScriptedOpenAI(answer_request) as server:
        (tmp_path / "c.yaml").write_text(
            f"agent: {agents}:good\ndata: {{train: tasks.json}}\nalgorithm: {algorithm}\n"
            + models.replace("URL", server.endpoint)
        )
        (tmp_path / "tasks.json").write_text('["first", "second"]')
        monkeypatch.chdir(tmp_path)
        done = await asyncio.to_thread(CliRunner().invoke, command, ["c.yaml"], catch_exceptions=False)
        asked = [request.body["model"] for request in server.requests if request.body]
    assert done.exit_code == 0, done.output
    assert "the agent ran on the task 'first'" in done.output
    assert "logprobs     not needed to tune prompts" in done.output
    assert set(asked) == {"scripted"}


async def test_a_server_that_answers_no_call_is_reported(agents: str) -> None:
    async with ScriptedOpenAI([Answer(status=400, error="context too long")]) as server:
        checks = await check(agents, "survives", endpoint=server.endpoint)
    assert broken(checks) == ["rollout", "calls", "triplets"]
    assert f"none of 1 model call to scripted at {server.endpoint} was answered; the last: " in checks["calls"].text
    assert "context too long" in checks["calls"].text


async def test_a_template_that_may_refuse_late_system_messages_is_reported_with_the_setting(agents: str) -> None:
    refuses = Answer(status=400, error="System message must be at the beginning.")
    async with ScriptedOpenAI([refuses]) as server:
        checks = await check(agents, "reminds", endpoint=server.endpoint)
    assert "late_system: user" in checks["calls"].fix


def test_lost_spans_are_counted() -> None:
    attempt = Attempt(
        rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0, status="succeeded", spans_dropped=3
    )
    rollout = AttemptedRollout(rollout_id="ro-1", input=0, start_time=0.0, status="succeeded", attempt=attempt)
    checks = {check.name: check for check in RolloutChecks(rollout, [], TraceToTriplet(), False, True, True).checks()}
    assert checks["spans"].state == "broken"
    assert checks["spans"].text == "3 spans of 3 did not arrive"


# Tokens.


async def test_a_server_without_token_ids_is_reported(agents: str) -> None:
    async with ScriptedOpenAI(token_ids="ignore") as server:
        checks = await check(agents, endpoint=server.endpoint)
        for_prompts = await check(agents, endpoint=server.endpoint, trains_weights=False)
    assert broken(checks) == ["token ids"]
    assert checks["token ids"].text == "3 of 3 answered calls have no token ids"
    assert "return_token_ids" in checks["token ids"].fix
    assert broken(for_prompts) == [], "tuning prompts needs no token ids"


async def test_a_server_without_logprobs_is_reported(agents: str, server: Server) -> None:
    server.spoil_answer = lambda choice: choice.pop("logprobs")
    checks = await check(agents, endpoint=server.url)
    assert broken(checks) == ["logprobs"]
    assert checks["logprobs"].text == "3 of 3 answered calls have no logprobs"


async def test_a_server_that_omits_a_logprob_is_reported(agents: str, server: Server) -> None:
    server.spoil_answer = lambda choice: choice["logprobs"]["content"].pop()
    checks = await check(agents, endpoint=server.url)
    assert broken(checks) == ["logprobs", "triplets"]
    assert checks["logprobs"].text == "a call has 24 response tokens and 23 logprobs"
    assert "must answer logprobs: true with a logprob for each sampled token" in checks["logprobs"].fix
    assert "must return one logprob for each sampled token" in checks["triplets"].text


async def test_partial_token_ids_are_reported_with_the_option_that_the_server_lacks(
    agents: str, server: Server
) -> None:
    server.spoil_answer = lambda choice: choice.update(token_ids=choice["token_ids"][:1])
    checks = await check(agents, endpoint=server.url)
    assert broken(checks) == ["logprobs", "triplets"]
    assert checks["logprobs"].text == "a call has 1 response tokens and 24 logprobs"
    assert "return_token_ids: true with token_ids in every chunk of a stream" in checks["logprobs"].fix
    server.spoil_answer, server.spoil_answers = lambda choice: None, lambda answer: answer.pop("prompt_token_ids")
    checks = await check(agents, endpoint=server.url)
    assert "token ids" in broken(checks)
    assert checks["token ids"].text == "3 of 3 answered calls have no token ids of the prompt"
    assert "return_token_ids: true with prompt_token_ids" in checks["token ids"].fix


# Tool calls, and the model that is trained.


async def test_tool_calls_that_the_model_server_left_as_text_are_reported(agents: str, server: Server) -> None:
    assert (await check(agents, "with_tools", endpoint=server.url))["tools"].state == "ok"
    server.spoil_answer = lambda choice: choice.update(tool_calls_unparsed=2)
    checks = await check(agents, "with_tools", endpoint=server.url)
    assert broken(checks) == ["tools"]
    assert checks["tools"].text.startswith("2 tool calls of the model are text")


async def test_the_model_that_an_algorithm_trains_is_checked_with_the_requests_of_the_agent(
    agents: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path / "m", max_length=40)
    (tmp_path / "c.yaml").write_text(
        f"agent: {agents}:with_tools\nalgorithm: {{name: grpo, model: {tmp_path / 'm'}}}\n"
    )

    def doctor(*options: str) -> str:
        done = CliRunner().invoke(command, [str(tmp_path / "c.yaml"), *options])
        return next(line for line in done.output.splitlines() if line[10:15] == "model")

    said = await asyncio.to_thread(doctor)
    assert said.startswith("BROKEN    model        the first request has ")
    assert f"tokens, but {tmp_path / 'm'} has 40 positions -> use a model with more positions" in said
    save_tiny_model(tmp_path / "m", max_length=4000)
    said = await asyncio.to_thread(doctor)
    assert said.startswith("ok        model")
    assert "has tool calls in the form hermes and 4000 positions; the first request has " in said
    for template, expected in (
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "writes no tool calls"),
        ("{% for m in messages %}{{ m.tool_calls }}{% endfor %}", "unknown form"),
    ):
        (tmp_path / "m" / "chat_template.jinja").write_text(template)
        said = await asyncio.to_thread(doctor)
        assert said.startswith("BROKEN")
        assert expected in said


# Reward and triplets.


async def test_an_agent_that_returns_no_reward_is_reported(agents: str) -> None:
    checks = await check(agents, "no_reward")
    assert broken(checks) == ["reward"]
    assert "agl.emit_reward(...)" in checks["reward"].fix
    judged = await check(agents, "no_reward", reward=f"{agents}:judge")
    assert judged["reward"].text == "the rollout's reward is 0.25"


async def test_an_agent_match_that_matches_no_agent_is_reported(
    agents: str, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    checks = await check(agents, "named", endpoint=server.url, agent_match="writer")
    assert broken(checks) == ["triplets"]
    assert "1 made by agent 'solver', which agent_match='writer' excludes" in checks["triplets"].text
    assert "agents in this rollout: solver" in checks["triplets"].fix
    matched = await check(agents, "named", endpoint=server.url, agent_match="solver")
    assert matched["triplets"].text == "1 triplet to learn from, by solver"
    assert matched["template"].text == "no call continues the conversation of another"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == [], "the checks report it"


# Template.


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [(lambda tokens: [7, 7, *tokens], "template"), (lambda tokens: [*tokens[:3], 300, *tokens[5:]], "retokenisation")],
    ids=["template", "retokenisation"],
)
async def test_a_history_that_is_tokenized_differently_is_reported(
    agents: str, server: Server, spoil: Callable[[list[int]], list[int]], kind: str
) -> None:
    server.spoil_history = spoil
    checks = await check(agents, endpoint=server.url)
    assert broken(checks) == ["template"]
    assert f"2 calls cannot be joined with the previous call (2 {kind}): " in checks["template"].text
    assert "keeps history unchanged" in checks["template"].fix


async def test_an_agent_that_edits_its_history_is_reported(agents: str, server: Server) -> None:
    checks = await check(agents, "edits_history", endpoint=server.url)
    assert broken(checks) == ["template"]
    assert "the agent changed the history of the conversation, from message 1 on" in checks["template"].text
    assert "only append messages" in checks["template"].fix


# The command.


def test_the_command_prints_one_line_for_each_check() -> None:
    done = CliRunner().invoke(command, ["demo"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line[10:22].strip() for line in lines] == list(NAMES)
    assert lines[9].startswith("ok        logprobs     each sampled token has one")


def test_the_command_exits_with_1_when_a_check_fails(agents: str) -> None:
    done = CliRunner().invoke(command, [f"{agents}:no_reward", "--json"])
    assert done.exit_code == 1, done.output
    report = json.loads(done.output)
    assert report["ok"] is False
    assert [check["name"] for check in report["checks"] if check["state"] == "broken"] == ["reward"]
    shown = CliRunner().invoke(command, [f"{agents}:no_reward", "--task", '{"a": 1}', "--resource", "p=text"])
    assert "BROKEN    reward       the agent returned no reward -> return a number" in shown.output
    assert "the agent ran on the task {'a': 1}" in shown.output
    assert CliRunner().invoke(command, ["demo", "--resource", "text"]).exit_code == 2
    assert CliRunner().invoke(command, ["demo", "--timeout", "-1"]).exit_code == 2


def test_the_scripted_server_calls_a_tool_with_arguments_that_match_its_schema() -> None:
    properties = {
        "a": {"type": "integer"},
        "b": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "c": {"enum": ["x", "y"]},
        "d": {"type": "object", "properties": {"e": {"type": "array"}}},
        "f": {"type": "string"},
    }
    parameters = {"type": "object", "properties": properties, "required": ["a", "b", "c", "d"]}
    body = {"messages": [], "tools": [{"type": "function", "function": {"name": "t", "parameters": parameters}}]}
    request: Any = type("Request", (), {"body": body})
    assert answer_request(request).tool_calls == [("t", {"a": 1, "b": 1.0, "c": "x", "d": {"e": []}})]
    body["messages"] = [{"role": "tool", "content": "1"}]
    assert answer_request(request).tool_calls == ()


class Step(pydantic.BaseModel):
    kind: Literal["read", "write"]
    count: int


class Plan(pydantic.BaseModel):
    title: str
    first: Step
    steps: list[Step] = pydantic.Field(min_length=1)


def test_the_scripted_server_answers_the_schema_that_it_is_asked_for() -> None:
    messages: Any = [{"role": "user", "content": "Plan."}]
    with ScriptedOpenAI(answer_request) as server, OpenAI(base_url=server.endpoint, api_key="any") as client:
        parsed = client.chat.completions.parse(model="scripted", messages=messages, response_format=Plan)
        assert parsed.choices[0].message.parsed == Plan(
            title="1", first=Step(kind="read", count=1), steps=[Step(kind="read", count=1)]
        )
        made = client.chat.completions.create(
            model="scripted", messages=messages, response_format={"type": "json_object"}
        )
        assert json.loads(made.choices[0].message.content or "") == {}
