"""Asynchronous clients that a program keeps in global variables, with agents in the user's own process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI

_PROGRAM = """
import asyncio, sys
from openai import AsyncOpenAI
import agentlightning as agl

async def agent(task):
    answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": str(task)}])
    if task is not None:
        async with lock:
            await asyncio.sleep(0.001)
    return float(answer.choices[0].message.content == "Yes.")

async def call():
    assert await agent(None) == 1.0

async def fit():
    store = agl.create_store("memory://")
    agl.Trainer(algorithm="baseline", store=store, tracer="dummy", trackers=[], strategy=strategy).fit(agent, range(12))
    for rollout in await store.query_rollouts():
        assert (rollout.status, rollout.attempt.reward) == ("succeeded", 1.0), rollout.attempt.error

for strategy, max_retries, cells in [
    ("shm", 0, [fit, fit, call]),
    ("shm", 2, [call, fit, fit, call, fit, call]),  # a client that the notebook has already used needs retries
    ({"name": "shm", "main_thread": "runner"}, 0, [fit, fit, call]),
    ({"name": "cs", "main_process": "runner"}, 0, [fit, fit, call]),
]:
    print("cells with", strategy, max_retries, flush=True)
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="any", max_retries=max_retries)
    lock = asyncio.Lock()  # belongs to the loop in which a second task waits for it
    notebook = asyncio.new_event_loop()
    for cell in cells:
        notebook.run_until_complete(cell())
print("all cells ran")
"""


async def test_a_global_client_works_in_several_fits_of_a_notebook_and_in_calls_between_the_fits(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    async with ScriptedOpenAI([Answer("Yes.")]) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "program.py", server.endpoint),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert output.decode().splitlines()[-1] == "all cells ran"
    assert "Unclosed" not in output.decode()


@pytest.mark.parametrize(
    "strategy", [{"name": "shm", "main_thread": "runner"}, {"name": "cs", "main_process": "runner"}]
)
def test_the_algorithm_finishes_although_the_runner_has_already_reached_its_limit_of_rollouts(
    strategy: dict[str, Any],
) -> None:
    @agl.algo
    async def algorithm(store: agl.LightningStore) -> None:
        rollout = await store.enqueue_rollout("task")
        await store.wait_for_rollouts([rollout.rollout_id])
        await asyncio.sleep(0.5)
        await store.add_metrics(1, {"learned": 1.0})

    store = agl.create_store("memory://")
    settings: dict[str, Any] = {"tracer": "dummy", "trackers": [], "strategy": strategy, "max_rollouts": 1}
    assert agl.Trainer(algorithm=algorithm, store=store, **settings).fit(lambda task: 1.0).status == "succeeded"
    assert [metrics.values["learned"] for metrics in asyncio.run(store.query_metrics())] == [1.0]
