"""``agl import``: takes over data sets and traces of other tools."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentlightning.cli import echo
from agentlightning.errors import ConfigError
from agentlightning.frozen import to_number
from agentlightning.plugin.hookspecs import Kind, hookimpl
from agentlightning.plugin.registry import get_manager
from agentlightning.run.directory import make_directory
from agentlightning_plugins.shared.lazy import lazy_commands
from agentlightning_plugins.shared.terminal import json_option, print_json, run_option, use_store, written_store_option

if TYPE_CHECKING:
    from agentlightning_plugins.shared.importing import Imported, ImportedRollout


@hookimpl
def kinds() -> list[Kind]:
    return [Kind("importer", "(items, imported) -> None", "agl import: reads files of another tool")]


@click.command("import")
@click.argument("form", metavar="FORMAT")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path, exists=True))
@written_store_option
@run_option
@click.option("--tasks", type=click.Path(path_type=Path, dir_okay=False), help="Write the tasks to this .jsonl file.")
@click.option("--reward", metavar="NAME", help="The score that is the reward, or a number for all; needed if several.")
@json_option
def command(
    form: str, files: Sequence[Path], store: str, run: str | None, tasks: Path | None, reward: str | None, as_json: bool
) -> None:
    """Import FILE... of another tool: traces become rollouts of a store, data sets become tasks.

    FORMAT is the name of an importer; `agl plugins` lists them. A store that does not exist is made. What has been
    imported before is not imported again, and everything that has no equivalent is named.
    """
    from agentlightning_plugins.shared.importing import Imported

    imported = Imported()
    get_manager().create("importer", form)(imported.read(files), imported)
    rewards = _find_rewards(imported.rollouts, reward)
    new = known = 0
    if imported.rollouts:
        url = _make_store(store)
        new, known = use_store(url, run, lambda opened: imported.write(opened, form, rewards))
    n_tasks = _write_tasks(imported, tasks)
    left_out = [{"reason": why, "count": len(names), "items": names} for why, names in imported.left_out.items()]
    if as_json:
        counts = {"rollouts": new, "known": known, "tasks": n_tasks}
        print_json({**counts, "left_out": left_out, "configuration": imported.configuration})
        return
    if imported.rollouts:
        echo(f"{new} rollouts imported to {store}; {known} were there already")
        if rewards.count(None) == len(rewards):
            echo("none has a reward, and sft and dpo leave such rollouts out; --reward 1 gives all of them the same")
    if n_tasks:
        echo(f"{n_tasks} tasks" + (f" in {tasks}" if tasks else "; --tasks FILE writes them"))
    for reason, names in imported.left_out.items():
        echo(f"{len(names)} left out, {reason}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}")
    if imported.configuration:
        import yaml

        echo(yaml.safe_dump(imported.configuration, sort_keys=False, allow_unicode=True), nl=False)


def _find_rewards(rollouts: Sequence[ImportedRollout], chosen: str | None) -> list[float | None]:
    """Returns the rewards: a number for all, or the scores or entries of the metadata of the chosen name."""
    names = Counter(name for rollout in rollouts for name in rollout.scores)
    if (number := _read_number(chosen)) is not None:
        return [number] * len(rollouts)
    if chosen is None and len(names) > 1:
        raise ConfigError(f"there are several scores: {', '.join(names)}; choose the reward with --reward NAME")
    name = chosen or next(iter(names), "")
    found = [_read_number(rollout.scores.get(name, rollout.metadata.get(name))) for rollout in rollouts]
    if name and rollouts and all(reward is None for reward in found):
        raise ConfigError(f"--reward {name}: no rollout has such a score; there are: {', '.join(names) or 'none'}")
    return found


def _read_number(value: Any) -> float | None:
    """Returns a number, also one in a text; None for anything else."""
    try:
        return to_number(float(value) if isinstance(value, str) else value)
    except ValueError:
        return None


def _make_store(where: str) -> str:
    """Returns the URL of a store; makes the directory of a run, and the file of SQLite."""
    if "://" not in where:
        make_directory(Path(where))
        where = f"sqlite:///{where}/store.db"
    if where.startswith("sqlite:///"):
        Path(where.removeprefix("sqlite:///").split("?")[0]).touch(0o600)
    return where


def _write_tasks(imported: Imported, file: Path | None) -> int:
    """Writes each task once, and the files of the importer beside them; returns the number of tasks."""
    found = [*(rollout.task for rollout in imported.rollouts), *imported.tasks]
    tasks = dict.fromkeys(json.dumps(task, ensure_ascii=False) for task in found)
    if file is not None:
        if file.suffix != ".jsonl":
            raise ConfigError(f"--tasks {file}: the name of the file must end in .jsonl")
        try:
            for name, text in {file.name: "".join(f"{task}\n" for task in tasks), **imported.files}.items():
                file.with_name(name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error
    return len(tasks)


add_commands = lazy_commands(f"{__name__}:command")
