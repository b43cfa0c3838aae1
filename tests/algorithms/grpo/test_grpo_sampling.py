"""The sampling of a whole training: its seeds, and its distribution."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

import agentlightning as agl
from agentlightning import Component, hookimpl
from agentlightning.plugin.registry import get_manager
from agentlightning_algorithms.grpo.collector import RolloutCollector
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.algorithms.grpo.grpo_program import settings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("server_thread")]


def stubborn_agent(task: dict[str, Any], llm: agl.LLM, rollout: agl.Rollout) -> float:
    """Runs the demo's agent with different sampling parameters in each rollout of a group."""
    index = int((rollout.metadata or {}).get("repetition", 0))
    own: dict[str, Any] = [
        {"temperature": 0.3, "frequency_penalty": 0.5}, {"temperature": 2.0, "logit_bias": {}}, {"top_p": 0.6}, {},
    ][index]  # fmt: skip
    sampling = {**llm.sampling_parameters, **own}
    return calculator_agent(task, llm.model_copy(update={"sampling_parameters": sampling}))


def plain_agent(task: dict[str, Any], llm: agl.LLM) -> float:
    """Runs the demo's agent without sampling parameters."""
    return calculator_agent(task, llm.model_copy(update={"sampling_parameters": {}}))


def test_an_agent_without_sampling_parameters_gets_the_parameters_of_the_run(tmp_path: Path) -> None:
    store = train(tmp_path, plain_agent, steps=1, sampling={"temperature": 0.8, "max_tokens": 3})
    calls = [call for key, found in read_calls(store).items() if "train" in key for call in found]
    assert {call["gen_ai.request.temperature"] for call in calls} == {0.8}
    assert max(call["gen_ai.usage.output_tokens"] for call in calls) == 3


def test_rollouts_of_old_steps_are_deleted_from_a_store_in_memory(tmp_path: Path) -> None:
    store = train(tmp_path, calculator_agent, steps=3, keep_steps=1, eval_every=1)
    rollouts = asyncio.run(store.query_rollouts()).items
    left = {(rollout.mode, (rollout.metadata or {})["step"]) for rollout in rollouts}
    assert left == {("train", 3), ("val", 2), ("val", 3)}
    assert len(asyncio.run(store.query_metrics()).items) == 4


@pytest.mark.parametrize(
    ("keep_steps", "durable", "left"),
    [(None, False, [4, 5, 6, 7]), (None, True, [*range(8)]), (0, False, [*range(8)]), (2, True, [6, 7])],
)
def test_a_store_that_is_not_durable_keeps_four_steps_by_default(
    keep_steps: int | None, durable: bool, left: list[int]
) -> None:
    kept = [*range(8)]

    class Store:
        capabilities: ClassVar[Any] = {"durable": durable}

        async def delete_rollouts(self, rollout_ids: list[str]) -> None:
            for rollout_id in rollout_ids:
                kept.remove(int(rollout_id))

    by_step = {step: [str(step)] for step in range(8)}
    collector: Any = SimpleNamespace(
        settings=SimpleNamespace(keep_steps=keep_steps), store=Store(), step=8, rollout_ids=by_step
    )
    asyncio.run(RolloutCollector.delete_old_rollouts(collector))
    assert kept == left


SEEN: dict[str, list[Any]] = {}


def last_first(count: int, history: Any) -> list[int]:
    SEEN.setdefault("rewards", []).append({index: [*found] for index, found in history.rewards.items()})
    SEEN.setdefault("steps", []).append(history.step)
    assert history.data[0]["question"]
    return [(-1 - place) % len(history.data) for place in range(history.position, history.position + count)]


def halved(episode: Any, group: Any, settings: Any) -> float | None:
    SEEN.setdefault("groups", []).append((len(group), {each.group for each in group} == {episode.group}))
    return None if episode.reward is None else episode.reward / 2


def without_last(episodes: Any, settings: Any) -> Any:
    kept = [e for e in episodes if e.rollout.metadata["repetition"] < 3]
    SEEN.setdefault("kept", []).append((len(episodes), len(kept)))
    return kept


def longest(episodes: Any) -> dict[str, float]:
    return {"turns_max": float(max(len(e.triplets) for e in episodes))}


def last_rows(length_B: Any, weight_B: Any, rollout_length_B: Any, horizon: int) -> Any:
    SEEN.setdefault("horizons", []).append(horizon)
    return weight_B, length_B.sum() * 2


def quarter(progress: float) -> float:
    return 0.25


MERGED = {"rows": "trajectories", "keep_flat_groups": True}
PARTS = {
    "task_sampler": last_first, "reward_shaping": halved, "rollout_filter": without_last, "training_metrics": longest,
    "aggregation": last_rows, "schedule": quarter,
}  # fmt: skip


def test_a_model_that_compares_each_group_replaces_a_reward_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    reply = Answer('{"scores": {"1": 1, "2": 0.5, "3": 0.25, "4": 0}}')
    with ScriptedOpenAI(lambda _: reply) as server:
        shaping = {"name": "judge", "model": "rater", "endpoint": server.endpoint}
        store = train(tmp_path, unrated_agent, steps=1, experience={"reward_shaping": shaping})
        assert len(server.requests) == 3, "one call for each task of the step"
    (step,) = [each.values for each in asyncio.run(store.query_metrics()).items if "grad_norm" in each.values]
    assert step["grad_norm"] > 0
    assert (step["reward"], step["shaped_reward"]) == (0.0, 0.4375)


