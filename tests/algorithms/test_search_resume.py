"""A resumed search never publishes less than what was best, and takes its first prompts from the run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import openai
import pytest

import agentlightning as agl
from agentlightning.plugin.registry import get_manager
from agentlightning_algorithms.shared.prompt_search.candidate import CANDIDATE_NAME
from tests.algorithms.prompt_lab import SEED, TRAIN, VAL, Server, agent, critic_and_editor
from tests.algorithms.test_gepa import reflect as gepa_reflect

GEPA: Final = {"name": "gepa", "reflection_model": "m"}
APO_MODELS: Final = {
    "name": "apo", "gradient_model": "critic", "apply_edit_model": "editor", "beam_width": 2, "val_batch_size": 4
}  # fmt: skip
SEARCHES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {
    "gepa": (gepa_reflect, GEPA, {"max_rollouts": 300}, [{"max_rollouts": 40}, {"target_score": 0.1}]),
    "apo": (critic_and_editor, APO_MODELS, {"beam_rounds": 3}, [{"beam_rounds": 1}, {"max_calls": 2}]),
}


@pytest.mark.parametrize("confirm_pairs", [20, 0])
@pytest.mark.parametrize("search", SEARCHES)
def test_a_finished_search_resumed_with_less_to_do_ends_at_once_and_keeps_its_best_prompt(
    tmp_path: Path, search: str, confirm_pairs: int
) -> None:
    model, algorithm, settings, fewer = SEARCHES[search]
    ran: list[Any] = []
    published: list[Any] = []

    def counting(task: Any, prompt: agl.PromptTemplate) -> float:
        ran.append(task)
        return agent(task, prompt)

    def fit(endpoint: str, changes: dict[str, Any], resources: Any, **more: Any) -> Any:
        made = get_manager().create("algorithm", {**algorithm, "confirm_pairs": confirm_pairs, **settings, **changes})
        made.async_openai_client = openai.AsyncOpenAI(base_url=endpoint, api_key="any", max_retries=0)
        trainer = agl.Trainer(
            algorithm=made, strategy="shm", tracer="dummy", trackers=[], run_dir=tmp_path / "run",
            initial_resources=resources, **more,
        )  # fmt: skip
        assert trainer.fit(counting, TRAIN, VAL).status == "succeeded"
        return made

    async def read() -> tuple[Any, list[str]]:
        store = agl.create_store(f"sqlite:///{tmp_path}/run/store.db")
        latest, versions = await store.get_latest_resources(), await store.query_resources()
        await store.close()
        assert latest is not None
        best = [each.resources["prompt"].template for each in versions if CANDIDATE_NAME not in each.resources]
        return latest.resources["prompt"], best

    with Server(model) as server:
        first = fit(server.endpoint, {}, {"prompt": SEED})
        prompt, published = asyncio.run(read())
        assert prompt == first.get_best_prompt() != first.history[0].prompts["prompt"]
        calls, n_ran = len(server.requests), len(ran)
        for less in fewer:
            again = fit(server.endpoint, less, None, resume=True)
            assert (len(server.requests), len(ran)) == (calls, n_ran), less
            assert asyncio.run(read()) == (prompt, published), "nothing less was published in between either"
            assert again.get_best_prompt() == prompt
            assert again.diff() == first.diff()
