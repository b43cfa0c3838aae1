"""Reward and time of the demo: ``python tests/benchmarks/bench_demo.py [--seeds 0 1 2] [--svg FILE]``.

Runs ``agl demo`` for each seed, one after another, and prints test reward before and after, steps, model calls,
seconds of training and the largest log-probability gap. The baseline is the untrained checkpoint on the same test
split, in the same run. With ``--svg`` it draws the validation curves, and the test reward before and after as dots.

Targets (issue 2): before <= 0.3, after >= 0.8, at most 180 s of training on 2 otherwise idle cores, gap <= 1e-4.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentlightning_plugins.demo.training import read_metrics
from agentlightning_plugins.shared.rendering.charts import Point, Series, line_chart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    print(f"{'seed':>4}{'before':>8}{'after':>8}{'steps':>7}{'calls':>8}{'train s':>9}{'wall s':>8}{'gap':>9}")
    runs: dict[int, list[dict[str, Any]]] = {}
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            options = ["--seed", str(seed), "--run-dir", f"{folder}/run"]
            command = [sys.executable, "-m", "agentlightning", "demo", *options]
            started = time.monotonic()
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            wall_s = time.monotonic() - started
            runs[seed] = read_metrics(Path(folder) / "run" / "metrics.jsonl")
        steps = [step for step in runs[seed] if "reward" in step]
        tests = [step["test_reward"] for step in runs[seed] if "test_reward" in step]
        train_s = steps[-1]["time"] - runs[seed][0]["time"]
        print(
            f"{seed:>4}{tests[0]:>8.3f}{tests[-1]:>8.3f}{len(steps):>7}{sum(s['calls'] for s in steps):>8.0f}"
            f"{train_s:>9.0f}{wall_s:>8.0f}{max(s['logprob_gap_max'] for s in steps):>9.1e}",
            flush=True,
        )
    if arguments.svg is not None:
        arguments.svg.write_text(draw(runs), encoding="utf-8")


def draw(runs: dict[int, list[dict[str, Any]]]) -> str:
    """The curves as SVG that reads on light and dark pages."""
    drawn = []
    for place, (seed, steps) in enumerate(runs.items()):
        for key, is_line in (("val_reward", True), ("test_reward", False)):
            points = [Point(step["step"], step[key]) for step in steps if key in step]
            drawn.append(Series(f"seed {seed}, {key.partition('_')[0]}", points, is_line=is_line, colour=place))
    title = "Greedy reward: lines validation, dots test"
    return line_chart(drawn, title=title, x_label="step", y_label=title, y_range=(0, 1), width=720, height=320)


if __name__ == "__main__":
    main()
