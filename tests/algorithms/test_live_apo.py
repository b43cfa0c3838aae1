"""APO as the proposer of live learning."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

import agentlightning as agl
from agentlightning_algorithms.shared.live_resources import LiveExperience, Result, read_live_history
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest
from tests.algorithms.live_service import BEGIN, GOOD, run_checks, running, serving
from tests.algorithms.prompt_lab import Server, client, is_critic


def model(request: RecordedRequest) -> Answer:
    """Proposes the better prompt."""
    return Answer("It asks for too little." if is_critic(request) else f"<prompt>{GOOD}</prompt>")


def make(server: Any, **settings: Any) -> agl.APO:
    return agl.APO(client(server), gradient_model="critic", apply_edit_model="editor", **settings)


@pytest.fixture
async def experience(tmp_path: Path) -> AsyncIterator[LiveExperience]:
    """Ten served rollouts, four with a reward of 0."""
    store = agl.InMemoryLightningStore()
    update = await store.update_resources("tuned", {"prompt": BEGIN})
    async with serving(store) as service:
        served = await service.serve(10)
    rewards = [agl.find_final_reward((await store.query_spans(each.rollout_id)).items) or 0.0 for each in served]
    assert rewards.count(0.0) == 4
    results = [Result(rollout, reward) for rollout, reward in zip(served, rewards, strict=True)]
    yield LiveExperience(update.resources, results, ["began"], store, tmp_path)
    await store.close()


async def test_a_service_improves_with_the_critic_and_the_editor_of_apo() -> None:
    store = agl.InMemoryLightningStore()
    await store.update_resources("tuned", {"prompt": BEGIN})
    with Server(model) as server:
        learner = agl.LiveLearning(
            make(server).propose, evidence=10, check_tasks=4, share=0.4, margin=0.2, refresh_s=0.03, max_trials=1
        )
        learner.set_store(store)
        async with serving(store) as service, running(service.serve(), run_checks(store)):
            await learner.run()
    latest = await store.get_latest_resources()
    assert latest is not None
    assert latest.resources == {"prompt": agl.PromptTemplate(GOOD)}
    assert "promoted as tuned@2" in (await read_live_history(store))[-1].note
    assert len(server.requests) == 2
    await store.close()


async def test_the_critic_reads_served_rollouts_including_the_worst(experience: LiveExperience) -> None:
    with Server(model) as server:
        assert await make(server, gradient_batch_size=5).propose(experience) == {"prompt": agl.PromptTemplate(GOOD)}
    critic, editor = (request.body["messages"][0]["content"] for request in server.requests)
    assert BEGIN in critic
    assert critic.count("<rollout ") == 5
    assert critic.count('status="succeeded" reward="0"') >= 3
    assert "<task>" in critic
    assert "It asks for too little." in editor


async def test_recorded_calls_are_not_repeated_and_count_in_the_budget_after_a_restart(
    experience: LiveExperience,
) -> None:
    with Server(model) as server:
        for _ in range(2):
            assert await make(server, max_calls=2).propose(experience) is not None
            assert len(server.requests) == 2
        later = dataclasses.replace(experience, notes=["began", "rolled back"], results=experience.results[:5])
        assert await make(server, max_calls=2).propose(later) is None
        assert len(server.requests) == 2


async def test_a_failing_model_call_is_reported(experience: LiveExperience) -> None:
    with Server([Answer(status=401, error="wrong key")]) as server:
        with pytest.raises(agl.LightningError, match="AuthenticationError"):
            await make(server).propose(experience)
        with pytest.raises(agl.ConfigError, match="no prompt to tune"):
            await make(server).propose(dataclasses.replace(experience, resources={}))


def test_the_proposer_can_be_an_algorithm_of_a_configuration() -> None:
    propose = agl.LiveLearning({"name": "apo", "max_calls": 7}).propose
    assert isinstance(propose, MethodType)
    assert propose.__func__ is agl.APO.propose
    assert isinstance(propose.__self__, agl.APO)
    assert propose.__self__.budget.max_calls == 7
