"""The demo's report: one self-contained HTML file with the reward curve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentlightning_plugins.charts.line import Point, Series, line_chart


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Reads the steps of a ``metrics.jsonl``; the last line of a step counts, since a resume may repeat it."""
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    steps = {entry["step"]: entry for entry in entries if "step" in entry}
    return [steps[step] for step in sorted(steps)]


def write_report(directory: Path, metrics: Sequence[dict[str, Any]]) -> Path:
    """Writes ``report.html`` into the run's directory and returns its path."""
    from jinja2 import Environment, select_autoescape

    from agentlightning_plugins.demo.training import chosen_transcripts

    template = Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=select_autoescape(default=True, default_for_string=True))
    trained = [step for step in metrics if "reward" in step]
    tests = [step["test_reward"] for step in metrics if "test_reward" in step]
    html = environment.from_string(template).render(
        name=directory.name,
        curve=line_chart(
            [
                _series("training, sampled", trained, "reward"),
                _series("validation, greedy", metrics, "val_reward"),
                _series("test, greedy", metrics, "test_reward"),
            ],
            title="Mean reward by step",
            x_label="step",
            y_range=(0, 1),
            width=720,
            height=320,
        ),
        before=tests[0] if tests else None,
        after=tests[-1] if len(tests) > 1 else None,
        steps=len(trained),
        seconds=sum(step["seconds"] for step in trained),
        calls=sum(step["calls"] for step in trained),
        tokens=sum(step["sampled_tokens"] for step in trained),
        gap=max((step.get("logprob_gap_max", 0.0) for step in trained), default=0.0),
        rows=trained,
        transcripts=chosen_transcripts(directory),
    )
    file = directory / "report.html"
    file.write_text(html, encoding="utf-8")
    return file


def _series(name: str, steps: Sequence[dict[str, Any]], key: str) -> Series:
    points = [Point(step["step"], step[key]) for step in steps if key in step]
    return Series(name, points, is_line=key != "test_reward")
