"""The demo's run: train, then compare the model before and after on a held-out test split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from agentlightning.cli import printable
from agentlightning.errors import ConfigError
from agentlightning.run.directory import make_directory
from agentlightning.store.protocol import LightningStore
from agentlightning.trainer import Trainer
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.shared.monitoring.evaluation import Transcript, compare_first_and_last
from agentlightning_plugins.shared.terminal import use_store

CHECKPOINT: Final = Path(__file__).with_name("checkpoint")
N_VAL, N_TEST = 96, 200
TARGET_REWARD: Final = 0.94
"""Validation reward at which training stops; above the target of 0.8 for the test split, which is a sample too."""

GRPO_SETTINGS: Final[dict[str, Any]] = {
    "name": "grpo",
    "steps": 32,
    "tasks_per_step": 16,
    "rollouts_per_task": 8,
    "eval_every": 4,
    "sampling": {"temperature": 1.0, "max_tokens": 32},
    "rollout_timeout_s": 60.0,
    "train_threads": 1,
    "update": {
        "lr": 1e-3,
        "betas": (0.9, 0.99),
        "schedule": "linear",
        "warmup_updates": 8,
        "final_lr_fraction": 0.1,
        "minibatches": 4,
    },
}


def run_demo(directory: Path, *, seed: int, steps: int | None = None, resume: bool = False) -> dict[str, float]:
    """Trains in ``directory``, or continues the run there with its own seed and steps; shows the result.

    Returns ``before`` and ``after``: the mean greedy reward on the test split.
    """
    console = Console(stderr=True)
    settings = _settings(directory, seed, steps, resume)
    trainer = Trainer(
        algorithm={
            **GRPO_SETTINGS,
            "model": str(CHECKPOINT),
            "steps": settings["steps"],
            "target_reward": TARGET_REWARD,
            "test_dataset": make_problems("test", N_TEST),
        },
        run_dir=directory,
        resume=resume,
        seed=settings["seed"],
    )
    try:
        trainer.fit(calculator_agent, make_problems("train", 4096, seed=settings["seed"]), make_problems("val", N_VAL))
    except KeyboardInterrupt:
        if (directory / "checkpoint").is_dir():
            console.print(f"\nstopped; continue with:\n\n    agl demo --resume {directory}\n", highlight=False)
        else:
            console.print("\nstopped before the first step; nothing was saved. Start again with: agl demo")
        raise
    metrics = read_metrics(directory / "metrics.jsonl")
    tests = [step["test_reward"] for step in metrics if "test_reward" in step]
    if len(tests) < 2:
        raise ConfigError(f"{directory}/metrics.jsonl has no test reward from before and after the training")
    result = {"before": tests[0], "after": tests[-1]}
    _show(console, directory, metrics, result)
    console.print(f"report: [bold]{directory / 'report.html'}[/bold]", highlight=False)
    return result


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Reads the steps of a ``metrics.jsonl``; the last line of a step counts, since a resumed run may repeat steps."""
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    steps = {entry["step"]: entry for entry in entries if "step" in entry}
    return [steps[step] for step in sorted(steps)]


def _settings(directory: Path, seed: int, steps: int | None, resume: bool) -> dict[str, Any]:
    """Writes the settings of a new run, or reads the settings of the run to resume."""
    file = directory / "config.json"
    if not resume:
        settings = {"seed": seed, "steps": steps or GRPO_SETTINGS["steps"]}
        make_directory(directory)
        try:
            file.write_text(json.dumps(settings))
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be written: {error.strerror or error}; choose another --run-dir"
            ) from error
        return settings
    try:
        loaded = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; is {directory} the directory of a demo run?") from error
    if not isinstance(loaded, dict) or not all(type(loaded.get(key)) is int for key in ("seed", "steps")):
        raise ConfigError(f'{file} has no settings of a run; expected: {{"seed": 0, "steps": 32}}')
    return loaded


async def _choose_transcripts(store: LightningStore) -> Sequence[tuple[str, Transcript]]:
    """Reads the transcripts of a test task before and after training, if possible one that is solved only after."""
    return (await compare_first_and_last(store, (await store.query_metrics()).items, (), {})).transcripts


def _show(console: Console, directory: Path, metrics: list[dict[str, Any]], result: dict[str, float]) -> None:
    steps = [step for step in metrics if "reward" in step]
    table = Table(title="greedy reward", title_justify="left", header_style="bold")
    for column in ("", "before", "after"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row(f"test ({N_TEST} tasks, never used to choose)", f"{result['before']:.3f}", f"{result['after']:.3f}")
    validation = [step["val_reward"] for step in metrics if "val_reward" in step]
    table.add_row(f"validation ({N_VAL} tasks)", f"{validation[0]:.3f}", f"{validation[-1]:.3f}")
    table.add_row("training (sampled)", f"{steps[0]['reward']:.3f}", f"{steps[-1]['reward']:.3f}")
    console.print(table)
    seconds = sum(step["seconds"] for step in steps)
    calls = sum(step["calls"] for step in steps)
    gap = max((step.get("logprob_gap_max", 0.0) for step in steps), default=0.0)
    console.print(
        f"{len(steps)} steps, {calls:,.0f} model calls, {seconds:.0f} s of training; sampler and trainer "
        f"log-probabilities differ by at most {gap:.1e}",
        highlight=False,
    )
    for phase, transcript in use_store(str(directory), None, _choose_transcripts):
        console.rule(f"{phase.lower()} training, reward {transcript.reward or 0:.0f}")
        for message in transcript.messages:
            calls = (f"{call['name']}({' '.join(call['arguments'].split())})" for call in message["tool_calls"])
            text = "".join((message["text"], *calls))
            console.print(f"{message['role']:>9}: {printable(text)}", highlight=False, markup=False)
    console.rule()
