"""``agl compare --prompt``: compares texts of a prompt on the same tasks, without training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from agentlightning.errors import ConfigError
from agentlightning.resources import PromptTemplate
from agentlightning_plugins.statistics.comparison import Group, compare_groups


def compare_prompts(
    config: Any, parts: Any, texts: Sequence[str], tasks: Any, directory: Path, repetitions: int, *, quiet: bool
) -> list[dict[str, Any]]:
    """Evaluates the agent with each text and compares the later ones with the first.

    Args:
        config: the configuration.
        parts: its loaded parts; its resources have the prompt.
        texts: of ``--prompt``.
        tasks: the tasks.
        directory: of the evaluations.
        repetitions: of each task.
        quiet: do not print progress.

    Returns:
        A row for each text.
    """
    from agentlightning_plugins.commands.evaluation.eval_command import evaluate

    prompts = [_read_prompt(text, parts) for text in texts]
    rows: list[dict[str, Any]] = []
    first: Group | None = None
    for number, (label, name, prompt) in enumerate(prompts):
        place = directory / f"{number}-{name}"
        if not quiet:
            click.echo(f"== {label}: {place}", err=True)
        own = dataclasses.replace(parts, resources={**(parts.resources or {}), name: prompt})
        score = evaluate(config, own, tasks, place, {"repetitions": repetitions}, None, quiet)
        group = Group(label, {f"task {index}": rewards for index, rewards in enumerate(score.rewards) if rewards})
        row = {"prompt": label, "reward": score.mean, "difference": None, "low": None, "high": None, "p": None}
        if first is None:
            first = group
        else:
            found = compare_groups(first, group)
            low, high = (value if math.isfinite(value) else None for value in (found.low, found.high))
            row |= {"difference": found.difference, "low": low, "high": high, "p": found.p_value}
        rows.append(row)
    return rows


def _read_prompt(text: str, parts: Any) -> tuple[str, str, PromptTemplate]:
    """The label of a ``--prompt``, the name of its resource, and the prompt with the engine of the configuration's."""
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
