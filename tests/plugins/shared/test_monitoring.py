"""``monitoring`` and ``chat_history``: what pages compute from stored records."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.types import Span
from agentlightning_plugins.shared.chat_history import find_first_edit
from agentlightning_plugins.shared.monitoring.evaluation import compare_first_and_last, list_distributions
from agentlightning_plugins.shared.monitoring.runs import find_newest_runs
from agentlightning_plugins.shared.training_records import query
from agentlightning_plugins.shared.training_records.query import read_ledger
from agentlightning_plugins.shared.training_records.record import LedgerEntry
from agentlightning_plugins.stores.http.client import LightningStoreClient
from tests.plugins.stores.served import serve


def test_the_best_candidate_has_the_highest_score_even_if_all_scores_are_negative() -> None:
    candidates = [
        {"parent_id": None, "full_score": -0.5, "task_scores": [-0.5, -0.5]},
        {"parent_id": "seed", "full_score": None, "batch_score": -0.9, "task_scores": [-0.9, -0.9]},
        {"parent_id": "seed", "full_score": -0.2, "task_scores": [-0.1, -0.3]},
    ]
    found = {each["name"]: each["values"] for each in list_distributions(candidates)}
    assert found["task rewards of the best candidate"] == [-0.1, -0.3]


def test_messages_whose_content_lists_plain_strings_can_be_compared() -> None:
    plain, other = ({"role": "user", "content": [text, {"type": "text", "text": "b"}]} for text in ("a", "c"))
    assert find_first_edit([plain], [plain]) is None
    assert find_first_edit([plain], [other]) == 0


async def test_runs_with_open_work_come_first_however_old_they_are() -> None:
    async with serve() as (server, store):
        for number in range(60):
            await store.with_run(f"run-{number}").create_run("named")
        await store.with_run("run-3").enqueue_rollout("task")
        client = LightningStoreClient(server.endpoint)
        for view in (store, client):
            assert [run.run_id for run in await find_newest_runs(view)][:2] == ["run-3", "run-59"]
        await client.close()


async def run_steps(
    store: agl.LightningStore, mode: str, rewards: dict[int, list[float]], **metadata: bool
) -> list[str]:
    """Runs a rollout of each step for each reward, which the next step records; returns their ids."""
    ids, records = list[str](), list[Span]()
    for step, values in rewards.items():
        if metadata:
            await store.add_many_spans([each.model_copy(update={"start_time": store.now()}) for each in records])
        records.clear()
        for task, reward in enumerate(values):
            place = {"step": step, "task_id": task, **metadata}
            await store.enqueue_rollout(task, mode=mode, metadata=place)
            (claimed,) = await store.dequeue_many_rollouts(worker_id="w")
            names = (claimed.rollout_id, claimed.attempt.attempt_id)
            await store.update_attempt(*names, status="succeeded", reward=reward)
            records.append(LedgerEntry(*names, step + 1, "g", "trained", reward).to_span())
            ids.append(claimed.rollout_id)
        await store.add_metrics(step, {f"{mode}_reward": statistics.fmean(values)})
    return ids


async def test_a_page_shows_the_recorded_means_of_an_evaluation_that_is_too_large_to_read() -> None:
    store = agl.InMemoryLightningStore()
    await run_steps(store, "val", {1: [0.0, 0.0, 1.0, 0.0], 5: [0.0] * 4, 9: [1.0, 1.0, 1.0, 0.0]})
    metrics = (await store.query_metrics()).items
    found = [(await compare_first_and_last(store, metrics, (), {}, most=most)).rows for most in (None, 4, 3)]
    assert [[(label, mean) for label, mean, _ in rows] for rows in found] == [
        [("before", 0.25), ("after", 0.75), ("difference", 0.5)]
    ] * 3
    assert [all(interval is not None for _, _, interval in rows) for rows in found] == [True, True, False]


async def test_the_ledger_of_an_asynchronous_step_reads_the_records_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store, read = agl.InMemoryLightningStore(), list[int]()
    ids = await run_steps(store, "train", {step: [0.0, 1.0] for step in range(1, 9)}, asynchronous=True)
    place = {"step": 4, "asynchronous": True}
    unfinished = await store.enqueue_rollout("t", mode="train", metadata=place)
    whole, query_spans = await read_ledger(store), store.query_spans

    async def counted(*arguments: Any, **conditions: Any) -> Any:
        page = await query_spans(*arguments, **conditions)
        read.append(len(page))
        return page

    monkeypatch.setattr(store, "query_spans", counted)
    for margin in (60.0, 0.0):  # the first reads all records, which are younger
        monkeypatch.setattr(query, "_CLOCKS_S", margin)
        for step in range(1, 10):
            assert await read_ledger(store, step) == [entry for entry in whole if entry.step == step], step
    assert {entry.rollout_id for entry in await read_ledger(store, 4)} == {*ids[4:6], unfinished.rollout_id}
    assert {entry.rollout_id for entry in await read_ledger(store, 9)} == set()  # no step has recorded them
    read.clear()
    await read_ledger(store, 4)
    assert max(read) <= 4 < len(ids)
