"""``agl compare --prompt``: compares texts of a prompt on the same tasks, without training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentlightning.cli import echo
from agentlightning.errors import ConfigError
from agentlightning.resources import PromptTemplate
from agentlightning_plugins.commands.evaluation.comparison_report import ADJUSTED, difference_cells
from agentlightning_plugins.shared.rendering.table import print_table
from agentlightning_plugins.shared.statistics.comparison import Group, compare_groups
from agentlightning_plugins.shared.statistics.interval import adjust_p_values
from agentlightning_plugins.shared.terminal import print_json


def compare_prompts(
    document: Any, texts: tuple[str, ...], test: str | None, repetitions: int, run_dir: Path | None, as_json: bool
) -> list[dict[str, Any]]:
    """Evaluates the texts of ``--prompt`` on the same tasks and prints a row for each; returns the rows."""
    from agentlightning_plugins.shared.configuration.assembly import load_parts
    from agentlightning_plugins.shared.configuration.config import read_config
    from agentlightning_plugins.shared.configuration.dataset import load_dataset
    from agentlightning_plugins.shared.configuration.run_directory import choose_directory

    document.values.pop("algorithm", None)
    checked = read_config(document)
    parts = load_parts(checked, document)
    tasks = load_dataset(test) if test is not None else parts.val if parts.val is not None else parts.train
    if tasks is None:
        raise ConfigError("comparing needs test tasks: data.val in the configuration, or --test SOURCE")
    directory = run_dir or choose_directory(None, "compare")
    rows = _evaluate_prompts(checked, parts, texts, tasks, directory, repetitions, quiet=as_json)
    if as_json:
        print_json(rows)
    else:
        print_table(
            ("prompt", "reward", "difference", "95 % interval", "p"),
            [
                (
                    row["prompt"],
                    f"{row['reward']:.3f}",
                    *difference_cells(row["difference"], row["low"], row["high"], row["p"], place == 0),
                )
                for place, row in enumerate(rows)
            ],
        )
        if len(rows) > 2:
            echo(ADJUSTED)
    return rows


def _evaluate_prompts(
    config: Any, parts: Any, texts: Sequence[str], tasks: Any, directory: Path, repetitions: int, *, quiet: bool
) -> list[dict[str, Any]]:
    """Evaluates the agent with each text and compares the later ones with the first.

    Args:
        config: the configuration.
        parts: the loaded parts of the configuration, whose resources contain the prompt.
        texts: the values of ``--prompt``.
        tasks: the test tasks.
        directory: directory of the evaluations.
        repetitions: number of rollouts of each task.
        quiet: do not print progress.

    Returns:
        A row for each text.
    """
    from agentlightning_plugins.commands.evaluation.eval_command import evaluate, failing_run

    prompts = [_read_prompt(text, parts) for text in texts]
    rows: list[dict[str, Any]] = []
    first: Group | None = None
    for number, (label, name, prompt) in enumerate(prompts):
        place = directory / f"{number}-{name}"
        if not quiet:
            echo(f"== {label}: {place}", err=True)
        own = dataclasses.replace(parts, resources={**(parts.resources or {}), name: prompt})
        with failing_run():
            score = evaluate(config, own, tasks, place, {"repetitions": repetitions}, quiet=quiet)
        group = Group(label, {f"task {index}": rewards for index, rewards in enumerate(score.rewards) if rewards})
        row = {"prompt": label, "reward": score.mean, "difference": None, "low": None, "high": None, "p": None}
        if first is None:
            first = group
        else:
            found = compare_groups(first, group)
            low, high = (value if math.isfinite(value) else None for value in (found.low, found.high))
            row |= {"difference": found.difference, "low": low, "high": high, "p": found.p_value}
        rows.append(row)
    for row, p in zip(rows[1:], adjust_p_values([row["p"] for row in rows[1:]]), strict=True):
        row["p"] = p
    return rows


def _read_prompt(text: str, parts: Any) -> tuple[str, str, PromptTemplate]:
    """Returns the label of a ``--prompt``, the name of its resource, and the prompt, with the configured engine."""
    from agentlightning.trainer import first_resources

    resources = first_resources(parts.agent, parts.resources) or {}
    own = {name: value for name, value in resources.items() if isinstance(value, PromptTemplate)}
    name, separator, value = text.partition("=")
    if not separator or name not in own:
        if len(own) != 1:
            raise ConfigError(
                f"--prompt {text[:60]!r}: write NAME=TEXT or NAME=@FILE; the prompts of the configuration are "
                f"{', '.join(own) or 'none, so add one to resources'}"
            )
        name, value = next(iter(own)), text
    label = value if len(value) <= 40 else f"{value[:39]}…"
    if value.startswith("@"):
        try:
            value = Path(value[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt {text}: the file cannot be read: {error}") from error
    return label, name, PromptTemplate(value, own[name].engine)
