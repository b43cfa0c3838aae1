"""Kills a training with SIGKILL at random steps, resumes it, and compares it with an undisturbed run of it.

    python -m examples.crash_evidence math --out runs/crash --seed 0 --kills 3

Both runs have the same seed. The script prints the validation reward of each run by step, and the largest differences
between the mean rewards and losses of a step, and writes this to OUT/EXAMPLE.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Step = dict[str, Any]
COMPARED = ("reward", "loss", "val_reward")


def read_steps(directory: Path) -> dict[int, Step]:
    """Returns the metrics of each step; the last line of a step counts, since a resumed run may repeat it."""
    file = directory / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]  # the last line may be incomplete
    return {entry["step"]: entry for entry in entries if "step" in entry}


def train(example: str, directory: Path, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a training, or continues the training in ``directory``, in a separate process group."""
    command = [sys.executable, "-m", "agentlightning", "train"]
    if (directory / "run.json").exists():
        command += ["--resume", str(directory)]
    else:
        command += [f"examples/{example}/train.yaml", f"run_dir={directory}", "trackers=[jsonl]", *options]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f"{directory.name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Waits for a training; raises CalledProcessError if it failed."""
    try:
        process.wait()
    except BaseException:  # Ctrl-C does not reach another process group
        kill(process)
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills all processes of a training."""
    with suppress(ProcessLookupError):  # they have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def train_and_kill(example: str, directory: Path, options: Sequence[str], kill_at: Sequence[int]) -> None:
    """Trains; soon after each of the steps ``kill_at``, kills all processes of the training and resumes it."""
    moment = random.Random(str(kill_at))
    for step in kill_at:
        process = train(example, directory, options)
        try:
            while max(read_steps(directory), default=-1) < step:
                if process.poll() is not None:
                    raise subprocess.CalledProcessError(process.returncode, process.args)
                time.sleep(0.05)
            time.sleep(moment.uniform(0.0, 3.0))  # in a rollout, an update or a checkpoint
        finally:
            kill(process)
    finish(train(example, directory, options))


def describe(undisturbed: dict[int, Step], killed: dict[int, Step], kill_at: Sequence[int], command: str) -> str:
    """Returns the comparison in Markdown."""
    rows = [step for step in sorted(undisturbed) if "val_reward" in undisturbed[step]]
    lines = ["| step | " + " | ".join(map(str, rows)) + " |", "|---" * (len(rows) + 1) + "|"]
    for name, steps in (("undisturbed", undisturbed), ("killed and resumed", killed)):
        values = [f"{steps[step]['val_reward']:.3f}" if step in steps else "missing" for step in rows]
        lines.append(f"| {name} | " + " | ".join(values) + " |")
    differences = {name: largest_difference(undisturbed, killed, name) for name in COMPARED}
    shown = ", ".join(f"{name} {value:.2g}" for name, value in differences.items())
    said = f"Killed after steps {', '.join(map(str, kill_at))}. Largest difference of any step: {shown}."
    rewards = [{step: values.get("reward") for step, values in steps.items()} for steps in (undisturbed, killed)]
    differ = [step for step in sorted(undisturbed) if rewards[0][step] != rewards[1].get(step)]
    if differ:
        said += f" The training rewards of all steps before step {differ[0]} are equal."
    return "\n".join([*lines, "", said, "", f"    {command}", ""])


def largest_difference(undisturbed: dict[int, Step], killed: dict[int, Step], name: str) -> float:
    """Returns the largest difference of a metric over all steps; infinite if a step is missing in one of the runs."""
    steps = {step for step, values in undisturbed.items() if name in values}
    if steps != {step for step, values in killed.items() if name in values}:
        return float("inf")
    return max(abs(float(undisturbed[step][name]) - float(killed[step][name])) for step in steps)


def main() -> None:
    """Runs both trainings and writes the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", help="a folder of examples/ with train.yaml")
    parser.add_argument("--out", type=Path, default=Path("runs/crash"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of both runs")
    given = parser.parse_args()
    options = [f"seed={given.seed}", f"algorithm.steps={given.steps}", *given.set]
    kill_at = sorted(random.Random(given.seed).sample(range(1, given.steps), given.kills))
    out = given.out / given.example
    finish(train(given.example, out / "undisturbed", options))
    train_and_kill(given.example, out / "killed", options, kill_at)
    command = f"python -m examples.crash_evidence {' '.join(sys.argv[1:])}"
    text = describe(read_steps(out / "undisturbed"), read_steps(out / "killed"), kill_at, command)
    (given.out / f"{given.example}.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
