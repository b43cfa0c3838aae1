"""Acme assistants pass the conformance kit of integrations, and are trained with the folder store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from acme_agents import Assistant
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.testing.agent import AGENT_NAME, INSTRUCTIONS, MODEL, AgentConformance, Answer, ScriptedOpenAI, add


def make_assistant(endpoint: str = "http://127.0.0.1:9/v1") -> Assistant:
    client = AsyncOpenAI(base_url=endpoint, api_key="none", max_retries=0)
    return Assistant(AGENT_NAME, INSTRUCTIONS, tools=[add], model=MODEL, client=client)


class TestAssistants(AgentConformance):
    prompt_path = f"{AGENT_NAME}.instructions"

    @pytest.fixture
    def agent(self) -> Assistant:
        return make_assistant()


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ScriptedOpenAI(lambda request: Answer(request.body["messages"][0]["content"])) as server:
        yield server.endpoint


def test_an_assistant_is_trained_with_the_folder_store(tmp_path: Path, endpoint: str) -> None:
    @agl.algo
    async def better_words(store: agl.LightningStore, train_dataset: Any) -> None:
        best = {}
        for text in ("be brief", "be kind"):
            snapshot = await store.add_resources({"words": text})
            rollout = await store.enqueue_rollout(train_dataset[0], resources_id=snapshot.resources_id)
            await store.wait_for_rollouts([rollout.rollout_id])
            spans = await store.query_spans(rollout.rollout_id, "latest")
            best[agl.find_final_reward(spans.items)] = text
        await store.add_resources({"words": best[1.0]})

    store = agl.create_store(f"folder://{tmp_path}/folder")
    prompts = {f"{AGENT_NAME}.instructions": "words"}
    agent = agl.wrap(
        make_assistant(endpoint), lambda task, output, rollout: float(output == "be kind"), prompts=prompts
    )
    agl.Trainer(algorithm=better_words, store=store, strategy="shm", trackers=[]).fit(agent, ["hello"])
    latest = asyncio.run(store.get_latest_resources())
    asyncio.run(store.close())
    assert latest is not None
    assert latest.resources["words"] == agl.PromptTemplate("be kind")
