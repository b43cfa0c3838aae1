"""Agents of Agent Lightning 0.1 with current algorithms, in separate processes."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import pytest

import agentlightning as agl
from agentlightning.errors import StoreError
from agentlightning.run import attempt_token
from agentlightning.types import Span
from agentlightning_plugins.legacy.v0 import AgentLightningClient, AgentLightningServer, RolloutLegacy
from tests.waiting import LIMIT_S

ALGORITHM = """
import asyncio, sys
import agentlightning as agl
from agentlightning_plugins.legacy.v0 import AgentLightningServer

async def learn():
    store = agl.create_store("memory://")
    server = AgentLightningServer(port=0, store=store)
    await server.start()
    print(server.endpoint, flush=True)
    resources = {"main_llm": agl.ProxyLLM(endpoint="http://gateway/v1", model="m", api_key="agentlightning")}
    await store.add_resources({**resources, "prompt": "Add {a}"})
    modes = {1: "train", 2: "val", 3: None}
    requests = [agl.EnqueueRolloutRequest(input={"a": a}, mode=mode) for a, mode in modes.items()]
    rollouts = await store.enqueue_many_rollouts(requests)
    for rollout in await store.wait_for_rollouts([rollout.rollout_id for rollout in rollouts], timeout=300):
        spans = await store.query_spans(rollout.rollout_id)
        messages = [span.attributes["agentlightning.message.body"] for span in spans if "message" in span.name]
        is_own = rollout.rollout_id in str(messages)
        print(rollout.status, agl.find_final_reward(spans), is_own, [text[:12] for text in messages])
    await server.stop()
    await store.close()

asyncio.run(learn())
"""

AGENT = """
import sys
import agentlightning.compat
from agentlightning import LitAgent, Trainer, emit_message

class Adder(LitAgent):
    def __init__(self):
        super().__init__(trained_agents="adder")

    def training_rollout(self, task, rollout_id, resources):
        emit_message(f"train {resources['prompt'].format(a=task['a'])} {resources['main_llm'].endpoint}")
        return task["a"] / 10

    def validation_rollout(self, task, rollout_id, resources):
        if task["a"] == 3:
            raise ValueError("the agent failed")
        emit_message(f"val   {resources['prompt'].format(a=task['a'])} {resources['main_llm'].endpoint}")
        return task["a"] / 10

