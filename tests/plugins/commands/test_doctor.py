"""``agl doctor``: each link broken on purpose, and the right line says so."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner

from agentlightning.adapter import TraceToTriplet
from agentlightning.plugin.registry import Plugin, get_manager
from agentlightning.types import Attempt, AttemptedRollout
from agentlightning_plugins.commands.doctor.checkup import Order, check_up
from agentlightning_plugins.commands.doctor.command import command
from agentlightning_plugins.commands.doctor.endpoint import answer_request
from agentlightning_plugins.commands.doctor.environment import check_environment
from agentlightning_plugins.commands.doctor.finding import Finding
from agentlightning_plugins.commands.doctor.link import NAMES, Link
from agentlightning_plugins.scripted_model.server import EOS, Answer, ScriptedOpenAI, encode
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

def calls_nobody(task, llm):
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

async def named(task, llm):
    with agl.operation(name="solver", **{"agent.name": "solver"}):
        await asyncio.to_thread(ask, llm, [{"role": "user", "content": "hi"}])
    return 1.0

NOT_AN_AGENT = 3
"""


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("doctor") / "doctors_patients.py"
    file.write_text(AGENTS, encoding="utf-8")
    return str(file)


async def check(agents: str, agent: str = "good", **order: Any) -> dict[str, Link]:
    links = await check_up(Order(agent=f"{agents}:{agent}", **order))
    assert tuple(link.name for link in links) == NAMES
    return {link.name: link for link in links}


def broken(links: Mapping[str, Link]) -> list[str]:
    assert all(link.mend for link in links.values() if link.state == "broken"), "a broken link says how to mend it"
    return [link.name for link in links.values() if link.state == "broken"]


class Server:
    """A model server whose tokens go on from call to call, as long as nobody spoils them."""

    def __init__(self) -> None:
        self.spoil_answer: Callable[[dict[str, Any]], None] = lambda choice: None
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
        return web.json_response(
            {
                "id": f"id-{len(body['messages'])}",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [choice],
                "prompt_token_ids": prompt,
            }
        )


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    routes = web.get("/v1/models", server.models), web.post("/v1/chat/completions", server.complete)
    async with serving(*routes) as url:
        server.url = f"{url}/v1"
        yield server


async def test_every_link_of_a_sound_agent_holds(agents: str, server: Server) -> None:
    links = await check(agents, endpoint=server.url)
    assert {link.state for link in links.values()} == {"ok"}
    assert links["calls"].text == "3 model calls went through the rollout's endpoint"
    assert links["endpoint"].text == f"{server.url} answers; model m"
    assert links["reward"].text == "the rollout's reward is 0.5"
    assert links["triplets"].text == "3 triplets to learn from"
    assert links["template"].text == "2 calls begin exactly with the tokens of the one before"


async def test_without_an_endpoint_a_scripted_one_answers_and_says_so(agents: str) -> None:
    links = await check(agents)
    assert broken(links) == []
    assert "a scripted server answers" in links["endpoint"].text
    assert links["template"].state == "unchecked"


# Environment.


def distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


def test_the_other_lightning_is_told_apart_from_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_environment().state == "ok"
    distribution(tmp_path, "lightning", "2.5.0")
    monkeypatch.syspath_prepend(tmp_path)
    link = check_environment()
    assert link.state == "broken"
    assert link.text == "PyTorch Lightning (distribution lightning 2.5.0) is installed here"
    assert "make a new one" in link.mend


def test_a_module_named_lightning_is_noticed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert "a module named lightning, which is not ours" in check_environment().text


def test_a_version_that_does_not_work_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "openai", "1.3.0")
    distribution(tmp_path, "pydantic", "1.10.0")
    monkeypatch.syspath_prepend(tmp_path)
    link = check_environment()
    assert link.state == "broken"
    assert "openai 1.3.0 is installed, and >=2.54 is needed" in link.text
    assert "pydantic 1.10.0 is installed, and >=2.12 is needed" in link.text


def test_a_plugin_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = Plugin("mine", "my-company 1.0", "mine.plugin", "broken", "ImportError: no module named there")
    monkeypatch.setitem(get_manager().plugins, "mine", faulty)
    link = check_environment()
    assert link.state == "broken"
    assert "mine of my-company 1.0: ImportError: no module named there" in link.text


# Agent.


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("goood", "has no goood. Did you mean 'good'?"),
        ("NOT_AN_AGENT", "3 is not an agent; give a function"),
    ],
)
async def test_an_agent_that_is_none_is_said_to_be_none(agents: str, agent: str, message: str) -> None:
    links = await check(agents, agent)
    assert broken(links) == ["agent"]
    assert message in links["agent"].text
    assert links["rollout"] == Link("rollout", "unchecked", "needs the link 'agent'")


async def test_a_module_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken_patient.py").write_text("import no_such_package_anywhere\n", encoding="utf-8")
    links = await check_up(Order(agent=f"{tmp_path}/broken_patient.py:agent"))
    assert links[1].state == "broken"
    assert "No module named 'no_such_package_anywhere'" in links[1].text
    assert "import" in links[1].mend


