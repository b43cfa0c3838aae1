from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import agentlightning as agl
from agentlightning_plugins.demo import command, training
from tests.algorithms.server_thread import threads_for_servers
from tests.process import wait_for
from tests.waiting import LIMIT_S

FEW = {"tasks_per_step": 2, "rollouts_per_task": 4, "experience": {"keep_flat_groups": True}}
AGL = f"""
from agentlightning.cli import main
from agentlightning_plugins.demo import training
training.N_VAL = training.N_TEST = 4
training.GRPO_SETTINGS |= {FEW}
main()
"""


@pytest.mark.slow
def test_a_demo_that_is_stopped_with_ctrl_c_can_be_resumed_and_reports_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, log = tmp_path / "run", tmp_path / "log"
    metrics = directory / "metrics.jsonl"
    arguments = ("demo", "--run-dir", str(directory), "--seed", "0", "--steps", "6")
    with log.open("wb") as errors:
        process = subprocess.Popen([sys.executable, "-c", AGL, *arguments], stderr=errors, start_new_session=True)
    wait_for(lambda: metrics.is_file() and '"step":2' in metrics.read_text(), process, log)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(LIMIT_S) == 130
    output = log.read_text()
    assert f"agl demo --resume {directory}" in output.replace("\n", "")
    assert "Traceback" not in output
    for name in ("N_VAL", "N_TEST"):
        monkeypatch.setattr(training, name, 4)
    monkeypatch.setattr(training, "GRPO_SETTINGS", {**training.GRPO_SETTINGS, **FEW})
    with threads_for_servers():
        resumed = CliRunner().invoke(command, ["--resume", str(directory)], catch_exceptions=False)
    assert "report" in resumed.stderr
    every_step = training.read_metrics(metrics)
    assert [step["step"] for step in every_step] == list(range(7))
    steps = [step for step in every_step if "reward" in step]
    _, after = (step["test_reward"] for step in every_step if "test_reward" in step)
    assert max(step["logprob_gap_max"] for step in steps) <= 1e-4
    assert sum(step["calls_without_tokens"] for step in steps) == 0
    assert sum(step["rollouts_without_reward"] for step in steps) == 0
    report = (directory / "report.html").read_text()
    assert f"{after:.3f}" in report
    assert "Before: reward" in report
    assert report.count('<div class="conversation">') == 2
    assert "before training, reward" in resumed.stderr


def test_invalid_options_of_the_demo_are_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for name, config in (("torn", '{"seed": 0, "st'), ("foreign", json.dumps(["seed"]))):
        (tmp_path / name / "checkpoint").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(config)
    for arguments, complaint in (
        (["--run-dir", str(tmp_path / "full")], "is not empty"),
        (["--run-dir", str(tmp_path / "full" / "file")], "is a file"),
        (["--run-dir", str(tmp_path / "full" / "file" / "run")], "cannot be the directory of a run: Not a directory"),
        (["--resume", str(tmp_path / "torn")], "config.json cannot be read"),
        (["--resume", str(tmp_path / "foreign")], "has no settings of a run"),
        (["--resume", str(tmp_path / "nowhere")], "holds no checkpoint"),
        (["--steps", "0"], "is not in the range"),
    ):
        with pytest.raises((click.UsageError, agl.ConfigError), match=re.escape(complaint)):
            command.main(arguments, standalone_mode=False)


def test_show_agent_prints_the_agents_file_which_has_no_training_code() -> None:
    shown = CliRunner().invoke(command, ["--show-agent"]).stdout
    assert "def calculator_agent(" in shown
    assert not any(word in shown.lower() for word in ("torch", "grpo", "algorithm", "trainer", "gradient"))
