"""The files that a run's report writes next to `report.md`."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning_algorithms.shared.prompt_search.candidate import CANDIDATE_NAME, Candidate
from agentlightning_plugins.commands.report.report import write_report

SEED = Candidate.of({"prompt": agl.PromptTemplate("first")}, full_score=0.5)
BEST = Candidate.of({"prompt": agl.PromptTemplate("best")}, SEED, full_score=0.9, round=1)
TRIAL = Candidate.of({"prompt": agl.PromptTemplate("trial")}, BEST, batch_score=0.1, round=2)


@pytest.mark.parametrize(
    ("published", "written"),
    [
        pytest.param({}, "best", id="interrupted during a trial"),
        pytest.param(SEED.prompts, "first", id="fresh rollouts did not confirm the best"),
        pytest.param({"other": agl.PromptTemplate("x")}, "best", id="something else was published last"),
    ],
)
async def test_the_prompts_next_to_the_report_are_the_published_or_else_the_best_ones_of_the_search(
    tmp_path: Path, published: dict[str, agl.PromptTemplate], written: str
) -> None:
    (tmp_path / "run.json").write_text('{"key": "k"}')
    store = agl.create_store("memory://")
    for place, candidate in enumerate((SEED, BEST, TRIAL)):
        await store.update_resources(f"rs-{place}", {**candidate.prompts, CANDIDATE_NAME: candidate})
    if published:
        await store.add_resources(published)
    await write_report(store, tmp_path)
    assert (tmp_path / "prompts" / "prompt.txt").read_text() == written
