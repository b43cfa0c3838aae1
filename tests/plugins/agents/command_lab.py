"""Runs command agents in a store."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import psutil
import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.types import AttemptedRollout, Span
from tests.waiting import until

CALL_MODEL = """
    import json, os, sys, urllib.request
    def call(text):
        body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
"""


@pytest.fixture
async def store() -> AsyncIterator[agl.LightningStore]:
    store = agl.InMemoryLightningStore()
    yield store
    await store.close()


@pytest.fixture
def tracer() -> Iterator[agl.OtelTracer]:
    tracer = agl.OtelTracer()
    tracer.init()
    yield tracer
    tracer.teardown()


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *arguments]


def shell(code: str, *arguments: str) -> list[str]:
    return ["sh", "-c", textwrap.dedent(code), "sh", *arguments]


async def run(
    store: agl.LightningStore,
    agent: Any,
    task: Any = "task",
    *,
    resources: Mapping[str, agl.Resource | str] | None = None,
    timeout_s: float | None = None,
) -> tuple[AttemptedRollout, list[Span]]:
    """Runs one rollout to its end."""
    (ended,) = await run_all(store, agent, [task], resources=resources, timeout_s=timeout_s)
    return ended


async def run_all(
    store: agl.LightningStore,
    agent: Any,
    tasks: list[Any],
    *,
    resources: Mapping[str, agl.Resource | str] | None = None,
    timeout_s: float | None = None,
) -> list[tuple[AttemptedRollout, list[Span]]]:
    if resources is not None:
        await store.add_resources(resources)
    config = agl.RolloutConfig(timeout_seconds=timeout_s)
    ids = [(await store.enqueue_rollout(task, mode="train", config=config)).rollout_id for task in tasks]
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.OtelTracer(), max_rollouts=len(tasks))
    with runner.run_context(agent=agl.wrap(agent), store=store):
        await runner.iter()
    ended = []
    for rollout_id in ids:
        rollout = await store.get_rollout_by_id(rollout_id)
        assert isinstance(rollout, AttemptedRollout)
        ended.append((rollout, list(await store.query_spans(rollout_id, "latest"))))
    return ended


def command_span(spans: list[Span]) -> Span:
    (span,) = [span for span in spans if span.name.startswith("invoke_agent")]
    return span


def printed(spans: list[Span]) -> str:
    return str(command_span(spans).attributes[semconv.OPERATION_OUTPUT])


def processes_of(rollout_id: str) -> list[psutil.Process]:
    """Returns the processes of a rollout's command, which have other ids in their own namespace."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("AGL_ROLLOUT_ID") == rollout_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


async def are_gone(rollout_id: str) -> bool:
    await until(lambda: not processes_of(rollout_id))
    return True