# Endpoint.


async def test_an_endpoint_that_is_down_is_said_to_be_down(agents: str) -> None:
    links = await check(agents, endpoint="http://127.0.0.1:9/v1")
    assert broken(links) == ["endpoint"]
    assert "http://127.0.0.1:9/v1 cannot be reached: [Errno 111] Connection refused" in links["endpoint"].text
    assert "start the model server" in links["endpoint"].mend


async def test_a_base_url_without_v1_is_noticed(agents: str, server: Server) -> None:
    links = await check(agents, endpoint=server.url.removesuffix("/v1"))
    assert broken(links) == ["endpoint"]
    assert "the base URL usually ends in /v1" in links["endpoint"].mend


async def test_a_model_that_the_server_does_not_have_is_noticed(agents: str, server: Server) -> None:
    links = await check(agents, endpoint=server.url, model="n")
    assert broken(links) == ["endpoint"]
    assert "has no model 'n'; it has: m" in links["endpoint"].text


# Rollout.


async def test_an_agent_that_raises_says_what_and_where(agents: str) -> None:
    links = await check(agents, "fails")
    assert broken(links) == ["rollout"], "the others are no news"
    assert "TypeError: string indices must be integers" in links["rollout"].text
    assert f"at {agents}:" in links["rollout"].text
    assert "it ran on the task 'Say hello.'; give one that it takes" in links["rollout"].mend
    assert links["calls"] == Link("calls", "unchecked", "the rollout failed before it made one")
    assert links["reward"].text == "the rollout failed before it said one"
    with_task = await check(agents, "fails", task={"question": 0.5})
    assert with_task["rollout"].state == "ok"


async def test_an_agent_that_never_ends_is_stopped(agents: str) -> None:
    links = await check(agents, "hangs", timeout_s=0.3)
    assert broken(links)[0] == "rollout"
    assert "no result within timeout_seconds=0.3" in links["rollout"].text
    assert "--timeout" in links["rollout"].mend


async def test_a_prompt_that_the_agent_asks_for_can_be_given(agents: str) -> None:
    links = await check(agents, "wants_prompt")
    assert broken(links)[0] == "rollout"
    assert "asks for 'prompt_template' but no resource has this name" in links["rollout"].text
    assert "--resource NAME=TEXT" in links["rollout"].mend
    assert broken(await check(agents, "wants_prompt", resources={"prompt_template": "be nice"})) == []


# Calls and spans.


async def test_an_agent_that_calls_somebody_else_is_found_out(agents: str) -> None:
    async with ScriptedOpenAI() as elsewhere:
        await check(agents, "calls_nobody")  # imports the module
        sys.modules["doctors_patients"].ELSEWHERE = elsewhere.endpoint  # type: ignore[attr-defined] # its setting
        links = await check(agents, "ignores_endpoint")
    assert broken(links)[0] == "calls"
    assert links["calls"].text == "the agent made 1 model call, none of them through the rollout's endpoint"
    assert "OpenAI(base_url=llm.get_base_url()" in links["calls"].mend


async def test_an_agent_that_makes_no_call_is_found_out(agents: str) -> None:
    links = await check(agents, "calls_nobody")
    assert broken(links) == ["calls", "triplets"]
    assert links["calls"].text == "the agent made no model call"
    assert links["triplets"].text == "no triplets: no span is a model call"


async def test_prompts_are_tuned_without_model_calls(agents: str) -> None:
    links = await check(agents, "calls_nobody", trains_weights=False)
    assert broken(links) == []
    assert (links["calls"].state, links["triplets"].state) == ("unchecked", "unchecked")


