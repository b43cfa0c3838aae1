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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentlightning_plugins.demo.report import read_metrics

WIDTH, HEIGHT, MARGIN = 720, 300, 44
COLOURS = ("#2f6fed", "#d9480f", "#2b8a3e", "#862e9c", "#e67700")


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
    last_step = max(step["step"] for steps in runs.values() for step in steps)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        f'font-size="12" fill="#868e96">'
    ]
    for fifth in range(6):
        y = _y(fifth / 5)
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y}" y2="{y}" stroke="#868e96" opacity="0.3"/>')
        parts.append(f'<text x="{MARGIN - 8}" y="{y + 4}" text-anchor="end">{fifth / 5}</text>')
    parts.append(f'<text x="{MARGIN}" y="{HEIGHT - 22}">0</text>')
    parts.append(f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 22}" text-anchor="end">step {last_step}</text>')
    for (seed, steps), colour in zip(runs.items(), COLOURS, strict=False):
        points = _points(steps, "val_reward", last_step)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in _points(steps, "test_reward", last_step):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
        x = MARGIN + 70 * list(runs).index(seed)
        parts.append(f'<text x="{x}" y="{HEIGHT - 4}" fill="{colour}">seed {seed}</text>')
    caption = "greedy reward: lines validation, dots test"
    parts.append(f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 4}" text-anchor="end">{caption}</text></svg>\n')
    return "\n".join(parts)


def _points(steps: Sequence[dict[str, Any]], key: str, last_step: int) -> list[tuple[float, float]]:
    scale = (WIDTH - 2 * MARGIN) / last_step
    return [(MARGIN + scale * step["step"], _y(step[key])) for step in steps if key in step]


def _y(value: float) -> float:
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value


if __name__ == "__main__":
    main()
