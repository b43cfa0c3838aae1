"""examples/evidence.py and examples/math: agents of real frameworks learn, and the controls do not."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from examples import evidence
from examples.math import problems as math_problems

from agentlightning_algorithms.advantage import Scored, compute_advantages
from agentlightning_plugins.demo.training import CHECKPOINT, GRPO_SETTINGS, TARGET_REWARD
from tests.source import REPO, run_python

LEARNED = {"demo": (0.8, 0.5), "game": (0.8, 0.5), "math": (0.8, 0.5), "rag": (0.55, 0.3), "sql": (0.55, 0.3)}
"""Least reward of a trained seed after training, and the least gain over its reward before."""
HEADER = "| variant | seeds | test reward before | after, 95 % interval over seeds | each seed |"


def prove(out: Path, example: str, *arguments: str, timeout_s: float) -> dict[str, dict[int, list[evidence.Step]]]:
    """Runs the script and returns the metrics of each variant and seed."""
    said = run_python("-m", "examples.evidence", example, "--out", str(out), *arguments, cwd=REPO, timeout_s=timeout_s)
    assert HEADER in said
    assert (out / f"{example}.md").read_text() in said
    assert (out / f"{example}.svg").read_text().count("<polyline") == len(list((out / example).iterdir()))
    return evidence.read_runs(out / example)


@pytest.mark.parametrize("example", list(LEARNED))
def test_an_example_trains_and_with_a_learning_rate_of_zero_nothing_changes(example: str, tmp_path: Path) -> None:
    short = ("algorithm.steps=2", "algorithm.eval_every=0", "algorithm.tasks_per_step=6")
    validation = f"data.val={{source: 'examples.{example}.problems:val', limit: 12}}"
    arguments = ("--seeds", "0", "--variants", "trained", "frozen", "--tests", "24", "--set", validation, *short)
    runs = prove(tmp_path, example, *arguments, timeout_s=250)
    for steps in (runs["trained"][0], runs["frozen"][0]):
        assert steps[0]["test_reward"] <= 0.3
        assert [step["rollouts"] for step in steps[1:]] == [48.0, 48.0]
        assert {step["rollouts_without_reward"] for step in steps[1:]} == {0.0}
        assert {step["calls_stale"] for step in steps[1:]} == {0.0}
    weights = {variant: (tmp_path / example / f"{variant}-0/checkpoint/model.safetensors") for variant in runs}
    assert weights["trained"].read_bytes() != weights["frozen"].read_bytes()
    before, after = evidence.test_rewards(runs["frozen"][0])
    assert before == after
    seconds = json.loads((tmp_path / example / "trained-0" / "seconds.json").read_text())
    assert set(seconds) >= {"agent", "sampler", "main", "wall"}


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("example", list(LEARNED))
def test_every_trained_seed_exceeds_both_controls_by_more_than_the_interval(example: str, tmp_path: Path) -> None:
    runs = prove(tmp_path, example, timeout_s=3 * 3600 - 60)
    rewards = {name: [evidence.test_rewards(steps) for steps in seeds.values()] for name, seeds in runs.items()}
    assert {name: len(found) for name, found in rewards.items()} == {"trained": 5, "shuffled": 5, "frozen": 5}
    after = [pair[1] for pair in rewards["trained"]]
    assert max(before for before, _ in rewards["trained"]) <= 0.3
    least, rise = LEARNED[example]
    assert min(after) >= least
    assert all(later - before >= rise for before, later in rewards["trained"])
    best_control = max(pair[1] for name in ("shuffled", "frozen") for pair in rewards[name])
    assert min(after) - best_control > evidence.mean_and_interval(after)[1]


def test_the_configuration_of_the_demo_equals_the_settings_of_agl_demo() -> None:
    algorithm = yaml.safe_load((REPO / "examples/demo/train.yaml").read_text())["algorithm"]
    assert REPO / algorithm.pop("model") == CHECKPOINT
    assert algorithm.pop("target_reward") == TARGET_REWARD
    settings = {**GRPO_SETTINGS, "update": {**GRPO_SETTINGS["update"], "betas": [0.9, 0.99]}}
    assert algorithm == settings


def test_shuffled_advantages_use_rewards_of_other_rollouts_of_the_step() -> None:
    items = [Scored(float(index % 3), group=index // 8, rollout=index) for index in range(32)]
    found = evidence.shuffled(items, std_floor=0.01)
    assert found != compute_advantages(items, std_floor=0.01)
    assert found == evidence.shuffled(items, std_floor=0.01)
    calls = [item._replace(turn=turn) for item in items for turn in (0, 1)]
    advantages = evidence.shuffled(calls, std_floor=0.01)
    assert advantages[::2] == advantages[1::2], "all calls of a rollout get the reward of the same other rollout"


def test_the_report_counts_seeds_and_states_whether_training_exceeds_the_controls() -> None:
    def run(before: float, after: float) -> list[evidence.Step]:
        return [{"step": 0, "test_reward": before, "val_reward": 0.1}, {"step": 4, "test_reward": after, "loss": 1.0}]

    runs = {
        "trained": {0: run(0.2, 0.9), 1: run(0.2, 0.8), 2: run(0.2, 0.85)},
        "frozen": {0: run(0.2, 0.2), 1: run(0.2, 0.2), 2: run(0.2, 0.2)},
    }
    text = evidence.describe(runs, {}, "the command")
    assert "| trained | 3 | 0.200 | 0.850 ± 0.124 | 0.900, 0.800, 0.850 |" in text
    assert "The worst trained seed is 0.600 above the best control, more than the interval (0.124)." in text
    runs["frozen"][2] = run(0.2, 0.75)
    assert "**not more** than the interval" in evidence.describe(runs, {}, "the command")


def test_pairs_of_neighbouring_sentences_occur_in_only_one_split_of_math_problems() -> None:
    pairs = {}
    for split in ("train", "val", "test"):
        found = [*math_problems.templates(split, 1), *math_problems.templates(split, 2)]
        pairs[split] = {pair for one in found for pair in itertools.pairwise((one.scene, *one.events))}
        assert {one.events[-1][0] for one in found} == set(math_problems.OPERATORS)
    assert pairs["train"].isdisjoint(pairs["test"] | pairs["val"])
    assert pairs["test"].isdisjoint(pairs["val"])


def test_a_math_answer_must_be_the_number_in_a_message_and_not_the_result_of_a_tool() -> None:
    from autogen_agentchat.base import TaskResult
    from autogen_agentchat.messages import TextMessage, ToolCallSummaryMessage

    def reward(answer: str, message: type[TextMessage | ToolCallSummaryMessage], expected: str) -> float:
        fields: Any = {"tool_calls": [], "results": []} if message is ToolCallSummaryMessage else {}
        output = TaskResult(messages=[message(content=answer, source="mathematician", **fields)])
        return math_problems.reward({"answer": expected}, output, None)

    assert reward("1,200", TextMessage, "1200") == 1.0
    assert reward(" $7.50 ", TextMessage, "7.5") == 1.0
    assert reward("72", ToolCallSummaryMessage, "72") == 0.0
    assert reward("The answer is 72", TextMessage, "72") == 0.0


def test_files_of_calc_x_are_read_without_results_that_are_not_numbers(tmp_path: Path) -> None:
    rows = [{"question": "2 + 2?", "chain": "", "result": "4"}, {"question": "a or b?", "chain": "", "result": "a"}]
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train-00000.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert math_problems.load_calc_x("train", tmp_path) == [{"question": "2 + 2?", "answer": "4"}]
    with pytest.raises(FileNotFoundError, match=re.escape("has no test*.parquet and no test*.jsonl")):
        math_problems.load_calc_x("test", tmp_path)
