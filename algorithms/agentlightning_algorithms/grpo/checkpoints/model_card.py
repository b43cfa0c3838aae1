"""The model card of an exported model: base, data, settings, learning curve and versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import yaml

from agentlightning.run.directory import RECORD_NAME
from agentlightning_algorithms.shared.trained_model import has_adapters, read_training

_ROWS: Final = 20
"""Maximum number of rows of the learning curve."""


def write_model_card(model: Path, run: Path, checkpoint: str) -> None:
    """Writes ``README.md`` next to the weights in ``model``, from the files in the run's directory."""
    training = read_training(run)
    base = "unknown" if training is None else training.base
    algorithm = "unknown" if training is None else training.algorithm
    library = "peft" if has_adapters(model) else "transformers"
    head = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["reinforcement-learning", algorithm]}
    if base != "unknown" and not Path(base).exists():  # the hub accepts names only
        head["base_model"] = base
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", "", f"# {run.resolve().name}", ""]
    kind = "LoRA adapters" if library == "peft" else "weights"
    lines += [f"The {kind} of checkpoint `{checkpoint}`, trained with Lightning.", ""]
    lines += ["| | |", "|---|---|", f"| base model | `{base}` |", f"| algorithm | `{algorithm}` |"]
    if training is not None:
        lines.append(f"| data | {training.train_tasks} training tasks, {training.val_tasks} validation tasks |")
    lines += ["", *_curve(run / "metrics.jsonl")]
    if training is not None:
        settings = yaml.safe_dump(dict(training.settings), sort_keys=False).strip()
        lines += ["## Settings", "", "```yaml", settings, "```", ""]
    lines += _versions(run / RECORD_NAME)
    (model / "README.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _curve(file: Path) -> list[str]:
    """Returns a table of the training and validation reward at evenly spaced steps."""
    steps: dict[int, dict[str, float]] = {}
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # the process was killed while it wrote this line
                continue
            if "step" not in record:  # the line that records the end of the run
                continue
            found = {name: record[name] for name in ("reward", "val_reward") if name in record}
            steps.setdefault(int(record["step"]), {}).update(found)
    curve = sorted((step, values) for step, values in steps.items() if values)
    if not curve:
        return []
    chosen = [curve[round(i * (len(curve) - 1) / max(1, _ROWS - 1))] for i in range(_ROWS)]
    shown = curve if len(curve) <= _ROWS else chosen
    lines = ["## Learning curve", "", "| step | training reward | validation reward |", "|---|---|---|"]
    return [
        *lines,
        *(f"| {step} | {_show(values, 'reward')} | {_show(values, 'val_reward')} |" for step, values in shown),
        "",
    ]


def _show(values: dict[str, float], name: str) -> str:
    return f"{values[name]:.3f}" if name in values else ""


def _versions(file: Path) -> list[str]:
    if not file.is_file():
        return []
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    versions = [f"| {name} | {version} |" for name, version in record.get("versions", {}).items()]
    return ["## Versions", "", f"Seed {record.get('seed', 0)}.", "", "| | |", "|---|---|", *versions]