Trainer(n_workers=2, max_tasks=3, tracer="otel").fit_v0(Adder(), sys.argv[1])
"""


@pytest.mark.slow
def test_an_old_agent_works_with_a_new_algorithm(tmp_path: Path) -> None:
    for name, program in (("algorithm.py", ALGORITHM), ("agent.py", AGENT)):
        (tmp_path / name).write_text(program)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    algorithm = subprocess.Popen(
        [sys.executable, str(tmp_path / "algorithm.py")], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert algorithm.stdout is not None
    try:
        endpoint = algorithm.stdout.readline().strip()
        done = subprocess.run(
            [sys.executable, str(tmp_path / "agent.py"), endpoint],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        output = algorithm.communicate(timeout=LIMIT_S)[0]
    finally:
        algorithm.kill()
    assert algorithm.returncode == 0
    assert output.splitlines() == [
        "succeeded 0.1 True ['train Add 1 ']",
        "succeeded 0.2 True ['val   Add 2 ']",
        "failed None False []",
    ]


async def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    def send() -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"})) as answer:
            return json.loads(answer.read())

    return await asyncio.to_thread(send)


async def test_an_old_algorithm_queues_tasks_and_gets_reports() -> None:
    server = AgentLightningServer(port=0)
    await server.start()
    try:
        resources_id = await server.update_resources({"main_llm": agl.LLM(endpoint="http://x/v1", model="m")})
        rollout_id = await server.queue_task({"n": [1]}, mode="train", resources_id=resources_id, metadata={"k": 1})
        latest, named = [await ask(f"{server.endpoint}/resources/{name}") for name in ("latest", resources_id)]
        assert latest["resources"] == named["resources"]
        assert named["resources_id"] == resources_id
        answer = await ask(f"{server.endpoint}/task")
        assert answer["is_available"]
        task = answer["task"]
        assert (task["rollout_id"], task["input"], task["metadata"]) == (rollout_id, {"n": [1]}, {"k": 1})
        assert not (await ask(f"{server.endpoint}/task"))["is_available"]
        assert await server.poll_completed_rollout(rollout_id, timeout=0.01) is None
        triplets = [{"prompt": {"token_ids": [1, 2]}, "response": {"token_ids": [3]}, "reward": 0.5, "metadata": {}}]
        report = {"rollout_id": rollout_id, "triplets": triplets, "final_reward": 0.75, "trace": None, "logs": None}
        await ask(f"{server.endpoint}/rollout", report)
        completed = await server.poll_completed_rollout(rollout_id, timeout=LIMIT_S)
        assert completed == RolloutLegacy.model_validate(report)
        assert await server.retrieve_completed_rollouts() == []
        rollout = await server.store.get_rollout_by_id(rollout_id)
        assert rollout is not None
        assert rollout.status == "succeeded"
        spans = await server.store.query_spans(rollout_id)
        assert agl.find_final_reward(spans) == 0.75
        (call,) = agl.TraceToTriplet().adapt(spans)
        assert call.reward == 0.5
        assert call.metadata["untrusted"], "weights are not trained on tokens that an agent reports"
        assert (call.prompt["token_ids"], call.response["token_ids"]) == ([], [])
        with pytest.raises(urllib.error.HTTPError):
            await ask(f"{server.endpoint}/rollout", report)  # a rollout ends once
    finally:
        await server.stop()
        await server.store.close()


async def test_the_synchronous_client_claims_a_task_reads_resources_and_reports() -> None:
    server = AgentLightningServer(port=0)
    await server.start()
    try:
        await server.update_resources({"prompt": agl.PromptTemplate("Say {n}.")})
        rollout_id = await server.queue_task({"n": 1})
        client = AgentLightningClient(server.endpoint)
        task = await asyncio.to_thread(client.poll_next_task)
        assert (task.rollout_id, task.resources_id is not None) == (rollout_id, True)
        own = await asyncio.to_thread(client.get_resources_by_id, task.resources_id)
        latest = await asyncio.to_thread(client.get_latest_resources)
        assert own.resources["prompt"].template == latest.resources["prompt"].template == "Say {n}."
        await asyncio.to_thread(client.post_rollout, RolloutLegacy(rollout_id=rollout_id, final_reward=0.5))
        (ended,) = await server.store.wait_for_rollouts([rollout_id], timeout=LIMIT_S)
        assert ended.status == "succeeded"
    finally:
        await server.stop()
        await server.store.close()


async def test_the_key_of_a_claimed_task_is_valid_until_the_task_times_out() -> None:
    server = AgentLightningServer(port=0, task_timeout_seconds=60)
    await server.start()
    try:
        await server.update_resources(
            {"main_llm": agl.ProxyLLM(endpoint="http://gateway/v1", model="m", api_key="agentlightning")}
        )
        rollout_id = await server.queue_task("hi")
        task = (await ask(f"{server.endpoint}/task"))["task"]
        answer = await ask(f"{server.endpoint}/resources/{task['resources_id']}")
        secret, now = attempt_token.derive_secret(server.store.token), server.store.now()
        key = answer["resources"]["main_llm"]["api_key"]
        assert attempt_token.read(secret, key, now).rollout_id == rollout_id
        with pytest.raises(ValueError, match="expired"):
            attempt_token.read(secret, key, now + 2 * 3600)
    finally:
        await server.stop()
        await server.store.close()


async def test_the_task_of_a_lost_agent_of_0_1_goes_to_another_agent() -> None:
    server = AgentLightningServer(port=0, task_timeout_seconds=0.05)
    config = agl.RolloutConfig(max_attempts=2, retry_condition=["timeout"])
    await server.start()
    try:
        rollout = await server.store.enqueue_rollout("task", config=config)
        assert (await ask(f"{server.endpoint}/task"))["task"]["num_claims"] == 1
        answer = await ask(f"{server.endpoint}/task")
        while not answer["is_available"]:
            answer = await ask(f"{server.endpoint}/task")
        assert (answer["task"]["rollout_id"], answer["task"]["num_claims"]) == (rollout.rollout_id, 2)
    finally:
        await server.stop()
        await server.store.close()


async def test_a_task_from_queue_task_is_queued_again_when_its_agent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    server = AgentLightningServer(port=0, task_timeout_seconds=0.05)
    await server.start()
    update = server.store.update_attempt

    async def take_a_moment(*arguments: Any, **changes: Any) -> agl.Attempt:
        await asyncio.sleep(0.02)
        return await update(*arguments, **changes)

    monkeypatch.setattr(server.store, "update_attempt", take_a_moment)
    try:
        queued = {await server.queue_task(number) for number in range(2)}
        for _ in queued:
            assert (await ask(f"{server.endpoint}/task"))["is_available"]
        await asyncio.sleep(0.1)
        found = set()
        while found != queued:  # several agents request tasks while the server ends the lost attempts
            for answer in await asyncio.gather(*(ask(f"{server.endpoint}/task") for _ in range(4))):
                found |= {answer["task"]["rollout_id"]} if answer["is_available"] else set()
    finally:
        await server.stop()
        await server.store.close()


@pytest.mark.parametrize("error", [StoreError("the server is away"), ConnectionResetError()])
async def test_the_task_of_a_lost_agent_is_queued_again_although_the_store_was_briefly_unavailable(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = AgentLightningServer(port=0, task_timeout_seconds=0.05)
    await server.start()
    try:
        rollout_id = await server.queue_task(1)
        assert (await ask(f"{server.endpoint}/task"))["is_available"]
        await asyncio.sleep(0.1)
        with monkeypatch.context() as outage:
            outage.setattr(server.store, "update_attempt", AsyncMock(side_effect=error))
            with pytest.raises(urllib.error.HTTPError) as caught:
                await ask(f"{server.endpoint}/task")
            caught.value.close()
        task = (await ask(f"{server.endpoint}/task"))["task"]
        assert (task["rollout_id"], task["num_claims"]) == (rollout_id, 2)
    finally:
        await server.stop()
        await server.store.close()


async def test_a_task_from_queue_task_is_queued_again_when_its_lease_ends_after_its_first_span() -> None:
    server = AgentLightningServer(port=0, store=agl.InMemoryLightningStore(lease_s=0.1))
    await server.start()
    try:
        rollout_id = await server.queue_task(1)
        await ask(f"{server.endpoint}/task")
        attempt = await server.store.get_latest_attempt(rollout_id)
        assert attempt is not None
        ids = rollout_id, attempt.attempt_id
        span = agl.Span.from_attributes(attributes={}, rollout_id=ids[0], attempt_id=ids[1], name="a model call")
        await server.store.add_span(span)
        for _ in range(20):
            await asyncio.sleep(0.5)  # longer than the lease, which each request renews
            if (answer := await ask(f"{server.endpoint}/task"))["is_available"]:
                break
        assert (answer["task"]["rollout_id"], answer["task"]["num_claims"]) == (rollout_id, 2)
    finally:
        await server.stop()
        await server.store.close()


async def test_a_report_that_could_not_be_stored_may_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server = AgentLightningServer(port=0)
    await server.start()
    try:
        own = await server.queue_task(1)
        other = (await server.store.enqueue_rollout(2)).rollout_id
        reports = [{"rollout_id": (await ask(f"{server.endpoint}/task"))["task"]["rollout_id"], "final_reward": 1.0}]
        with monkeypatch.context() as outage:
            outage.setattr(server.store, "add_many_spans", AsyncMock(side_effect=StoreError("the server is away")))
            with pytest.raises(urllib.error.HTTPError) as caught:
                await ask(f"{server.endpoint}/rollout", reports[0])
            assert caught.value.code == 503
            caught.value.close()
        reports.append(
            {"rollout_id": (await ask(f"{server.endpoint}/task"))["task"]["rollout_id"], "final_reward": 1.0}
        )
        for report in reports:
            await ask(f"{server.endpoint}/rollout", report)
        for rollout_id in (own, other):
            rollout = await server.store.get_rollout_by_id(rollout_id)
            assert rollout is not None
            assert rollout.status == "succeeded"
        # This server keeps no reports of rollouts that others enqueue.
        assert [report.rollout_id for report in await server.retrieve_completed_rollouts()] == [own]
    finally:
        await server.stop()
        await server.store.close()


async def test_servers_of_one_store_are_separate_workers() -> None:
    store = agl.InMemoryLightningStore()
    servers = [AgentLightningServer(port=0, store=store) for _ in range(2)]
    for server in servers:
        await server.start()
        await server.queue_task("task")
        assert (await ask(f"{server.endpoint}/task"))["is_available"]
    assert len((await store.query_workers()).items) == 2
    for server in servers:
        await server.stop()
    await store.close()


async def test_web_pages_and_malformed_reports_are_refused_and_lose_no_task() -> None:
    server = AgentLightningServer(port=0)
    await server.start()
    try:
        rollout_id = await server.queue_task({"a": 1})
        async with aiohttp.ClientSession(server.endpoint) as session:
            pages = {"Host": "evil.example:8000"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}
            for headers in pages:
                async with session.get("/task", headers=headers) as answer:
                    assert answer.status == 403
            async with session.get("/task") as answer:
                assert (await answer.json())["task"]["rollout_id"] == rollout_id
            report = {"rollout_id": rollout_id, "final_reward": 1.0}
            bomb = gzip.compress(b" " * 100 * 2**20)
            malformed: list[tuple[bytes, int]] = [(b"{", 400), (b"[" * 10**6, 400), (b"{}", 400), (bomb, 413)]
            traces: list[Any] = [{"trace_id": 1}, {"context": 1}, {"start_time": "x"}, {"attributes": "x"}]
            malformed += [(json.dumps({**report, "trace": [trace]}).encode(), 400) for trace in traces]
            malformed += [(json.dumps({**report, "final_reward": 10**400}).encode(), 400)]
            for body, status in malformed:
                coding = {"Content-Encoding": "gzip"} if body is bomb else {}
                async with session.post("/rollout", data=body, headers=coding) as answer:
                    assert answer.status == status, (body[:200], await answer.text())
            async with session.post("/rollout", json=report) as answer:
                assert answer.status == 200
        completed = await server.get_completed_rollout(rollout_id)
        assert completed is not None
        assert completed.final_reward == 1.0
    finally:
        await server.stop()
        await server.store.close()


@pytest.mark.parametrize(
    ("name", "attributes", "reward"),
    [
        ("reward.task", {"agentops.task.output": '{"type": "reward", "value": 0.25}'}, 0.25),
        ("agentlightning.annotation", {"reward": 0.5}, 0.5),
        ("reward.task", {"agentops.entity.output": '{"type": "reward", "value": 1}'}, 1.0),
        ("agentlightning.reward", {"reward": 0.75}, 0.75),
        ("reward.task", {"agentops.task.output": '{"type": "reward", "value": null}'}, None),
        ("search.task", {"agentops.task.output": '{"type": "answer", "value": 1}'}, None),
        ("search.task", {"agentops.task.output": "no JSON", "reward": 1.0}, None),
    ],
)
def test_rewards_of_earlier_releases_are_read(name: str, attributes: dict[str, Any], reward: float | None) -> None:
    span = Span.from_attributes(attributes=attributes, name=name)
    assert agl.is_reward_span(span) is (reward is not None)
    assert agl.find_final_reward([span]) == reward
    assert [dimension.value for dimension in agl.get_rewards_from_span(span)] == ([] if reward is None else [reward])
