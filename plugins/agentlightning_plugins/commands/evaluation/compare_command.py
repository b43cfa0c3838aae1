"""``agl compare``: compares algorithms on the same agent, data, seeds and budget."""

from __future__ import annotations

import dataclasses
import inspect
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from agentlightning.cli import print_table
from agentlightning.errors import ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning_plugins.commands.terminal import json_option, print_json
from agentlightning_plugins.statistics.score import Score


@dataclasses.dataclass
class _Contestant:
    """The results of one algorithm."""

    spec: dict[str, Any]
    label: str
    rewards: list[Sequence[Sequence[float]]] = dataclasses.field(default_factory=list)
    """Rewards on the test tasks after training, indexed by seed, task and repetition."""
    rollouts: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def takes(self, setting: str) -> bool:
        """Whether the algorithm has this setting."""
        return setting in inspect.signature(get_manager().get("algorithm", self.spec["name"])).parameters

    def by_task(self) -> list[list[float]]:
        """The rewards of each task over all seeds and repetitions."""
        return [[reward for seed in task for reward in seed] for task in zip(*self.rewards, strict=True)]


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
@click.option("--test", "test", metavar="SOURCE", help="The test tasks; default is data.val.")
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

    Each algorithm learns from data.train and data.val; its published resources are evaluated on the test tasks. The
    p-value is that of a paired permutation test over tasks against the first algorithm.
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
        if tasks is None and parts.val is None:
            raise ConfigError("comparing needs test tasks: data.val in the configuration, or --test SOURCE")
    directory = run_dir or choose_directory(None, "compare")
    for number, contestant in enumerate(contestants):
        for seed in chosen_seeds:
            place = directory / f"{number}-{contestant.spec['name']}-{seed}"
            if not as_json:
                click.echo(f"== {contestant.label}, seed {seed}: {place}", err=True)
            _run_one(document, contestant, seed, place, tasks, repetitions, budget, quiet=as_json)
    check_regression(_show(contestants, as_json), fail_if_worse)


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
    test = tasks if tasks is not None else parts.val
    algorithm = parts.components["algorithm"]
    # It stops its model server when it ends, so it evaluates the test tasks itself.
    keeps_model = contestant.takes("test_dataset")
    if keeps_model:
        algorithm.test_dataset = [test[index] for index in range(len(test)) for _ in range(repetitions)]
    limited = Budgeted(algorithm, budget)
    started = time.monotonic()
    components = {**parts.components, "algorithm": limited, "trackers": [] if quiet else ["console"]}
    own = dataclasses.replace(parts, components=components)
    trainer = make_trainer(checked, own, place, resume=False)
    with failing_run():
        fit(trainer, own)
    contestant.seconds.append(time.monotonic() - started)
    contestant.rollouts.append(limited.rollouts)
    if keeps_model:
        rewards = limited.test_rewards
        found = [rewards[start : start + repetitions] for start in range(0, len(rewards), repetitions)]
    else:
        learned = str(place) if limited.has_published else None
        found = evaluate(checked, parts, test, place / "test", {"repetitions": repetitions}, learned, True).rewards
    contestant.rewards.append(found)


def _show(contestants: list[_Contestant], as_json: bool) -> list[dict[str, Any]]:
    first = Score(contestants[0].by_task())
    rows: list[dict[str, Any]] = []
    for contestant in contestants:
        score = Score(contestant.by_task())
        low, high = score.interval()
        rows.append(
            {
                "algorithm": contestant.label,
                "reward": score.mean,
                "low": low,
                "high": high,
                "difference": score.mean - first.mean,
                "p": score.p_value(first) if rows else None,
                "rollouts": statistics.fmean(contestant.rollouts),
                "seconds": statistics.fmean(contestant.seconds),
            }
        )
    if as_json:
        print_json(rows)
        return rows
    print_table(
        ("algorithm", "reward", "95 % interval", "difference", "p", "rollouts", "seconds"),
        [
            (
                row["algorithm"],
                f"{row['reward']:.3f}",
                f"{row['low']:.3f} to {row['high']:.3f}",
                "" if row["p"] is None else f"{row['difference']:+.3f}",
                "" if row["p"] is None else f"{row['p']:.3f}",
                f"{row['rollouts']:.0f}",
                f"{row['seconds']:.1f}",
            )
            for row in rows
        ],
    )
    return rows
