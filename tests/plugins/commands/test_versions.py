"""Versions of resources: pinned by rollouts, compared as control and treatment, promoted and rolled back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import agentlightning as agl
from agentlightning.cli import cli
from agentlightning.plugin.registry import get_manager
from agentlightning.types import Span
from agentlightning_plugins.shared.statistics.comparison import Group, compare_groups


@pytest.fixture(scope="module", autouse=True)
def commands() -> None:
    get_manager().hook.add_commands(cli=cli)


@agl.rollout
async def grader(task: Any, prompt: agl.PromptTemplate) -> float:
    return float(prompt.template)


@pytest.mark.parametrize("kind", ["memory", "file", "served"])
async def test_a_pinned_rollout_runs_with_its_version_whatever_is_published_later(kind: str, tmp_path: Path) -> None:
    owner = agl.create_store("memory://" if kind == "memory" else f"sqlite:///{tmp_path / 'store.db'}")
    async with agl.LightningStoreServer(owner, port=0) as server:
        store = agl.LightningStoreClient(server.endpoint) if kind == "served" else owner
        for prompt in ("0.1", "0.2"):
            await store.update_resources("tuned", {"prompt": prompt})
        named = (None, "tuned", "tuned@1", "tuned@2")
        queued = [await store.enqueue_rollout("task", resources_id=resources_id) for resources_id in named]
        await store.update_resources("tuned", {"prompt": "0.9"})
        runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer(), max_rollouts=len(named))
        with runner.run_context(agent=grader, store=store):
            await runner.iter()
        spans = [(await store.query_spans(rollout.rollout_id)).items for rollout in queued]
        assert [agl.find_final_reward(found) for found in spans] == [0.9, 0.9, 0.1, 0.2]
        if store is not owner:
            await store.close()
    await owner.close()


async def test_a_runner_step_with_a_given_version_and_metadata_publishes_nothing() -> None:
    store = agl.InMemoryLightningStore()
    await store.update_resources("tuned", {"prompt": "0.1"})
    await store.update_resources("tuned", {"prompt": "0.2"})
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=grader, store=store):
        rollout = await runner.step("task", resources_id="tuned@1", metadata={"group": "control"})
        assert (rollout.resources_id, rollout.metadata) == ("tuned@1", {"group": "control"})
        assert agl.find_final_reward((await store.query_spans(rollout.rollout_id)).items) == 0.1
        assert len(await store.query_resources()) == 2
        given = await runner.step("task", {"prompt": "0.7"})
        assert agl.find_final_reward((await store.query_spans(given.rollout_id)).items) == 0.7
        with pytest.raises(agl.ConfigError, match="give one of them"):
            await runner.step("task", {"prompt": "0.7"}, resources_id="tuned@1")
        with pytest.raises(agl.NotFoundError, match="tuned@9"):
            await runner.step("task", resources_id="tuned@9")
    await store.close()


# --- statistics ---


def group(rewards: Sequence[float], *, tasks: bool = False, start: int = 0) -> Group:
    return Group("g", {f"{'task' if tasks else 'ro'} {start + n}": [reward] for n, reward in enumerate(rewards)})


def test_a_clear_difference_has_an_interval_around_it_and_a_small_p_value() -> None:
    found = compare_groups(group([0.0] * 30 + [1.0] * 10), group([0.0] * 10 + [1.0] * 30, start=100))
    assert (found.difference, found.paired) == (0.5, False)
    assert 0.25 < found.low < 0.5 < found.high < 0.75
    assert found.p_value < 0.001
    same = compare_groups(group([0.0, 1.0] * 20), group([1.0, 0.0] * 20, start=100))
    assert same.low < 0.0 < same.high
    assert same.p_value == 1.0


def test_the_p_value_of_few_rollouts_is_exact() -> None:
    unpaired = compare_groups(group([0.0] * 4), group([1.0] * 4, start=100))
    assert unpaired.p_value == pytest.approx(2 / 70)  # 2 of C(8, 4) ways to label them are as extreme
    paired = compare_groups(group([0.1, 0.5, 0.3, 0.2], tasks=True), group([0.2, 0.6, 0.4, 0.3], tasks=True))
    assert (paired.paired, paired.p_value) == (True, pytest.approx(2 / 16))


def test_common_tasks_are_compared_in_pairs() -> None:
    levels = [n / 20 for n in range(20)]
    better = [level + 0.05 + 0.002 * (n % 3 - 1) for n, level in enumerate(levels)]
    paired = compare_groups(group(levels, tasks=True), group(better, tasks=True))
    apart = compare_groups(group(levels), group(better, start=100))
    assert paired.p_value < 0.001 < 0.2 < apart.p_value
    assert paired.high - paired.low < 0.01 < apart.high - apart.low
    assert paired.difference == pytest.approx(apart.difference) == pytest.approx(0.05, abs=1e-3)


def test_the_result_for_many_rollouts_agrees_with_that_for_fewer() -> None:
    few = compare_groups(group([0.0] * 500 + [1.0] * 480), group([0.0] * 440 + [1.0] * 540, start=5000))
    many = compare_groups(group([0.0] * 550 + [1.0] * 528), group([0.0] * 484 + [1.0] * 594, start=5000))
    assert many.p_value == pytest.approx(few.p_value, abs=0.01)
    assert (many.low, many.high) == (pytest.approx(few.low, abs=0.01), pytest.approx(few.high, abs=0.01))


# --- from rollouts, in Python and from the command line ---


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A run's directory: rewards are low for version 1 and high for version 2; some rollouts did not succeed."""

    async def fill() -> None:
        store = agl.create_store(f"sqlite:///{tmp_path / 'store.db'}")
        for prompt in ("one", "two"):
            await store.update_resources("tuned", {"prompt": prompt})
        for n in range(36):
            treated = n % 2 == 1
            begun = await store.start_rollout(
                n,
                resources_id="tuned@2" if treated else "tuned@1",
                metadata={"group": "treatment" if treated else "control", "variant": n % 2},
            )
            kind = {30: "failed", 31: "cancelled", 32: "unrated", 34: "waits", 35: "waits"}.get(n, "succeeded")
            if kind == "waits":
                continue
            if kind == "cancelled":
                await store.cancel_rollout(begun.rollout_id)
                continue
            if kind != "unrated":
                reward = {
                    "agentlightning.reward.0.name": "primary",
                    "agentlightning.reward.0.value": 0.2 + 0.5 * treated,
                }
                ids = {"rollout_id": begun.rollout_id, "attempt_id": begun.attempt.attempt_id}
                await store.add_span(Span.from_attributes(attributes=reward, name="agentlightning.reward", **ids))
            status: Any = "failed" if kind == "failed" else "succeeded"
            await store.update_attempt(begun.rollout_id, "latest", status=status)
        await store.close()

    asyncio.run(fill())
    return tmp_path


