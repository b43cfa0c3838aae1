"""examples/one_agent: the same agent with apo, gepa, grpo, and apo before grpo, compared by agl compare."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from examples.one_agent import compare, critic, tickets
from examples.one_agent.agent import FIRST_PROMPT

from agentlightning_plugins.commands.evaluation.compare import command as compare_command
from tests.algorithms.server_thread import threads_for_servers
from tests.source import REPO, run_python

LABELS = ["apo, then grpo", "apo", "gepa", "grpo", "no training"]


def read_rows(said: str, out: Path) -> dict[str, dict[str, Any]]:
    """Returns the rows of ``agl compare`` by the names of the algorithms."""
    rows = json.loads(said[said.index("\n[") :])
    assert (out / "report.html").is_file()
    return {row["label"]: row for row in rows}


def compare_here(command: list[str], env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
    """Stands for ``subprocess.run`` of ``agl compare``."""
    done = CliRunner(env=env).invoke(compare_command, command[command.index("compare") + 1 :])
    print(done.stdout)
    return subprocess.CompletedProcess(command, done.exit_code)


@pytest.mark.soak
def test_prompt_and_weight_optimisers_are_compared_with_one_budget_on_the_test_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    test, out = tmp_path / "test.jsonl", tmp_path / "out"
    test.write_text("".join(json.dumps(task) + "\n" for task in tickets.make_tickets("test", 40)))
    short = ("--only", "apo-grpo", "gepa", "none", "--budget", "320", "--val", "12", "--set", "strategy=shm")
    monkeypatch.setattr("sys.argv", ["compare", "--out", str(out), "--json", *short, "--test", str(test)])
    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=compare_here))
    with threads_for_servers():
        assert compare.main() == 0
    rows = read_rows(capsys.readouterr().out, out)
    both, gepa, none = rows.values()
    assert [*rows] == ["apo, then grpo", "gepa", "no training"]
    assert 140 < both["rollouts"] <= 320
    assert 140 < gepa["rollouts"] <= 320
    assert none["rollouts"] == 0
    assert none["prompts"] == [{"prompt": FIRST_PROMPT}]
    assert none["reward"] <= 0.2
    assert [row["missing"] for row in rows.values()] == [0, 0, 0]
    assert [row["p"] is None for row in rows.values()] == [True, False, False]
    trained = json.loads((out / "0-apo-grpo-0/2-grpo/training.json").read_text())
    assert (trained["algorithm"], trained["resource_name"]) == ("grpo", "llm")


@pytest.mark.soak
def test_tuning_the_prompt_and_then_the_weights_is_better_than_either_and_each_than_no_training(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = run_python("-m", "examples.one_agent.compare", "--out", str(out), "--json", cwd=REPO, timeout_s=3500)
    rows = read_rows(said, out)
    assert [*rows] == LABELS
    rewards = {label: row["reward"] for label, row in rows.items()}
    assert rewards["no training"] <= 0.15
    assert all(rewards[label] >= rewards["no training"] + 0.2 for label in LABELS[:4]), rewards
    assert rewards["apo, then grpo"] >= max(rewards["apo"], rewards["gepa"], rewards["grpo"]), rewards
    assert rows["apo"]["p"] < 0.05
    assert max(row["rollouts"] for row in rows.values()) <= 2000


def test_the_scripted_critic_only_adds_and_removes_sentences_of_its_list() -> None:
    prompts = {FIRST_PROMPT}
    for number in range(200):
        prompt = sorted(prompts)[number % len(prompts)]
        prompts.add(critic.edit(prompt, critic.propose(prompt, str(number))))
    assert len(prompts) > 20
    for prompt in prompts:
        rest = prompt
        for sentence in critic.SENTENCES:
            assert rest.count(sentence) <= 1
            rest = rest.replace(f" {sentence}", "")
        assert rest == FIRST_PROMPT


def test_tickets_of_the_test_split_share_no_pair_of_sentences_with_other_splits() -> None:
    def pairs(split: Any) -> set[str]:
        return {task["text"].partition(" writes: ")[2] for task in tickets.make_tickets(split, 200)}

    assert not pairs("test") & (pairs("train") | pairs("val"))


def test_additional_words_before_a_right_answer_halve_its_reward() -> None:
    task = {"team": "returns", "priority": "high"}
    answers = (
        "returns, high",
        "This is for returns, high",
        "returns, normal",
        "returns, high now",
        "",
        "xreturns, high",
    )
    assert [tickets.grade(task, answer) for answer in answers] == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
