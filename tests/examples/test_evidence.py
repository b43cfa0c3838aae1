"""examples/evidence.py and examples/math: agents of real frameworks learn, and the controls do not."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from examples import evidence
from examples.math import problems as math_problems
from safetensors.torch import load_file

from agentlightning_algorithms.shared.advantage import Scored, compute_advantages
from agentlightning_plugins.demo.training import CHECKPOINT, GRPO_SETTINGS, TARGET_REWARD
from tests.algorithms.server_thread import threads_for_servers
from tests.source import REPO, run_python
from tests.waiting import blocking_until

LEARNED = {
    "demo": (0.8, 0.5),
    "game": (0.8, 0.5),
    "lake": (0.65, 0.1),
    "math": (0.8, 0.5),
    "rag": (0.55, 0.3),
    "sql": (0.55, 0.3),
}
"""Least reward of a trained seed after training, and the least gain over its reward before."""
HEADER = "| variant | seeds | test reward before | after, 95 % interval over seeds | each seed |"


def read_runs(out: Path, example: str, said: str) -> dict[str, dict[int, list[evidence.Step]]]:
    """Checks the report of the script and returns the metrics of each variant and seed."""
    assert HEADER in said
    assert (out / f"{example}.md").read_text() in said
    assert (out / f"{example}.svg").read_text().count("<polyline") == len(list((out / example).iterdir()))
    return evidence.read_runs(out / example)


IN_SOAK = ("game", "math", "rag", "sql")
"""Examples that only ``make soak`` trains: their frameworks are trained by other tests."""


@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=[pytest.mark.soak] * (name in IN_SOAK)) for name in [*LEARNED, "coding"]]
)
def test_an_example_trains_and_the_demo_with_a_learning_rate_of_zero_does_not_change(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("steps=2", "eval_every=0", "tasks_per_step=2", "rollouts_per_task=4", "update.warmup_updates=0")
    gradient = (
        "experience.keep_flat_groups=true",
        "update.entropy_coefficient=0.01",
    )  # even if no rollout earns a reward
    settings = [f"algorithm.{setting}" for setting in (*few, *gradient)]
    settings += ["strategy=shm", f"data.val={{source: 'examples.{example}.problems:val', limit: 4}}"]
    variants = ("trained", "frozen") if example == "demo" else ("trained",)
    arguments = ("--seeds", "0", "--variants", *variants, "--tests", "4", "--set", *settings)
    monkeypatch.setattr("sys.argv", ["evidence", example, "--out", str(tmp_path), *arguments])
    monkeypatch.chdir(REPO)
    with threads_for_servers():
        evidence.main()
    runs = read_runs(tmp_path, example, capsys.readouterr().out)
    assert tuple(runs) == variants
    for steps in (runs[variant][0] for variant in variants):
        assert [step["rollouts"] for step in steps[1:]] == [8.0, 8.0]
        assert {step["rollouts_without_reward"] for step in steps[1:]} == {0.0}
        assert {step["calls_stale"] for step in steps[1:]} == {0.0}
    start = yaml.safe_load((REPO / "examples" / example / "train.yaml").read_text())["algorithm"]["model"]
    old = load_file(REPO / "examples" / example / start / "model.safetensors")
    for variant in variants:
        new = load_file(tmp_path / example / f"{variant}-0/checkpoint/model.safetensors")
        is_changed = any(bool((new[name] - old[name]).abs().max() > 1e-20) for name in old)
        assert is_changed is (variant == "trained")
        before, after = evidence.test_rewards(runs[variant][0])
        assert is_changed or before == after


def test_cpu_seconds_are_counted_by_the_purpose_of_a_process() -> None:
    purposes = {
        "sampler": "agentlightning_algorithms.shared.policy.server",
        "agent": "agentlightning_plugins.shared.processes.job_process",
        "other": "",
    }
    with contextlib.ExitStack() as started, evidence.measured_cpu() as seconds:
        for argument in purposes.values():
            process = subprocess.Popen([sys.executable, "-c", "while True: pass", argument])
            started.enter_context(process)
            started.callback(process.kill)
            used = psutil.Process(process.pid).cpu_times
            blocking_until(lambda used=used: used().user >= 0.02)
    assert set(seconds) == {*purposes, "main"}
    assert all(seconds[purpose] > 0.0 for purpose in purposes)


@pytest.mark.soak
@pytest.mark.parametrize("example", list(LEARNED))
def test_every_trained_seed_exceeds_both_controls_by_more_than_the_interval(example: str, tmp_path: Path) -> None:
    arguments = ("-m", "examples.evidence", example, "--out", str(tmp_path))
    runs = read_runs(tmp_path, example, run_python(*arguments, cwd=REPO, timeout_s=3 * 3600 - 60))
    seconds = json.loads((tmp_path / example / "trained-0" / "seconds.json").read_text())
    assert set(seconds) >= {"agent", "sampler", "main", "wall"}
    rewards = {name: [evidence.test_rewards(steps) for steps in seeds.values()] for name, seeds in runs.items()}
    assert {name: len(found) for name, found in rewards.items()} == {"trained": 5, "shuffled": 5, "frozen": 5}
    after = [pair[1] for pair in rewards["trained"]]
    least, rise = LEARNED[example]
    assert min(after) >= least
    assert all(later - before >= rise for before, later in rewards["trained"])
    best_control = max(pair[1] for name in ("shuffled", "frozen") for pair in rewards[name])
    assert min(after) - best_control > evidence.mean_and_interval(after)[1]


def test_the_configuration_of_the_demo_equals_the_settings_of_agl_demo() -> None:
    algorithm = yaml.safe_load((REPO / "examples/demo/train.yaml").read_text())["algorithm"]
    assert (REPO / "examples/demo" / algorithm.pop("model")).resolve() == CHECKPOINT
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
