"""``agl compare``: compares algorithms on the same agent, data, seeds and budget."""

from __future__ import annotations

import dataclasses
import inspect
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from agentlightning.cli import echo, print_table
from agentlightning.errors import ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning_plugins.commands.terminal import json_option, print_json
from agentlightning_plugins.statistics.difference import difference_over_seeds
from agentlightning_plugins.statistics.score import Score
from agentlightning_plugins.statistics.significance import adjust_p_values


@dataclasses.dataclass
class _Contestant:
    """The results of one algorithm."""

    spec: dict[str, Any]
    label: str
    scores: list[Score] = dataclasses.field(default_factory=list)
    """On the test tasks after training, by seed."""
    rollouts: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def takes(self, setting: str) -> bool:
        """Whether the algorithm has this setting."""
        return setting in inspect.signature(get_manager().get("algorithm", self.spec["name"])).parameters

    def by_task(self) -> list[dict[int, float]]:
        """Mean reward by seed and test task; tasks without a reward are left out."""
        return [{task: mean for task, mean in enumerate(score.by_task()) if mean is not None} for score in self.scores]

    def pooled(self) -> Score:
        """The score over all seeds."""
        rewards = [
            [reward for score in self.scores for reward in score.rewards[task]]
            for task in range(len(self.scores[0].rewards))
        ]
        return Score(rewards, missing=sum(score.missing for score in self.scores))


@click.command("compare")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--algorithm",
    "-a",
    "algorithms",
    multiple=True,
    metavar="YAML",
    help="A name, or '{name: ..., setting: ...}'; may be repeated. Settings of CONFIG's algorithm of this name hold "
    "unless given again. The first is the baseline of the comparison.",
)
@click.option(
    "--prompt",
    "-p",
    "prompts",
    multiple=True,
    metavar="TEXT|@FILE",
    help="Compare texts of the prompt instead, without training; NAME=TEXT if there are several prompts.",
)
@click.option(
    "--fail-if-worse", is_flag=True, help="Exit with 1 if one is worse than the first, with a p-value below 0.05."
)
@click.option("--seeds", default="0", show_default=True, help="Comma-separated; each algorithm runs once per seed.")
@click.option("--repetitions", "-n", default=1, show_default=True, type=click.IntRange(min=1), help="Per test task.")
@click.option("--budget", type=click.IntRange(min=1), metavar="N", help="Maximum number of training rollouts.")
@click.option("--test", "test", metavar="SOURCE", help="The test tasks; default is half of data.val.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Directory of the runs; default runs/compare-<n>.")
@json_option
def command(
    config: Path,
    overrides: tuple[str, ...],
    algorithms: tuple[str, ...],
    prompts: tuple[str, ...],
    fail_if_worse: bool,
    seeds: str,
    repetitions: int,
    budget: int | None,
    test: str | None,
    run_dir: Path | None,
    as_json: bool,
) -> None:
    """Train the agent of CONFIG with several algorithms, or run it with several prompts, and compare the results.

    Each algorithm learns from data.train and data.val; its published resources are evaluated on the test tasks, which
    it does not see: without --test, every second task of data.val is held out, and test tasks are left out of
    data.train and data.val. Differences are to the first algorithm, paired by task. With several seeds, seeds are a
    sample too; with one, the result holds for this one training. P-values are adjusted for the number of algorithms
    (Holm).
    """
    from agentlightning_plugins.commands.configuration.assembly import check_setup
    from agentlightning_plugins.commands.configuration.dataset import load_dataset
    from agentlightning_plugins.commands.configuration.document import read_with_overrides
    from agentlightning_plugins.commands.configuration.run_directory import choose_directory
    from agentlightning_plugins.commands.evaluation.prompt_comparison import check_regression, compare_prompts

    if bool(algorithms) == bool(prompts):
        raise click.UsageError("give algorithms (-a) or texts of a prompt (-p) to compare")
    document = read_with_overrides(config, overrides)
    if prompts:
        rows = compare_prompts(document, prompts, test, repetitions, run_dir, as_json)
        check_regression(rows, fail_if_worse)
        return
    specs = [_to_spec(text, document.values.get("algorithm")) for text in algorithms]
    contestants = [_Contestant(spec, label) for spec, label in zip(specs, _labels(specs), strict=True)]
    tasks = None if test is None else load_dataset(test)
    try:
        chosen_seeds = [int(text) for text in seeds.split(",")]
    except ValueError:
        raise click.UsageError(f"--seeds {seeds}: numbers separated by commas are needed, as in 0,1,2") from None
    for contestant in contestants:  # check every algorithm before the first one trains
        checked, parts = _load(document, contestant, chosen_seeds[0])
        check_setup(checked, parts)
        _hold_out(parts, tasks)
    directory = run_dir or choose_directory(None, "compare")
    for number, contestant in enumerate(contestants):
        for seed in chosen_seeds:
            place = directory / f"{number}-{contestant.spec['name']}-{seed}"
            if not as_json:
                echo(f"== {contestant.label}, seed {seed}: {place}", err=True)
            _run_one(document, contestant, seed, place, tasks, repetitions, budget, quiet=as_json)
    check_regression(_show(contestants, as_json), fail_if_worse)


