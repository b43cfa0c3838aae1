"""``monitoring`` and ``chat_history``: what pages compute from stored records."""

from __future__ import annotations

from agentlightning_plugins.shared.chat_history import find_first_edit
from agentlightning_plugins.shared.monitoring.evaluation import list_distributions
from agentlightning_plugins.shared.monitoring.runs import find_newest_runs
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