def run(place: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--store", str(place)], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("control", "treatment"),
    [("control", "treatment"), ("variant=0", "variant=1"), ("tuned@1", "tuned@2"), ("tuned@1", "resources_id=tuned@2")],
)
def test_two_groups_or_versions_are_compared_from_the_command_line(place: Path, control: str, treatment: str) -> None:
    found = json.loads(run(place, "compare", control, treatment, "--json").stdout)
    before, after = found["control"], found["treatment"]
    assert (before["n"], before["failed"], before["unrated"], before["unfinished"]) == (16, 1, 1, 1)
    assert (after["n"], after["failed"], after["unrated"], after["unfinished"]) == (16, 0, 0, 1)
    assert before["mean"] == pytest.approx(15 * 0.2 / 16)
    assert found["difference"] == pytest.approx(0.7 - before["mean"])
    assert found["low"] <= found["difference"] <= found["high"]
    assert found["p_value"] < 0.001
    shown = run(place, "compare", control, treatment).stdout
    assert "difference +0.5" in shown
    assert "independent groups" in shown


def test_a_resources_id_without_a_version_selects_all_of_its_versions(place: Path) -> None:
    whole = json.loads(run(place, "compare", "tuned@1", "tuned", "--json").stdout)
    assert (whole["control"]["n"], whole["treatment"]["n"]) == (16, 32)


def test_a_group_without_rewards_is_refused_with_its_name(place: Path) -> None:
    refused = run(place, "compare", "control", "treatmnt")
    assert isinstance(refused.exception, agl.NotFoundError)
    assert "treatmnt: 0 rollouts with a reward" in str(refused.exception)


def test_resources_are_promoted_and_rolled_back_from_the_command_line(place: Path) -> None:
    assert run(place, "resources", "promote", "tuned").stdout == "tuned is now the latest, as tuned@2\n"
    assert run(place, "resources", "promote", "tuned@1").stdout == "tuned@1 is now the latest, as tuned@3\n"
    shown = json.loads(run(place, "resources", "show", "--json").stdout)
    assert (shown["version"], shown["resources"]["prompt"]["template"]) == (3, "one")
    run(place, "resources", "rollback", "tuned", "2")
    shown = json.loads(run(place, "resources", "show", "tuned@4", "--json").stdout)
    assert shown["resources"]["prompt"]["template"] == "two"
    assert isinstance(run(place, "resources", "promote", "tuned@9").exception, agl.NotFoundError)


async def test_users_that_were_assigned_by_a_key_are_compared_as_users() -> None:
    store = agl.InMemoryLightningStore()
    await store.update_resources("tuned", {"prompt": "0.1"})
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=grader, store=store):
        async with agl.LiveResources(store) as live:
            for n in range(40):
                metadata = {**live.pick(key=f"user {n % 4}").metadata, "group": "treatment" if n % 2 else "control"}
                await runner.step("task", resources_id="tuned@1", metadata={**metadata, "task_id": n // 4})
    found = await agl.compare_rollouts(store, "control", "treatment")
    assert (found.paired, found.control.n, len(found.control.rewards), len(found.treatment.rewards)) == (
        False,
        20,
        2,
        2,
    )
    assert found.p_value == 1.0
    await store.close()


def test_a_worse_group_fails_the_command_if_that_is_asked_for(place: Path) -> None:
    assert run(place, "compare", "control", "treatment", "--fail-if-worse").exit_code == 0
    worse = run(place, "compare", "treatment", "control", "--fail-if-worse")
    assert (worse.exit_code, "control is worse by 0.5" in worse.stderr) == (1, True)


def test_one_group_is_not_enough_for_a_comparison(place: Path) -> None:
    assert "or two groups of rollouts" in run(place, "compare", "control").stderr
