"""Rows of rollouts, and open rollouts of a resumed run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from omegaconf import OmegaConf

import agentlightning as agl
from agentlightning.store.lifecycle import MODEL_ERROR
from agentlightning_algorithms.shared.rollout_result import RolloutResult
from agentlightning_algorithms.verl.controller import RolloutController, RolloutSettings, cancel_open


async def make_controller(store: agl.LightningStore) -> RolloutController:
    controller = RolloutController(
        store=store, gateway=SimpleNamespace(flush=AsyncMock()), adapter=agl.TraceToTriplet(),
        tasks={"train": [0], "val": [0]}, initial_resources={}, settings=RolloutSettings(), loop=None,
        config=OmegaConf.create({"data": {"max_prompt_length": 9, "max_response_length": 9}}),
    )  # fmt: skip
    resources = (await store.add_resources({"prompt": agl.PromptTemplate("x")})).resources_id
    controller._resources |= dict.fromkeys(("train", "val", "greedy"), resources)
    return controller


async def end_next(store: agl.LightningStore, reward: float | None = None, *, by: str = "agent") -> None:
    """Ends the next rollout: with a reward, or because its agent or its model failed."""
    claimed = await store.dequeue_rollout("worker", timeout=60)
    assert claimed is not None
    ids = claimed.rollout_id, claimed.attempt.attempt_id
    if by == "model":
        await store.update_attempt(*ids, metadata={MODEL_ERROR: "no backend"})
        reward = 0.0  # of a program that swallowed the error
    await store.update_attempt(*ids, status="failed" if reward is None else "succeeded", reward=reward)


@pytest.mark.parametrize(
    ("endings", "rewards", "n_left_out"),
    [
        ([0.0, 1.0, "model"], [0.0, 1.0], 1),
        ([1.0, "agent", "model", "model"], [0.0, 1.0], 2),
        ([0.5, "model"], [0.5, 0.5], 0),  # verl would take the reward of a single rollout for its advantage
        (["model", "model"], [0.0, 0.0], 0),
    ],
    ids=["two others", "a failed agent", "one other", "no other"],
)
async def test_a_rollout_whose_model_failed_does_not_count_in_its_group(
    endings: list[float | str], rewards: list[float], n_left_out: int
) -> None:
    store = agl.InMemoryLightningStore()
    controller = await make_controller(store)
    group = [asyncio.create_task(controller.roll_out("train", 0, "g", 1)) for _ in endings]
    for ending in endings:
        await (end_next(store, by=ending) if isinstance(ending, str) else end_next(store, ending))
    episodes = await asyncio.gather(*group)
    assert sorted(episode.reward for episode in episodes if episode.rows) == rewards
    assert [entry.outcome for entry in controller.entries] == ["model_error"] * n_left_out
    assert all(entry.reward is None for entry in controller.entries)
    assert controller.metrics.take("train")["rollouts"] == len(endings)
    await store.close()


async def test_a_failed_rollout_gets_the_lowest_reward_of_its_group() -> None:
    store = agl.InMemoryLightningStore()
    controller = await make_controller(store)
    group = [asyncio.create_task(controller.roll_out("train", 0, "g", 1)) for _ in range(3)]
    for reward in (None, -0.2, -1.0):  # the failure ends first
        await end_next(store, reward)
    assert sorted([episode.reward for episode in await asyncio.gather(*group)]) == [-1.0, -1.0, -0.2]
    alone = asyncio.create_task(controller.roll_out("val", 0, "v", 1))
    await end_next(store)
    assert (await alone).reward == -1.0, "the lowest of the run"
    assert controller._groups == {}
    await store.close()


async def test_a_greedy_rollout_gives_the_baseline_and_is_counted_in_the_ledger() -> None:
    store = agl.InMemoryLightningStore()
    controller = await make_controller(store)
    assert controller._sampling("greedy")["temperature"] == 0
    own = asyncio.create_task(controller.roll_out("train", 0, "g", 3))
    greedy = controller.begin_greedy(0, "g", 3)
    assert controller.begin_greedy(0, "g", 3) is greedy, "one for all rollouts of the group"
    for reward in (0.25, 0.75):
        await end_next(store, reward)
    assert sorted([(await own).reward, (await greedy).reward]) == [0.25, 0.75]
    (entry,) = controller.entries
    assert (entry.step, entry.group, entry.reward) == (3, "g", (await greedy).reward)
    assert controller.metrics.take("train")["rollouts"] == controller.metrics.take("greedy")["rollouts"] == 1
    assert controller._greedy == controller._groups == {}
    await store.close()


async def test_rollouts_left_open_before_a_resume_are_cancelled() -> None:
    store = agl.InMemoryLightningStore()
    await store.enqueue_many_rollouts([agl.EnqueueRolloutRequest(input=n) for n in range(3)])
    done, running = [await store.dequeue_rollout("worker") for _ in range(2)]
    assert done is not None
    assert running is not None
    await store.update_attempt(done.rollout_id, done.attempt.attempt_id, status="succeeded")
    await cancel_open(store)
    assert sorted(r.status for r in await store.query_rollouts()) == ["cancelled", "cancelled", "succeeded"]
    await store.close()


async def test_calls_of_another_model_give_no_rows() -> None:
    spans = [
        agl.types.Span.from_attributes(
            attributes={
                "gen_ai.operation.name": "chat", "gen_ai.request.model": model, "gen_ai.response.id": model,
                "prompt_token_ids": [1], "response_token_ids": [token], "logprobs": [-0.5],
            },
            rollout_id="ro-1", attempt_id="at-1", name="chat",
        )
        for token, model in ((2, "policy"), (3, "clerk"))
    ]  # fmt: skip
    controller = await make_controller(agl.InMemoryLightningStore())
    rollout = agl.Rollout(rollout_id="ro-1", input=1, start_time=0.0, status="succeeded")
    episode = controller._to_episode("train", RolloutResult(rollout, spans, 1.0), 0.0)
    assert [row.response_ids for row in episode.rows] == [[2]]


async def test_rows_are_in_the_order_of_their_batch_whichever_group_starts_first() -> None:
    store = agl.InMemoryLightningStore()
    controller = await make_controller(store)
    controller.order(["second-in-time", "first-in-time"])
    for group in ("first-in-time", "second-in-time"):
        rollout = asyncio.create_task(controller.roll_out("train", 0, group, 1))
        await end_next(store, 1.0)
        await rollout
    keys = ["first-in-time_0_0", "second-in-time_1_0", "second-in-time_0_1", "second-in-time_0_0"]
    assert sorted(keys, key=controller.place_of) == keys[::-1]
    await store.close()