async def test_a_configuration_names_agent_resources_task_and_what_is_tuned(
    agents: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedOpenAI(answer_request) as server:
        (tmp_path / "c.yaml").write_text(
            f"agent: {agents}:good\ndata: {{train: tasks.json}}\nalgorithm: apo\n"
            f"resources: {{llm: {{resource_type: llm, endpoint: {server.endpoint}, model: scripted}}}}\n"
        )
        (tmp_path / "tasks.json").write_text('["first", "second"]')
        monkeypatch.chdir(tmp_path)
        done = await asyncio.to_thread(CliRunner().invoke, command, ["c.yaml"], catch_exceptions=False)
        asked = [request.body["model"] for request in server.requests if request.body]
    assert done.exit_code == 0, done.output
    assert "the agent ran on the task 'first'" in done.output
    assert "logprobs     not needed to tune prompts" in done.output
    assert set(asked) == {"scripted"}


async def test_a_server_that_answers_no_call_is_found_out(agents: str) -> None:
    async with ScriptedOpenAI([Answer(status=400, error="context too long")]) as server:
        links = await check(agents, "survives", endpoint=server.endpoint)
    assert broken(links) == ["calls", "triplets"]
    assert "none of 1 model call was answered; the last: " in links["calls"].text
    assert "context too long" in links["calls"].text


def test_spans_that_were_lost_are_counted() -> None:
    attempt = Attempt(
        rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0, status="succeeded", spans_dropped=3
    )
    rollout = AttemptedRollout(rollout_id="ro-1", input=0, start_time=0.0, status="succeeded", attempt=attempt)
    links = {link.name: link for link in Finding(rollout, [], TraceToTriplet(), False, True).links()}
    assert links["spans"].state == "broken"
    assert links["spans"].text == "3 spans of 3 did not arrive"


# Tokens.


async def test_a_server_without_token_ids_is_found_out(agents: str) -> None:
    async with ScriptedOpenAI(token_ids="ignore") as server:
        links = await check(agents, endpoint=server.endpoint)
        for_prompts = await check(agents, endpoint=server.endpoint, trains_weights=False)
    assert broken(links) == ["token ids"]
    assert links["token ids"].text == "3 of 3 answered calls came without token ids"
    assert "return_token_ids" in links["token ids"].mend
    assert broken(for_prompts) == [], "tuning prompts needs none"


async def test_a_server_without_logprobs_is_found_out(agents: str, server: Server) -> None:
    server.spoil_answer = lambda choice: choice.pop("logprobs")
    links = await check(agents, endpoint=server.url)
    assert broken(links) == ["logprobs"]
    assert links["logprobs"].text == "3 of 3 answered calls came without logprobs"


async def test_a_server_that_forgets_a_logprob_is_found_out(agents: str, server: Server) -> None:
    server.spoil_answer = lambda choice: choice["logprobs"]["content"].pop()
    links = await check(agents, endpoint=server.url)
    assert broken(links) == ["logprobs", "triplets"]
    assert links["logprobs"].text == "a call has 24 response tokens and 23 logprobs"
    assert "must return one logprob for each sampled token" in links["triplets"].text


# Reward and triplets.


async def test_an_agent_that_says_no_reward_is_found_out(agents: str) -> None:
    links = await check(agents, "no_reward")
    assert broken(links) == ["reward"]
    assert "agl.emit_reward(...)" in links["reward"].mend
    judged = await check(agents, "no_reward", reward=f"{agents}:judge")
    assert judged["reward"].text == "the rollout's reward is 0.25"


async def test_an_agent_match_that_matches_nobody_is_found_out(
    agents: str, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    links = await check(agents, "named", endpoint=server.url, agent_match="writer")
    assert broken(links) == ["triplets"]
    assert "1 made by agent 'solver', which agent_match='writer' excludes" in links["triplets"].text
    assert "agents here: solver" in links["triplets"].mend
    matched = await check(agents, "named", endpoint=server.url, agent_match="solver")
    assert matched["triplets"].text == "1 triplet to learn from, by solver"
    assert matched["template"].text == "no call goes on with the conversation of another"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == [], "the links say it"


# Template.


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda tokens: [7, 7, *tokens], "template"),
        (lambda tokens: [*tokens[:3], 300, *tokens[5:]], "retokenisation"),
    ],
    ids=["template", "retokenisation"],
)
async def test_history_that_becomes_other_tokens_is_found_out(
    agents: str, server: Server, spoil: Callable[[list[int]], list[int]], kind: str
) -> None:
    server.spoil_history = spoil
    links = await check(agents, endpoint=server.url)
    assert broken(links) == ["template"]
    assert f"2 calls cannot be joined with the one before (2 {kind}): " in links["template"].text
    assert "keeps history as it was sampled" in links["template"].mend


async def test_an_agent_that_edits_its_history_is_found_out(agents: str, server: Server) -> None:
    links = await check(agents, "edits_history", endpoint=server.url)
    assert broken(links) == ["template"]
    assert "the agent changed the history of the conversation, from message 1 on" in links["template"].text
    assert "only append messages" in links["template"].mend


# The command.


def test_the_command_prints_one_line_for_each_link() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agentlightning", "doctor", "demo"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line[10:22].strip() for line in lines] == list(NAMES)
    assert lines[7].startswith("ok        logprobs     one for each sampled token")


def test_the_command_exits_with_1_when_a_link_is_broken(agents: str) -> None:
    done = CliRunner().invoke(command, [f"{agents}:no_reward", "--json"])
    assert done.exit_code == 1, done.output
    report = json.loads(done.output)
    assert report["ok"] is False
    assert [link["name"] for link in report["links"] if link["state"] == "broken"] == ["reward"]
    shown = CliRunner().invoke(command, [f"{agents}:no_reward", "--task", '{"a": 1}', "--resource", "p=text"])
    assert "BROKEN    reward       the agent said no reward -> return a number" in shown.output
    assert "the agent ran on the task {'a': 1}" in shown.output
    assert CliRunner().invoke(command, ["demo", "--resource", "text"]).exit_code == 2


def test_the_scripted_server_calls_a_tool_with_arguments_that_fit() -> None:
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
