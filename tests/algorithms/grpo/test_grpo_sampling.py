"""The sampling of a whole training: its seeds, and its distribution."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems
from tests.algorithms.grpo.grpo_program import settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def stubborn_agent(task: dict[str, Any], llm: agl.LLM, rollout: agl.Rollout) -> float:
    """The demo's agent, which samples every rollout in a way of its own."""
    index = int((rollout.metadata or {}).get("repetition", 0))
    own: dict[str, Any] = [{"temperature": 0.3}, {"temperature": 2.0}, {"top_p": 0.6}, {}][index]
    sampling = {**llm.sampling_parameters, **own}
    return calculator_agent(task, llm.model_copy(update={"sampling_parameters": sampling}))


def test_rollouts_of_old_steps_are_deleted_from_a_store_in_memory(tmp_path: Path) -> None:
    store = train(tmp_path, calculator_agent, steps=3, keep_steps=1, eval_every=1)
    rollouts = asyncio.run(store.query_rollouts()).items
    left = {(rollout.mode, (rollout.metadata or {})["step"]) for rollout in rollouts}
    assert left == {("train", 2), ("val", 2), ("val", 3)}
    assert len(asyncio.run(store.query_metrics()).items) == 4


def train(
    directory: Path, agent: Any, *, steps: int = 2, runners: int = 1, concurrency: int = 16, **more: Any
) -> agl.LightningStore:
    store = agl.create_store("memory://")
    trainer = agl.Trainer(
        algorithm=settings(steps, **more), store=store, trackers=[], run_dir=directory, n_runners=runners,
        max_concurrency=concurrency, seed=11,
    )  # fmt: skip
    assert trainer.fit(agent, make_problems("train", 8), make_problems("val", 4)).status == "succeeded"
    return store


def read_calls(store: agl.LightningStore) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """The gateway's records of the calls of each rollout, by mode, step, group, task and repetition."""

    async def read() -> dict[tuple[Any, ...], list[dict[str, Any]]]:
        found = {}
        for rollout in (await store.query_rollouts()).items:
            spans = (await store.query_spans(rollout.rollout_id, "latest")).items
            calls = sorted(filter(agl.semconv.is_gateway_call, spans), key=lambda span: span.start_time or 0.0)
            metadata = rollout.metadata or {}
            place = (
                rollout.mode,
                metadata["step"],
                metadata.get("group"),
                metadata["task_id"],
                metadata.get("repetition"),
            )
            found[place] = [dict(span.attributes) for span in calls]
        return found

    return asyncio.run(read())


def read_curve(store: agl.LightningStore) -> list[dict[str, float]]:
    names = ("reward", "val_reward", "calls", "response_length", "rows", "entropy", "grad_norm")
    steps = asyncio.run(store.query_metrics()).items
    return [{name: step.values[name] for name in names if name in step.values} for step in steps]


def test_the_same_seed_gives_the_same_answers_and_curve_at_any_concurrency(tmp_path: Path) -> None:
    """Exactly the same tokens; log-probabilities and what is computed from them up to rounding."""
    alone = train(tmp_path / "alone", calculator_agent, runners=1, concurrency=1)
    together = train(tmp_path / "together", calculator_agent, runners=2, concurrency=16)
    tokens = [
        {place: [call[agl.semconv.RESPONSE_TOKEN_IDS] for call in calls] for place, calls in read_calls(store).items()}
        for store in (alone, together)
    ]
    assert len(tokens[0]) == 2 * 12 + 2 * 4
    assert tokens[0] == tokens[1]
    assert len({str(calls) for place, calls in tokens[0].items() if place[:3] == ("train", 0, "0-0-0")}) > 1
    for one, other in zip(read_curve(alone), read_curve(together), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("force", [True, False])
def test_sampler_and_trainer_agree_whatever_parameters_the_agent_asks_for(
    tmp_path: Path, force: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sampling = {"temperature": 0.8, "max_tokens": 32, "force": force}
    store = train(tmp_path, stubborn_agent, steps=1, sampling=sampling, rows="trajectories", keep_flat_groups=True)
    trained = [step.values for step in asyncio.run(store.query_metrics()).items if "loss" in step.values]
    assert len(trained) == 1
    assert all(values["logprob_gap_max"] < 1e-3 for values in trained)
    assert all(values["calls_of_other_sampling"] == 0 for values in trained)
    assert "log-probabilities" not in caplog.text
    drawn = {
        (place[0], call["gen_ai.request.temperature"], call["gen_ai.request.top_p"])
        for place, calls in read_calls(store).items()
        for call in calls
    }
    if force:
        assert drawn == {("train", 0.8, 1.0), ("val", 0.0, 1.0)}
    else:
        own = {("train", 0.3, 1.0), ("train", 2.0, 1.0), ("train", 0.8, 0.6), ("train", 0.8, 1.0)}
        assert own <= drawn
