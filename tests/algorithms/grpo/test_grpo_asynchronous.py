"""Rollouts that continue while the weights change (``staleness`` of at least 2)."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning_algorithms.grpo.batches import GroupPool
from agentlightning_algorithms.grpo.collector import RolloutBatch
from agentlightning_algorithms.grpo.episode import Episode
from agentlightning_algorithms.grpo.experience import Experience, training_spans
from agentlightning_algorithms.shared.policy.draw import Generation, Token
from agentlightning_algorithms.shared.policy.model import Policy
from agentlightning_algorithms.shared.policy.server.completion import CompletionAnswer, PolicyCompletions
from agentlightning_algorithms.shared.policy.server.conversation import Prompt
from agentlightning_algorithms.shared.policy.server.request import ChatRequest, parse_request
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_plugins.demo.training import CHECKPOINT
from agentlightning_plugins.gateway.dialects.dialect import Completion
from agentlightning_plugins.gateway.dialects.openai import CHAT
from agentlightning_plugins.shared.training_records.query import read_ledger
from agentlightning_plugins.shared.training_records.record import LEDGER_SPAN, LedgerEntry, TrainedRow
from agentlightning_plugins.shared.trajectories import Turn
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.usefixtures("server_thread")
STEPS, TASKS, SIZE = 6, 2, 2
later_step_began = threading.Event()
straggler_was_used = threading.Event()


class Store(agl.InMemoryLightningStore):
    """Tells when group 0 was trained on, or dropped."""

    async def add_many_spans(self, spans: Sequence[agl.Span]) -> Sequence[agl.Span]:
        if any(span.name == LEDGER_SPAN and LedgerEntry.from_span(span).group == "0" for span in spans):
            straggler_was_used.set()
        return await super().add_many_spans(spans)


async def uneven_agent(task: str, llm: agl.LLM, rollout: agl.AttemptedRollout) -> float:
    """Ends group 0 after step 2 has begun, group 1 never, group 6 of step 2 at once, others of step 2 after group 0."""
    place = rollout.metadata or {}
    async with AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key or "unused", max_retries=0) as client:

        async def ask() -> str:
            messages: Any = [{"role": "user", "content": task}]
            answer = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=8)
            return answer.choices[0].message.content or ""

        text = await ask()
        if place["group"] == "1":
            await asyncio.sleep(3600)
        if place["group"] == "0":
            await asyncio.to_thread(later_step_began.wait, LIMIT_S)
            text += await ask()
        elif place["step"] > 1:
            later_step_began.set()
            if place["group"] != "6":  # step 3 has group 0 and this one
                await asyncio.to_thread(straggler_was_used.wait, LIMIT_S)
    return float(len(text) % 2)


@pytest.mark.slow
def test_a_step_takes_the_first_complete_groups_and_drops_groups_that_are_too_old(tmp_path: Path) -> None:
    later_step_began.clear()
    straggler_was_used.clear()
    store = Store()
    algorithm = {
        "name": "grpo",
        "model": str(CHECKPOINT),
        "steps": STEPS,
        "staleness": 2,
        "tasks_per_step": TASKS,
        "rollouts_per_task": SIZE,
        "experience": {"keep_flat_groups": True},
        "keep_steps": 0,
        "eval_every": 0,
        "train_threads": 1,
    }
    trainer = agl.Trainer(algorithm=algorithm, store=store, trackers=[], run_dir=tmp_path, strategy="shm")
    assert trainer.fit(uneven_agent, [f"task {i}" for i in range(16)]).status == "succeeded"

    async def check() -> None:
        rollouts = (await store.query_rollouts()).items
        entries = await read_ledger(store)
        assert Counter(entry.rollout_id for entry in entries) == Counter(each.rollout_id for each in rollouts)
        assert Counter(entry.step for entry in entries if entry.outcome != "stale") == dict.fromkeys(
            range(1, STEPS + 1), TASKS * SIZE
        )
        assert {(entry.group, entry.outcome) for entry in entries if entry.outcome != "trained"} == {("1", "stale")}
        statuses = {((each.metadata or {})["group"] == "1", each.status) for each in rollouts}
        assert statuses == {(True, "cancelled"), (False, "succeeded")}
        [straggler] = {entry.step for entry in entries if entry.group == "0"}
        assert straggler in (2, 3)
        for step in range(1, STEPS + 1):
            assert await read_ledger(store, step) == [entry for entry in entries if entry.step == step], step
        steps = [item.values for item in (await store.query_metrics()).items if "rows" in item.values]
        assert sum(values["groups_dropped"] for values in steps) == 1
        assert max(values["staleness"] for values in steps) == 2
        assert sum(values["calls_stale"] for values in steps) == 0

    asyncio.run(check())


def test_the_weight_version_of_each_token_is_recorded_if_weights_change_during_an_answer(tiny_policy: Policy) -> None:
    """Follows whole and streamed answers from the policy server through the gateway to the training record."""
    completions, recorded = PolicyCompletions(tiny_policy, "policy", 100), [Completion(), Completion()]
    fields = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True, "logprobs": True}
    request = parse_request(ChatRequest, fields, ["policy"])
    generation = Generation([Token(token, -1.0, (), 3 + (token > 2)) for token in (1, 2, 3, 4, 5)], "length")
    CHAT.read_answer(CompletionAnswer(completions, request, Prompt([1])).whole([generation]), recorded[0])
    stream = CompletionAnswer(completions, request, Prompt([1]))
    for chunk in [*stream.begin(3), stream.feed(0, generation.tokens), stream.end(0, generation)]:
        CHAT.read_chunk(chunk, recorded[1])
    for completion in recorded:
        assert (completion.weight_version, completion.choices[0].weight_versions) == (3, [3, 3, 4, 4, 4])
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.response.id": "c",
        "agentlightning.gateway.complete": True,
        "agentlightning.weight_version": 3,
        "prompt_token_ids": [1],
        "response_token_ids": [1, 2, 3],
        "logprobs": [-1.0, -1.0, -1.0],
        "agentlightning.weight_versions": [3, 4, 4],
    }
    span = agl.Span.from_attributes(attributes=attributes, rollout_id="ro-1", attempt_id="at-1", name="chat")
    [triplet] = agl.TraceToTriplet().adapt([span])
    row = TrainingRow([1], [1, 2, 3, 9], [-1.0] * 4, 1.0, mask=[1, 1, 1, 0])
    attempt = agl.Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0)
    rollout = agl.AttemptedRollout(rollout_id="ro-1", input=0, start_time=0.0, attempt=attempt)
    experience = Experience([row], [(Episode(rollout, 1.0, [triplet]), ((Turn(triplet, 0, 3), 1.0),))])
    [record] = training_spans(experience, 5)
    assert TrainedRow.from_span(record).token_versions == [3, 4, 4, None]


class FakeCollector:
    """A collector whose rollouts end with the rewards of their group; a group without rewards is still running."""

    def __init__(self, rewards: dict[int, list[float]], cancelled: tuple[int, ...] = (), **settings: Any) -> None:
        named = {"tasks_per_step": 2, "steps": 9, "staleness": 2, "refill_rounds": 0}
        experience = SimpleNamespace(failed_reward=settings.pop("failed_reward", 0.0))
        self.settings = SimpleNamespace(**{**named, **settings}, experience=experience)
        self.rewards, self.cancelled = rewards, cancelled
        self.step = self.position = 0
        self.open_groups: list[tuple[int, int, int]] = []
        self.published_at: dict[int, float] = {}
        self.begun: list[int] = []
        self.train_resources = "rs-1"
        self.backend = SimpleNamespace(check=lambda: None)
        self.reward_check = SimpleNamespace(add=list)
        self.store = self

    def choose_tasks(self, train: Any, count: int, position: int) -> list[tuple[int, Any]]:
        return [(index % len(train), None) for index in range(position, position + count)]

    def group_requests(self, index: int, task: Any, step: int, number: int) -> list[Any]:
        self.begun.append(number)
        return [SimpleNamespace(rollout_id=f"{number}/{repetition}") for repetition in range(2)]

    async def enqueue(self, requests: Any, mode: str, resources_id: str) -> list[str]:
        return [request.rollout_id for request in requests]

    async def gather(self, rollout_ids: list[str]) -> list[Episode]:
        number = int(rollout_ids[0].partition("/")[0])
        if number not in self.rewards:
            await asyncio.Event().wait()
        status: Any = "cancelled" if number in self.cancelled else "succeeded"
        return [
            Episode(agl.Rollout(rollout_id=each, input=0, start_time=0.0, status=status, metadata={"group": number}), r)
            for each, r in zip(rollout_ids, self.rewards[number], strict=True)
        ]

    async def get_rollout_by_id(self, rollout_id: str) -> None:
        """Returns no attempt, so the ledger gets no entry for the rollout."""

    async def sampler_metrics(self) -> dict[str, float]:
        return {}

    async def shape(self, episodes: Any) -> Any:
        return episodes

    def count_rollouts(self, rollout_ids: Any) -> None: ...

    def remember_rewards(self, episodes: Any) -> None: ...


def groups_of(batch: RolloutBatch) -> list[int]:
    return [int(episode.group) for episode in batch.episodes[::2]]


@pytest.mark.parametrize(
    ("settings", "cancelled", "taken"),
    [
        ({}, (), [0, 2]),
        ({}, (2,), [0, 3]),  # the run was resumed from a checkpoint before the group was dropped
        ({"refill_rounds": 1}, (), [0, 2, 3]),  # group 2 has no spread
    ],
)
def test_a_step_takes_complete_groups_in_order_and_bounds_the_number_of_open_groups(
    settings: dict[str, Any], cancelled: tuple[int, ...], taken: list[int]
) -> None:
    rewards = {0: [0.0, 1.0], 2: [1.0, 1.0], 3: [0.0, 1.0]}

    async def check() -> None:
        collector: Any = FakeCollector(rewards, cancelled, **settings)
        pool = GroupPool(collector, [0] * 4)
        batch = await pool.take()
        assert groups_of(batch) == taken
        assert 1 not in taken
        assert len(collector.open_groups) <= 6
        await pool.begin_next()
        assert len(collector.open_groups) == 4, "the groups of two steps run during the update"
        assert batch.metrics["groups_dropped"] == len(cancelled)
        await pool.close(has_ended=False)

    asyncio.run(check())


def test_a_group_without_a_reward_is_replaced() -> None:
    async def check() -> None:
        rewards: Any = {0: [0.0, 1.0], 2: [None, None], 3: [0.0, 1.0]}
        collector: Any = FakeCollector(rewards, refill_rounds=1, failed_reward=None)
        pool = GroupPool(collector, [0] * 4)
        assert groups_of(await pool.take()) == [0, 2, 3]
        await pool.close(has_ended=False)

    asyncio.run(check())


def test_a_resumed_run_continues_its_open_groups_and_reuses_no_group_number() -> None:
    async def check() -> None:
        collector: Any = FakeCollector({number: [0.0, 1.0] for number in range(20)})
        collector.step, collector.position, collector.open_groups = 3, 8, [(1, 1, 2), (9, 1, 3)]
        pool = GroupPool(collector, [0] * 4)
        assert groups_of(await pool.take()) == [1, 9]
        assert collector.begun == [1, 9, *range(10, 14)]
        await pool.close(has_ended=False)

    asyncio.run(check())