def _hold_out(parts: Any, tasks: Any) -> tuple[Any, list[Any]]:
    """Separates the tasks that algorithms learn from and select on from those that they are compared on.

    Returns:
        The parts without test tasks in their data, and the test tasks.
    """
    if tasks is None and (parts.val is None or len(parts.val) < 2):
        raise ConfigError(
            "comparing needs test tasks: --test SOURCE, or at least two tasks in data.val to hold out half"
        )
    test = (
        [tasks[n] for n in range(len(tasks))]
        if tasks is not None
        else [parts.val[n] for n in range(1, len(parts.val), 2)]
    )
    if not test:
        raise ConfigError("comparing needs test tasks, but --test has none")
    kept: dict[str, Any] = {}
    held_out = {repr(task) for task in test}
    for name in ("train", "val"):
        data = getattr(parts, name)
        kept[name] = data and [data[n] for n in range(len(data)) if repr(data[n]) not in held_out]
        if data and not kept[name]:
            raise ConfigError(
                f"every task of data.{name} is a test task too, so that an algorithm would be compared on what it "
                "learned from; give --test other tasks"
            )
    return dataclasses.replace(parts, **kept), test


def _to_spec(text: str, configured: Any) -> dict[str, Any]:
    """Reads ``--algorithm``; the configuration's settings of the same algorithm hold unless they are given again."""
    import yaml

    try:
        spec = yaml.safe_load(text)
    except yaml.YAMLError:
        spec = None
    spec = {"name": spec} if isinstance(spec, str) else spec
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        raise click.UsageError(
            f"--algorithm {text!r}: a name or a mapping with a name is needed, as in '{{name: apo}}'"
        )
    own = configured if isinstance(configured, dict) and configured.get("name") == spec["name"] else {}
    return {**own, **spec}


def _labels(specs: Sequence[dict[str, Any]]) -> list[str]:
    """The names of the algorithms; variants of one are told apart by the settings in which they differ, or numbered."""
    labels: list[str] = []
    for spec in specs:
        same = [other for other in specs if other["name"] == spec["name"]]
        differing = {key: value for key, value in spec.items() if any(other.get(key) != value for other in same)}
        shown = ", ".join(f"{key}={value}" for key, value in differing.items())
        label = f"{spec['name']} ({shown})" if shown else str(spec["name"])
        labels.append(label if label not in labels else f"{label} #{len(labels) + 1}")
    return labels


def _load(document: Any, contestant: _Contestant, seed: int) -> tuple[Any, Any]:
    """Reads the configuration of one run and loads its parts."""
    from agentlightning_plugins.commands.configuration.assembly import load_parts
    from agentlightning_plugins.commands.configuration.config import read_config

    seeded = {"seed": seed} if contestant.takes("seed") else {}
    document.values |= {"algorithm": {**contestant.spec, **seeded}, "seed": seed}
    checked = read_config(document)
    return checked, load_parts(checked, document)


def _run_one(
    document: Any,
    contestant: _Contestant,
    seed: int,
    place: Path,
    tasks: Any,
    repetitions: int,
    budget: int | None,
    *,
    quiet: bool,
) -> None:
    from agentlightning_plugins.commands.configuration.assembly import fit, make_trainer
    from agentlightning_plugins.commands.evaluation.budget import Budgeted
    from agentlightning_plugins.commands.evaluation.eval_command import evaluate, failing_run

    checked, parts = _load(document, contestant, seed)
    parts, test = _hold_out(parts, tasks)
    limited = Budgeted(parts.components["algorithm"], budget)
    started = time.monotonic()
    components = {**parts.components, "algorithm": limited, "trackers": [] if quiet else ["console"]}
    own = dataclasses.replace(parts, components=components)
    trainer = make_trainer(checked, own, place, resume=False)
    with failing_run():
        fit(trainer, own)
    contestant.seconds.append(time.monotonic() - started)
    contestant.rollouts.append(limited.rollouts)
    learned = str(place) if limited.has_published else None
    score = evaluate(checked, parts, test, place / "test", {"repetitions": repetitions}, learned, True)
    contestant.scores.append(score)


def _show(contestants: list[_Contestant], as_json: bool) -> list[dict[str, Any]]:
    first, *others = contestants
    differences = [difference_over_seeds(contestant.by_task(), first.by_task()) for contestant in others]
    p_values = adjust_p_values([found.p_value for found in differences])
    rows: list[dict[str, Any]] = []
    for contestant, found, p_value in zip(contestants, (None, *differences), (None, *p_values), strict=True):
        score = contestant.pooled()
        low, high = score.interval() or (None, None)
        is_open = found is None or math.isinf(found.low)
        rows.append(
            {
                "algorithm": contestant.label,
                "reward": score.mean,
                "low": low,
                "high": high,
                "difference": found and found.mean,
                "difference_low": None if found is None or is_open else found.low,
                "difference_high": None if found is None or is_open else found.high,
                "p": p_value,
                "missing": score.missing,
                "rollouts": statistics.fmean(contestant.rollouts),
                "seconds": statistics.fmean(contestant.seconds),
            }
        )
    if as_json:
        print_json(rows)
        return rows
    print_table(
        ("algorithm", "reward", "95 % interval", "difference", "95 % interval", "p", "missing", "rollouts", "seconds"),
        [
            (
                row["algorithm"],
                f"{row['reward']:.3f}",
                "none" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}",
                "" if row["p"] is None else f"{row['difference']:+.3f}",
                _show_interval(row),
                "" if row["p"] is None else f"{row['p']:.3f}",
                str(row["missing"]),
                f"{row['rollouts']:.0f}",
                f"{row['seconds']:.1f}",
            )
            for row in rows
        ],
    )
    echo("\nfailed rollouts count as 0; those without a reward (missing) are left out")
    if len(first.scores) == 1:
        echo("one seed: intervals and p-values do not say what another training would give; use --seeds")
    return rows


def _show_interval(row: dict[str, Any]) -> str:
    if row["p"] is None:
        return ""
    return "none" if row["difference_low"] is None else f"{row['difference_low']:+.3f} to {row['difference_high']:+.3f}"
