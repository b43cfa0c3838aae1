from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentlightning_plugins.demo.training import read_metrics

AGL = [sys.executable, "-m", "agentlightning"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_demo_that_is_stopped_with_ctrl_c_can_be_resumed_learns_and_reports_its_results(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    command = [*AGL, "demo", "--run-dir", str(directory), "--seed", "0", "--steps", "10"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 240
    metrics = directory / "metrics.jsonl"
    while not (metrics.is_file() and '"step":2' in metrics.read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=100)
    assert process.returncode == 130
    assert f"agl demo --resume {directory}" in output.replace("\n", "")
    assert "Traceback" not in output
    resumed = subprocess.run([*AGL, "demo", "--resume", str(directory)], capture_output=True, text=True, check=True)
    assert "report" in resumed.stderr
    every_step = read_metrics(metrics)
    assert [step["step"] for step in every_step] == list(range(11))
    steps = [step for step in every_step if "reward" in step]
    before, after = (step["test_reward"] for step in every_step if "test_reward" in step)
    assert before <= 0.3
    assert after >= before + 0.15, "ten steps gain about 0.3; at least half of that is required"
    assert max(step["logprob_gap_max"] for step in steps) <= 1e-4
    assert sum(step["calls_without_tokens"] for step in steps) == 0
    assert sum(step["rollouts_without_reward"] for step in steps) == 0
    report = (directory / "report.html").read_text()
    assert f"{after:.3f}" in report
    assert "Before: reward" in report
    assert report.count('<div class="talk">') == 2
    assert "before training, reward" in resumed.stderr


def test_invalid_options_of_the_demo_are_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for name, config in (("torn", '{"seed": 0, "st'), ("foreign", '["seed"]')):
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
        refused = subprocess.run([*AGL, "demo", *arguments], capture_output=True, text=True, check=False)
        assert refused.returncode == 2
        assert complaint in " ".join(refused.stderr.split())


def test_show_agent_prints_the_agents_file_which_has_no_training_code() -> None:
    shown = subprocess.run([*AGL, "demo", "--show-agent"], capture_output=True, text=True, check=True).stdout
    assert "def calculator_agent(" in shown
    assert not any(word in shown.lower() for word in ("torch", "grpo", "algorithm", "trainer", "gradient"))
