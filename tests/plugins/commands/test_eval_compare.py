"""`agl eval` and `agl compare`, and the statistics behind them."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import click
import pytest

import agentlightning as agl
from agentlightning.plugin.offer import Offer, Plugin
from agentlightning.plugin.registry import get_manager
from agentlightning_plugins.commands.evaluation.comparison_report import (
    check_regression,
    compare_variants,
    print_comparison,
    write_comparison,
)
from agentlightning_plugins.commands.evaluation.variant import Variant
from agentlightning_plugins.shared.statistics.score import Score
from tests.plugins.commands.agl_here import run_here

Evaluation = get_manager().get("algorithm", "evaluation")

AGENTS = """
import itertools
import agentlightning as agl

calls = itertools.count()

def agent(task, prompt: agl.PromptTemplate):
    if task["n"] == 9:
        raise KeyError("no such tool")
    return float(prompt.format(n=task["n"]).startswith("good") or task["n"] % 4 == 0)
"""


class Learner(agl.Algorithm):
    def __init__(self, *, seed: int = 0, wasteful: bool = False, trains_weights: bool = False):
        self.seed, self.wasteful, self.trains_weights = seed, wasteful, trains_weights

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        if self.trains_weights:
            assert self.context.directory is not None
            (self.context.directory / "training.json").write_text('{"algorithm": "learner", "base": "tiny"}')
        await store.add_resources({"prompt": "good {n}"})
        while self.wasteful:
            rollout = await store.enqueue_rollout(train_dataset[0], mode="train")
            await store.wait_for_rollouts([rollout.rollout_id])


class Prepender(agl.Algorithm):
    def __init__(self, *, text: str, rollouts: int = 0):
        self.text, self.rollouts = text, rollouts

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        for _ in range(self.rollouts):
            rollout = await store.enqueue_rollout(train_dataset[0], mode="train")
            await store.wait_for_rollouts([rollout.rollout_id])
        latest = await store.get_latest_resources()
        assert latest is not None
        prompt = latest.resources["prompt"]
        assert isinstance(prompt, agl.PromptTemplate)
        await store.add_resources({"prompt": self.text + prompt.template})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    plugin = Plugin("learner", "learner", "this test", __name__)
    for name, cls in (("learner", Learner), ("prepender", Prepender)):
        offer = Offer(plugin, agl.Component("algorithm", name, f"{__name__}:{cls.__name__}"))
        monkeypatch.setitem(get_manager()._offers, ("algorithm", name), [offer])
    (tmp_path / "my_agents.py").write_text(AGENTS)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(8)))
    (tmp_path / "config.yaml").write_text(
        'agent: my_agents:agent\ndata: {train: tasks.jsonl, val: tasks.jsonl}\nresources: {prompt: "bad {n}"}\n'
        "strategy: shm\ntracer: dummy\n"
    )
    return tmp_path


def run(folder: Path, *arguments: str, code: int = 0) -> Any:
    said = run_here(folder, *arguments)
    assert said.code == code, said.stderr
    return json.loads(said.stdout) if "--json" in arguments else said.stdout + said.stderr


def evaluate(folder: Path, *arguments: str, code: int = 0) -> Any:
    return run(folder, "eval", "config.yaml", *arguments, code=code)


def test_eval_prints_reward_interval_pass_at_k_and_errors(folder: Path) -> None:
    (folder / "tasks.jsonl").write_text((folder / "tasks.jsonl").read_text() + '{"n": 9}\n')
    found = evaluate(folder, "-n", "2", "--json")
    assert found["reward"] == pytest.approx(2 / 9)
    assert found["reward_low"] <= found["reward"] <= found["reward_high"]
    assert found["pass@1"] == found["pass@2"] == pytest.approx(2 / 9)
    assert found["errors/KeyError"] == 2.0
    assert (found["tasks"], found["rollouts"]) == (9.0, 18.0)
    assert not (folder / "runs").exists()
    shown = evaluate(folder, "--run-dir", "kept")
    assert "reward   0.222" in shown
    assert "1 failed: KeyError" in shown
    assert "run succeeded" not in shown, "the command prints the score instead"
    assert (folder / "kept" / "store.db").is_file()


def test_eval_plans_how_many_tasks_are_needed_to_detect_a_difference(folder: Path) -> None:
    found = evaluate(folder, "--plan", "0.05", "--json")["plan"]
    assert [each["repetitions"] for each in found] == [1, 2, 4, 8, 16]
    assert found[0]["same_tasks"] == found[0]["other_tasks"] > found[4]["same_tasks"] > 20
    shown = evaluate(folder, "--plan", "0.05")
    assert "tasks needed to detect a difference of 0.05 between two agents (power 80 %, level 5 %)" in shown
    assert "the worst case is assumed" in shown


def test_eval_can_use_the_resources_that_a_run_has_learned(folder: Path) -> None:
    run(folder, "train", "config.yaml", "algorithm=learner", "--run-dir", "learned")
    assert evaluate(folder, "--resources", "learned", "--json")["reward"] == 1.0
    assert evaluate(folder, "--json")["reward"] == 0.25


def test_eval_of_an_agent_that_always_fails_has_exit_code_1(folder: Path) -> None:
    (folder / "tasks.jsonl").write_text('{"n": 9}\n')
    assert "1 failed: KeyError" in evaluate(folder, code=1)
    assert "no data.train" in evaluate(folder, "data={val: tasks.jsonl}", "--data", "train", code=2)


def test_eval_of_an_agent_without_rewards_reports_this_instead_of_a_score(folder: Path) -> None:
    (folder / "unrewarded.py").write_text("def agent(task):\n    pass\n")
    said = evaluate(folder, "agent=unrewarded:agent", code=1)
    assert "none of the first 8 rollouts has a reward: return a number from the agent" in said
    assert "Traceback" not in said


def test_compare_detects_a_better_algorithm_on_held_out_tasks_and_keeps_its_budget(folder: Path) -> None:
    numbers = [10, 4, 11, 8, 13, 1, 14, 2, 15, 3, 17, 5, 18, 6, 19, 7]  # every second one is held out
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in numbers))
    rows = run(
        folder, "compare", "config.yaml", "-a", "baseline", "-a", "{name: learner, wasteful: true}",
        "--seeds", "0,1", "--budget", "20", "--json",
    )  # fmt: skip
    assert [row["label"] for row in rows] == ["baseline", "learner"]
    assert [row["reward"] for row in rows] == [0.25, 1.0]
    assert rows[0]["p"] is None
    assert rows[1]["p"] == pytest.approx(2 / 2**6 * 1.0, abs=1e-9)  # all six differing tasks point one way
    assert 0 <= rows[1]["difference_low"] < 0.75 == rows[1]["difference"] <= rows[1]["difference_high"]
    assert rows[0]["rollouts"] == 16
    assert 20 < rows[1]["rollouts"] < 40
    assert (folder / "runs" / "compare" / "1-learner-1" / "store.db").is_file()
    assert "--seeds a" in run(folder, "compare", "config.yaml", "-a", "baseline", "--seeds", "a", code=2)
    wrong = run(folder, "compare", "config.yaml", "-a", "baseline", "-a", "lerner", "--run-dir", "never", code=2)
    assert "Did you mean 'learner'" in wrong
    assert not (folder / "never").exists(), "a mistake in the last algorithm is reported before the first one trains"
    seen = run(
        folder, "compare", "config.yaml", "-a", "baseline", "--test", "tasks.jsonl", "--run-dir", "never", code=2
    )
    assert "every task of data.train is also a test task" in seen


def test_compare_uses_the_settings_of_the_configuration_and_labels_variants(folder: Path) -> None:
    (folder / "config.yaml").write_text(
        (folder / "config.yaml").read_text() + "algorithm: {name: learner, wasteful: true, seed: 7}\n"
    )
    rows = run(
        folder, "compare", "config.yaml", "-a", "learner", "-a", "{name: learner, wasteful: false}", "-a", "baseline",
        "--budget", "10", "--json",
    )  # fmt: skip
    labels = [row["label"] for row in rows]
    assert labels == ["learner (wasteful=True)", "learner (wasteful=False)", "baseline"]
    assert [row["rollouts"] > 10 for row in rows[:2]] == [True, False], "the first wastes, as configured"


def test_each_algorithm_of_a_list_begins_with_the_result_of_the_previous_one_and_all_share_the_budget(
    folder: Path,
) -> None:
    chain = "[{name: prepender, text: od, rollouts: 5}, {name: prepender, text: go, rollouts: 6}]"
    wasteful = "[learner, {name: learner, wasteful: true}]"
    said = run(
        folder, "compare", "config.yaml", "store=memory://", "-a", chain, "-a", "{name: prepender, text: od}",
        "-a", "[{name: prepender, text: good, rollouts: 5}, learner]", "-a", wasteful,
        "-a", "[]", "--budget", "12", "--run-dir", "compared", "--json",
    )  # fmt: skip
    rows = {row["label"]: row for row in said}
    assert [row["reward"] for row in said] == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert [row["rollouts"] for row in said][:3] == [11.0, 0.0, 5.0]
    assert 12 < said[3]["rollouts"] < 30
    assert said[0]["prompts"] == [{"prompt": "good" + "bad {n}"}]
    assert rows["no training"]["prompts"] == [{"prompt": "bad {n}"}]
    assert rows["no training"]["rollouts"] == 0
    assert "prepender (text=od), then prepender" not in rows, "labels show the settings that differ"
    page = (folder / "compared" / "report.html").read_text()
    for shown in ("no training", "goodbad {n}", "<td>1.000</td>", "4 test tasks"):
        assert shown in page, shown
    links = re.findall(r'href="([^"]+)"', page)
    assert "0-prepender-prepender-0/1-prepender/report.html" in links
    assert all((folder / "compared" / link).is_file() for link in links)
    wrong = run(folder, "compare", "config.yaml", "-a", "[learner, 3]", "--run-dir", "never", code=2)
    assert "a name, a mapping with a name, or a list of these is needed" in wrong
    assert not (folder / "never").exists()


def test_a_training_that_the_budget_stops_before_it_saves_weights_counts_as_no_training(folder: Path) -> None:
    stopped = "{name: learner, wasteful: true, trains_weights: true}"
    (row,) = run(folder, "compare", "config.yaml", "-a", stopped, "--budget", "3", "--json")
    assert row["reward"] == 0.0
    assert row["prompts"] == [{"prompt": "bad {n}"}]


def test_an_algorithm_in_a_users_file_can_be_compared(folder: Path) -> None:
    (folder / "own.py").write_text(f"from {__name__} import Learner as Own\n")
    chain = "['own.py:Own', 'own.py:Own']"
    said = run(folder, "compare", "config.yaml", "-a", "own.py:Own", "-a", chain, "--run-dir", "compared", "--json")
    assert [row["reward"] for row in said] == [1.0, 1.0]
    assert {path.name for path in (folder / "compared").iterdir() if path.is_dir()} == {
        "0-own.py-Own-0",
        "1-own.py-Own-own.py-Own-0",
    }
    assert (folder / "compared" / "1-own.py-Own-own.py-Own-0" / "2-own.py-Own" / "store.db").is_file()


def test_the_results_are_shown_even_if_two_algorithms_have_no_task_in_common(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rewards = {"first": [[1.0], []], "other": [[], [1.0]], "third": [[0.0], []]}
    variants = [
        Variant([], label, [Score(own)], rollouts=[1], seconds=[1.0], prompts=[{}], places=[tmp_path])
        for label, own in rewards.items()
    ]
    rows = compare_variants(variants)
    assert [row["difference"] for row in rows] == [None, None, -1.0]
    assert [row["p"] for row in rows] == [None, None, 1.0]
    print_comparison(variants, rows)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[2] == ["other", "1.000", *["none"] * 4, "0", "1", "1.0"]
    page = write_comparison(variants, rows, tmp_path).read_text()
    assert "other" in page
    print_comparison(variants[:2], rows[:2])
    note = "p-values are adjusted for several comparisons (Holm); intervals are not"
    assert [shown.count(note.split()), page.count(note), capsys.readouterr().out.count(note)] == [1, 1, 0]
    with pytest.raises(click.ClickException, match="other cannot be compared: no test task has rewards of both it and"):
        check_regression(rows)


def test_the_interval_of_an_algorithm_is_wider_if_its_seeds_differ(tmp_path: Path) -> None:
    def compare(*seeds: float) -> dict[str, Any]:
        scores = [Score([[reward]] * 20) for reward in seeds]
        numbers: dict[str, Any] = {"rollouts": [1, 1], "seconds": [1.0, 1.0], "prompts": [{}, {}]}
        variant = Variant([], "apo", scores, **numbers, places=[tmp_path] * 2)
        (row,) = compare_variants([variant])
        page = write_comparison([variant], [row], tmp_path).read_text()
        assert f"{row['low']:.3f} to {row['high']:.3f}" in page
        return row

    alike, apart = compare(0.5, 0.5), compare(0.4, 0.6)
    assert alike["low"] > 0.29
    assert apart["low"] < -0.5 < 1.5 < apart["high"], "two seeds that differ give a wide interval"


def test_eval_and_compare_can_fail_on_a_regression(folder: Path) -> None:
    assert "Error" not in evaluate(folder, "--fail-under", "0.25")
    assert "the mean reward 0.250 is less than 0.26 (--fail-under)" in evaluate(folder, "--fail-under", "0.26", code=1)
    assert "Error" not in evaluate(folder, "--fail-under", "0.01", "--confidence", "0.9")
    said = evaluate(folder, "--fail-under", "0.2", "--confidence", "0.95", code=1)
    assert re.search(r"the lower end 0\.\d+ of the 0.95 interval is less than 0.2 .*; about \d+ tasks with these", said)
    assert "--confidence belongs to --fail-under" in evaluate(folder, "--confidence", "0.95", code=2)
    worse = "compare", "config.yaml", "-p", "good {n}", "-p", "bad {n}"
    assert run_here(folder, *worse).code == 0
    said = run_here(folder, *worse, "--fail-if-worse")
    assert said.code == 1
    assert "bad {n} is worse by 0.750, p = 0.0" in said.stderr
    better = run_here(folder, "compare", "config.yaml", "-p", "bad {n}", "-p", "good {n}", "--fail-if-worse")
    assert better.code == 0, better.stderr
    trained = run_here(folder, "compare", "config.yaml", "-a", "baseline", "-a", "baseline", "--fail-if-worse")
    assert trained.code == 0, trained.stderr


def test_two_texts_of_a_prompt_are_compared_in_one_command(folder: Path) -> None:
    (folder / "better.txt").write_text("good: {n}")
    found = run_here(folder, "compare", "config.yaml", "-p", "prompt=bad {n}", "-p", "@better.txt", "--json")
    assert found.code == 0, found.stderr
    first, second = json.loads(found.stdout)
    assert (first["label"], first["reward"], first["p"]) == ("bad {n}", 0.25, None)
    assert (second["label"], second["reward"], second["difference"]) == ("@better.txt", 1.0, 0.75)
    assert second["p"] < 0.05
    assert second["difference_low"] > 0
    texts = ("bad {n}", "@better.txt", "good {n}")
    several = run_here(folder, "compare", "config.yaml", *(part for text in texts for part in ("-p", text)), "--json")
    assert [row["p"] for row in json.loads(several.stdout)[1:]] == pytest.approx([2 * second["p"]] * 2)
    shown = run_here(folder, "compare", "config.yaml", "-p", "bad {n}", "-p", "good {n}")
    assert "+0.750" in shown.stdout
    assert "adjusted" not in shown.stdout
    wrong = run_here(folder, "compare", "config.yaml", "-p", "@no.txt")
    assert (wrong.code, "no.txt: the file cannot be read" in wrong.stderr) == (2, True)
    assert run_here(folder, "compare", "config.yaml").code == 2


def test_an_agent_is_evaluated_from_python() -> None:
    def agent(task: int, prompt: agl.PromptTemplate) -> None:
        if task == 9:
            raise KeyError("no such tool")

    def reward(task: int, output: None, rollout: agl.Rollout) -> float:
        return float(task % 2 == 0 or "good" in prompts["prompt"])

    prompts = {"prompt": "bad"}
    settings: dict[str, Any] = {"reward": reward, "resources": prompts, "strategy": "shm", "trackers": []}
    bad = agl.evaluate(agent, range(10), repetitions=2, **settings)
    assert (bad.mean, bad.n_rollouts, len(bad.rewards)) == (0.5, 20, 10)
    assert bad.interval is not None
    assert bad.interval[0] < 0.5 < bad.interval[1]
    assert bad.pass_at(1) == bad.pass_at(2) == 0.5
    assert bad.errors == {"KeyError": 2}
    assert bad.run.scores["reward"] == 0.5
    prompts["prompt"] = "good"
    good = agl.evaluate(agent, range(10), **settings)
    found = good.compare(bad)
    assert found.difference == pytest.approx(0.4)
    assert found.paired
    assert found.p_value < 0.2
    with pytest.raises(agl.ConfigError, match="10 and 2 tasks cannot be compared"):
        good.compare(agl.evaluate(agent, range(2), **settings))
    with pytest.raises(agl.LightningError, match="none of the first 2 rollouts has a reward"):
        agl.evaluate(agent, range(2), strategy="shm", resources=prompts, trackers=[])


def test_a_crash_is_not_the_best_score_where_rewards_are_negative(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(agent: Any) -> Any:
        return agl.evaluate(
            agl.wrap(agent), range(8), repetitions=2, strategy="shm", trackers=[], success_threshold=-0.3
        )

    crashing = evaluate(lambda task: -0.2 if task == 0 else 1 / 0)
    careful = evaluate(lambda task: -0.5 - task / 10)
    assert crashing.rewards == [[-0.2, -0.2]] * 8
    assert crashing.pass_at(1) == 1 / 8, "a failure is never a success"
    assert careful.compare(crashing).difference > 0, "a failure counts as the lowest reward of both sides"
    variants = [
        Variant([], label, [each.score], rollouts=[1], seconds=[1.0], prompts=[{}], places=[tmp_path])
        for label, each in (("crashing", crashing), ("careful", careful))
    ]
    assert compare_variants(variants)[1]["difference"] == pytest.approx(careful.mean - (7 * -1.2 - 0.2) / 8)


async def test_a_failed_rollout_of_a_recorded_group_counts_as_the_lowest_reward_of_both_groups() -> None:
    store = agl.InMemoryLightningStore()
    for group, rewards in (("control", [-0.5, -2.0]), ("treatment", [-0.1, None])):
        for task, reward in enumerate(rewards):
            queued = agl.EnqueueRolloutRequest(input=task, metadata={"group": group, "task_id": task})
            await store.enqueue_many_rollouts([queued])
            claimed = await store.dequeue_rollout("worker")
            assert claimed is not None
            status = "failed" if reward is None else "succeeded"
            await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status=status, reward=reward)
    found = await agl.compare_rollouts(store, "control", "treatment")
    assert (found.control.mean, found.treatment.mean, found.treatment.failed) == (-1.25, (-0.1 - 2.0) / 2, 1)
    await store.close()


def test_the_run_of_a_trainer_has_only_its_own_scores() -> None:
    store = agl.InMemoryLightningStore()
    for epochs, reward in ((3, 1.0), (1, 0.5)):
        trainer = agl.Trainer(algorithm=agl.Baseline(n_epochs=epochs), store=store, strategy="shm", trackers=[])
        run = trainer.fit(lambda task, reward=reward: task * reward, [1.0, 1.0])
        assert run.scores["reward"] == reward


def test_pass_at_k_is_the_unbiased_estimator() -> None:
    score = Score([[1.0, 0.0, 0.0, 0.0], [0.0] * 4])
    assert score.pass_at(1) == pytest.approx(0.125)
    assert score.pass_at(2) == pytest.approx((1 - math.comb(3, 2) / math.comb(4, 2)) / 2)
    assert score.pass_at(4) == 0.5


async def test_a_rollout_without_a_reward_is_left_out_and_counted() -> None:
    store = agl.InMemoryLightningStore()
    algorithm = Evaluation()
    algorithm.set_store(store)
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer(), max_rollouts=3)
    with runner.run_context(agent=agl.wrap(lambda task: None if task == 1 else 1.0), store=store):
        await asyncio.gather(runner.iter(), algorithm.run(val_dataset=[0, 1, 2]))
    assert algorithm.score.rewards == [[1.0], [], [1.0]]
    assert (algorithm.score.mean, algorithm.score.missing) == (1.0, 1)
    with pytest.raises(agl.ConfigError, match="the dataset is empty"):
        await algorithm.run(val_dataset=[])
    await store.close()


async def test_the_first_successes_without_a_reward_end_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if these rollouts are not in the first batch."""
    monkeypatch.setattr("agentlightning_algorithms.evaluation._BATCH_SIZE", 2)
    store = agl.InMemoryLightningStore()
    algorithm = Evaluation()
    algorithm.set_store(store)
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer(), max_rollouts=4)
    with runner.run_context(agent=agl.wrap(lambda task: 1 / 0 if task < 2 else None), store=store):
        running = asyncio.create_task(runner.iter())
        with pytest.raises(agl.LightningError, match="none of the first 2 rollouts has a reward"):
            await algorithm.run(val_dataset=[0, 1, 2, 3])
        await running
    await store.close()


async def test_repeating_an_evaluation_in_a_run_runs_no_rollout_again() -> None:
    store = agl.InMemoryLightningStore()
    algorithm = Evaluation(repetitions=2)
    algorithm.context = agl.RunContext(store=store, key="key")
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer(), max_rollouts=6)
    with runner.run_context(agent=agl.wrap(lambda task: float(task)), store=store):
        running = asyncio.create_task(runner.iter())
        await algorithm.run(val_dataset=[0, 1, 2])
        await running
    first = algorithm.score
    await algorithm.run(val_dataset=[0, 1, 2])  # there is no runner, so nothing can run again
    assert algorithm.score == first
    assert first.rewards == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    await store.close()
