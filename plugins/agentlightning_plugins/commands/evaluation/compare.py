"""``agl compare``: compares algorithms, prompts, or groups of recorded rollouts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentlightning.cli import echo
from agentlightning.errors import ConfigError
from agentlightning.resources import PromptTemplate
from agentlightning_plugins.shared.rendering.text import print_table
from agentlightning_plugins.shared.terminal import (
    StoreCommand,
    failing_run,
    json_option,
    json_or_text,
    print_json,
    run_option,
    store_option,
    use_store,
)

if TYPE_CHECKING:
    from agentlightning_plugins.commands.evaluation.variant import Setup, Variant


@click.command("compare", cls=StoreCommand)
@click.argument("sources", nargs=-1, required=True, metavar="{CONFIG [KEY=VALUE]... | CONTROL TREATMENT}")
@click.option(
    "--algorithm",
    "-a",
    "algorithms",
    multiple=True,
    metavar="YAML",
    help="A name, '{name: ..., setting: ...}', or a list of these, each of which continues from the result of the "
    "previous one; [] trains nothing. May be repeated; the first is the baseline of the comparison. An algorithm that "
    "CONFIG configures keeps its settings from there unless they are given here.",
)
@click.option(
    "--prompt",
    "-p",
    "prompts",
    multiple=True,
    metavar="TEXT|@FILE",
    help="Compare texts of a prompt without training; may be repeated. NAME=TEXT if CONFIG has several prompts.",
)
@click.option(
    "--fail-if-worse", is_flag=True, help="Exit with 1 if any is worse than the first, with a p-value below 0.05."
)
@click.option("--seeds", default="0", show_default=True, help="Comma-separated; each algorithm runs once per seed.")
@click.option(
    "--repetitions", "-n", default=1, show_default=True, type=click.IntRange(min=1), help="Rollouts per test task."
)
@click.option("--budget", type=click.IntRange(min=1), metavar="N", help="Maximum number of training rollouts.")
@click.option("--test", "test", metavar="SOURCE", help="The test tasks; default is half of data.val.")
@click.option("--run-dir", type=click.Path(), help="Directory of the runs; default runs/compare-<n>.")
@store_option
@run_option
@json_option
def command(
    sources: tuple[str, ...],
    algorithms: tuple[str, ...],
    prompts: tuple[str, ...],
    fail_if_worse: bool,
    seeds: str,
    repetitions: int,
    budget: int | None,
    test: str | None,
    run_dir: str | None,
    where: str | None,
    run: str | None,
    as_json: bool,
) -> None:
    """Compare several algorithms or prompts for the agent of CONFIG, or two groups of recorded rollouts.

    With -a, each algorithm learns from data.train and data.val; its published resources are evaluated on the test
    tasks, which are not used in training: without --test, every second task of data.val is held out, and test tasks are
    removed from data.train and data.val. Differences are relative to the first algorithm, paired by task. With several
    seeds, the result also accounts for the variation between seeds; with one, it holds for this one training. P-values
    are adjusted for the number of algorithms (Holm). With -p, the agent runs with each text on all test tasks, data.val
    by default. The comparison is written to report.html in the directory of the runs.

    Without -a and -p, CONTROL and TREATMENT each select rollouts of a store by group name (`group` of the metadata), by
    other metadata, as in `variant=b`, or by resources: a snapshot or one version of it, as in `rs-1@3`. Failed rollouts
    count as 0, or as the lowest reward if that is negative; rollouts without a reward are excluded.
    """
    from agentlightning_plugins.commands.evaluation.comparison_report import check_regression
    from agentlightning_plugins.commands.evaluation.variant import Setup
    from agentlightning_plugins.shared.configuration.document import enter_folder, read_with_overrides
    from agentlightning_plugins.shared.configuration.run_directory import choose_directory
    from agentlightning_plugins.shared.configuration.sources import load_dataset

    if not algorithms and not prompts and len(sources) == 2 and not Path(sources[0]).is_file():
        rows = _compare_recorded(*sources, where, run, as_json)
    elif bool(algorithms) == bool(prompts):
        raise click.UsageError(
            "give CONFIG with algorithms (-a) or texts of a prompt (-p) to compare, or two groups of rollouts"
        )
    else:
        document = read_with_overrides(Path(sources[0]), sources[1:])
        from_start = enter_folder(Path(sources[0]))
        tasks = None if test is None else load_dataset(from_start(test))
        setup = Setup(document, tasks, repetitions, budget, quiet=as_json)
        make_directory = functools.partial(choose_directory, run_dir, "compare", from_start)
        if prompts:
            directory, variants = _run_prompts(setup, prompts, make_directory, from_start)
        else:
            directory, variants = _run_algorithms(setup, algorithms, seeds, make_directory)
        rows = _show(directory, variants, as_json)
    if fail_if_worse:
        check_regression(rows)


def _show(directory: Path, variants: list[Variant], as_json: bool) -> list[dict[str, Any]]:
    """Prints and writes the comparison, and returns its rows."""
    from agentlightning_plugins.commands.evaluation.comparison_report import (
        compare_variants,
        print_comparison,
        write_comparison,
    )

    rows = compare_variants(variants)
    page = write_comparison(variants, rows, directory)
    if as_json:
        print_json(rows)
    else:
        print_comparison(variants, rows)
        echo(f"report: {page}")
    return rows


def _run_algorithms(
    setup: Setup, algorithms: tuple[str, ...], seeds: str, make_directory: Callable[[], Path]
) -> tuple[Path, list[Variant]]:
    """Trains with each algorithm and evaluates the results; returns the directory of the runs and the results."""
    from agentlightning_plugins.commands.evaluation.variant import make_variants, run_variant
    from agentlightning_plugins.shared.configuration.assembly import check_setup

    variants = make_variants(algorithms, setup.document.values.get("algorithm"))
    try:
        chosen_seeds = [int(text) for text in seeds.split(",")]
    except ValueError:
        raise click.UsageError(f"--seeds {seeds}: numbers separated by commas are needed, as in 0,1,2") from None
    for variant in variants:  # check every algorithm before the first one trains
        stages: list[Any] = [*variant.stages] or [None]
        for spec in stages:
            checked, parts = setup.load(spec, chosen_seeds[0])
            if spec is not None:
                check_setup(checked, parts)
            setup.hold_out(parts)
    directory = make_directory()
    for number, variant in enumerate(variants):
        for seed in chosen_seeds:
            run_variant(setup, variant, seed, directory / f"{number}-{variant.name}-{seed}")
    return directory, variants


def _run_prompts(
    setup: Setup, texts: tuple[str, ...], make_directory: Callable[[], Path], from_start: Callable[[str], str]
) -> tuple[Path, list[Variant]]:
    """Evaluates the agent with each text, without training; returns the directory of the runs and the results."""
    from agentlightning_plugins.commands.evaluation.evaluate import evaluate
    from agentlightning_plugins.commands.evaluation.variant import Variant

    checked, parts = setup.load(None, setup.document.values.get("seed", 0))
    tasks = next((each for each in (setup.tasks, parts.val, parts.train) if each is not None), None)
    if tasks is None:
        raise ConfigError("comparing needs test tasks: data.val in the configuration, or --test SOURCE")
    prompts = [_read_prompt(text, parts, from_start) for text in texts]
    directory = make_directory()
    variants = []
    for number, (label, name, prompt) in enumerate(prompts):
        place = directory / f"{number}-{name}"
        setup.say(f"{label}: {place}")
        own = dataclasses.replace(parts, resources={**(parts.resources or {}), name: prompt})
        with failing_run():
            score = evaluate(checked, own, tasks, place, {"repetitions": setup.repetitions}, quiet=setup.quiet)
        variants.append(Variant([], label, [score], [0], [0.0], [{name: prompt.template}], [place]))
    return directory, variants


def _read_prompt(text: str, parts: Any, from_start: Callable[[str], str]) -> tuple[str, str, PromptTemplate]:
    """Returns the label of a ``--prompt``, the name of its resource, and the prompt, with the configured engine."""
    from agentlightning.litagent.function import first_resources

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
            value = Path(from_start(value[1:])).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt {text}: the file cannot be read: {error}") from error
    return label, name, PromptTemplate(value, own[name].engine)


def _compare_recorded(
    control: str, treatment: str, where: str | None, run: str | None, as_json: bool
) -> list[dict[str, Any]]:
    """Compares two groups of recorded rollouts, prints the result, and returns a row for each group."""
    from agentlightning_plugins.shared.statistics.comparison import compare_rollouts
    from agentlightning_plugins.shared.statistics.score import FAILED

    sides = _read_group(control), _read_group(treatment)
    found = use_store(where, run, lambda store: compare_rollouts(store, *sides))
    groups = {"control": found.control, "treatment": found.treatment}
    low, high = (value if math.isfinite(value) else None for value in (found.low, found.high))
    if as_json:
        counted = ("name", "mean", "n", "failed", "unrated", "unfinished")
        shown: dict[str, Any] = {
            name: {**{key: getattr(group, key) for key in counted}, "tasks": len(group.rewards)}
            for name, group in groups.items()
        }
        shown |= {key: getattr(found, key) for key in ("difference", "p_value", "paired", "dropped")}
        print_json({**shown, "low": low, "high": high})
    else:
        print_table(
            ("", "rollouts", "mean reward", "n", "failed", "without reward", "not finished"),
            [
                (name, group.name, f"{group.mean:.3f}", group.n, group.failed, group.unrated, group.unfinished)
                for name, group in groups.items()
            ],
        )
        how = "independent groups"
        if found.paired:
            how = "paired by task" + (f", {found.dropped} tasks of one group excluded" if found.dropped else "")
        elif found.control.has_users or found.treatment.has_users:
            how = f"{len(found.control.rewards)} against {len(found.treatment.rewards)} users"
        interval = "no interval" if low is None else f"95 % interval [{found.low:+.3f}, {found.high:+.3f}]"
        echo(f"\ndifference {found.difference:+.3f}  {interval}  p = {found.p_value:.2g}  ({how})")
        echo(f"{FAILED}; rollouts without a reward are excluded")
    return [{}, {"label": found.treatment.name, "difference": found.difference, "p": found.p_value}]


def _read_group(text: str) -> str | dict[str, Any]:
    """Parses the argument for a group. Metadata values are parsed as JSON if possible: ``step=3`` is a number."""
    key, sign, value = text.partition("=")
    return {key: json_or_text(value)} if sign else text