def unrated_agent(task: dict[str, Any], llm: agl.LLM) -> float:
    calculator_agent(task, llm)
    return 0.0


def test_a_plugin_can_replace_every_part_of_a_training(tmp_path: Path) -> None:
    offers = [Component(cast(Any, kind), f.__name__, f"{__name__}:{f.__name__}") for kind, f in PARTS.items()]
    manager, plugin = get_manager(), SimpleNamespace(components=hookimpl(lambda: offers))
    manager.register(plugin, "test-parts")
    try:
        store = train(
            tmp_path, calculator_agent, task_sampler="last_first", eval_every=2,
            eval_rollouts=2, eval_sampling={"temperature": 1.0},
            experience={"reward_shaping": "halved", "rollout_filter": "without_last", "keep_flat_groups": True},
            extra_metrics=["longest", "pass_at_k"],
            update={
                "lr": 1e-4, "aggregation": "last_rows", "schedule": "quarter", "final_lr_fraction": 0.0, "horizon": 64,
            },
        )  # fmt: skip
    finally:
        manager._pluggy.unregister(plugin)
        del manager.plugins["test-parts"]
        for kind, part in PARTS.items():
            del manager._offers[cast(Any, kind), part.__name__]
    rollouts = asyncio.run(store.query_rollouts()).items
    drawn = [(r.metadata or {})["task_id"] for r in rollouts if r.mode == "train"]
    assert set(drawn) == {7, 6, 5, 4, 3, 2}
    tried, *drawn_with = SEEN["rewards"]  # the sampler is tried before the first rollout
    assert tried == {}
    assert [set(rewards) for rewards in drawn_with] == [set(), {7, 6, 5}]
    assert all(len(found) == 1 for found in drawn_with[-1].values()), "each task was rolled out once"
    assert SEEN["steps"] == [0, 0, 1]
    assert set(SEEN["groups"]) == {(3, True)}, "a reward is shaped beside those of its group"
    assert set(SEEN["kept"]) == {(12, 9)}
    assert set(SEEN["horizons"]) == {64}
    steps = [step.values for step in asyncio.run(store.query_metrics()).items if "rows" in step.values]
    assert [step["lr"] for step in steps] == pytest.approx([0.25e-4] * 2)
    last = asyncio.run(store.query_metrics()).items[-1].values
    assert 1.0 >= last["val_pass@2"] >= last["val_pass@1"] >= 0.0
    assert len({r.rollout_id for r in rollouts if r.mode == "val" and (r.metadata or {})["step"] == 2}) == 8
    assert all(step["turns_max"] >= 1 and step["pass@4"] >= step["pass@1"] for step in steps)


def train(
    directory: Path, agent: Any, *, steps: int = 2, runners: int = 1, concurrency: int = 16, **more: Any
) -> agl.LightningStore:
    store = agl.create_store("memory://")
    trainer = agl.Trainer(
        algorithm=settings(steps, **more), store=store, strategy="shm", trackers=[], run_dir=directory,
        n_runners=runners, max_concurrency=concurrency, seed=11,
    )  # fmt: skip
    assert trainer.fit(agent, make_problems("train", 8), make_problems("val", 4)).status == "succeeded"
    return store


def read_calls(store: agl.LightningStore) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Returns the attributes of each rollout's gateway spans, by mode, step, group, task and repetition."""

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
    """The tokens are identical; log-probabilities, and metrics computed from them, agree up to rounding."""
    alone = train(tmp_path / "alone", calculator_agent, runners=1, concurrency=1)
    together = train(tmp_path / "together", calculator_agent, runners=2, concurrency=16)
    tokens = [
        {place: [call[agl.semconv.RESPONSE_TOKEN_IDS] for call in calls] for place, calls in read_calls(store).items()}
        for store in (alone, together)
    ]
    assert len(tokens[0]) == 2 * 12 + 2 * 4
    assert tokens[0] == tokens[1]
    assert len({str(calls) for place, calls in tokens[0].items() if place[:3] == ("train", 1, "0-0-0")}) > 1
    for one, other in zip(read_curve(alone), read_curve(together), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("force", [True, False])
def test_sampler_and_trainer_agree_for_any_parameters_that_the_agent_requests(
    tmp_path: Path, force: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sampling = {"temperature": 0.8, "max_tokens": 32, "force": force}
    store = train(tmp_path, stubborn_agent, steps=1, sampling=sampling, experience=MERGED)
    trained = [step.values for step in asyncio.run(store.query_metrics()).items if "loss" in step.values]
    assert len(trained) == 1
    assert all(values["logprob_gap_max"] < 1e-3 for values in trained)
    assert all(values["calls_of_other_sampling"] == 0 for values in trained)
    assert all(0 < values["calls_without_penalties"] < values["calls"] for values in trained)
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
