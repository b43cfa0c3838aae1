"""``agl compare``: compares algorithms, prompts, or groups of recorded rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from agentlightning.cli import echo
from agentlightning_plugins.shared.terminal import json_option, print_json, run_option, store_option


@click.command("ab", hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1)
def renamed(arguments: tuple[str, ...]) -> None:
    """Name the command that compares groups of rollouts."""
    raise click.UsageError("there is no `agl ab`; `agl compare CONTROL TREATMENT` compares two groups of rollouts")


@click.command("compare")
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
@click.option("--run-dir", type=click.Path(path_type=Path), help="Directory of the runs; default runs/compare-<n>.")
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
    run_dir: Path | None,
    where: str | None,
    run: str | None,
    as_json: bool,
) -> None:
    """Compare several algorithms or prompts for the agent of CONFIG, or two groups of recorded rollouts.

    With -a, each algorithm learns from data.train and data.val; its published resources are evaluated on the test
    tasks, which are not used in training: without --test, every second task of data.val is held out, and test tasks are
    removed from data.train and data.val. Differences are relative to the first algorithm, paired by task. With several
    seeds, the result also accounts for the variation between seeds; with one, it holds for this one training. P-values
    are adjusted for the number of algorithms (Holm). The comparison is written to report.html in the directory of the
    runs.

    Without -a and -p, CONTROL and TREATMENT each select rollouts of a store by group name (`group` of the metadata), by
    other metadata, as in `variant=b`, or by resources: a snapshot or one version of it, as in `rs-1@3`. Failed rollouts
    count as 0; rollouts without a reward are excluded.
    """
    from agentlightning_plugins.commands.evaluation.comparison_report import check_regression
    from agentlightning_plugins.commands.evaluation.group_comparison import compare_recorded
    from agentlightning_plugins.commands.evaluation.prompt_comparison import compare_prompts
    from agentlightning_plugins.shared.configuration.document import read_with_overrides

    if not algorithms and not prompts and len(sources) == 2 and not Path(sources[0]).is_file():
        rows = compare_recorded(*sources, where, run, as_json)
    elif bool(algorithms) == bool(prompts):
        raise click.UsageError(
            "give CONFIG with algorithms (-a) or texts of a prompt (-p) to compare, or two groups of rollouts"
        )
    elif prompts:
        document = read_with_overrides(Path(sources[0]), sources[1:])
        rows = compare_prompts(document, prompts, test, repetitions, run_dir, as_json)
    else:
        document = read_with_overrides(Path(sources[0]), sources[1:])
        rows = _compare_algorithms(document, algorithms, test, seeds, repetitions, budget, run_dir, as_json)
    if fail_if_worse:
        check_regression(rows)


def _compare_algorithms(
    document: Any,
    algorithms: tuple[str, ...],
    test: str | None,
    seeds: str,
    repetitions: int,
    budget: int | None,
    run_dir: Path | None,
    as_json: bool,
) -> list[dict[str, Any]]:
    """Trains with each algorithm, prints and writes the comparison of the results, and returns its rows."""
    from agentlightning_plugins.commands.evaluation.comparison_report import (
        compare_variants,
        print_comparison,
        write_comparison,
    )
    from agentlightning_plugins.commands.evaluation.variant import hold_out, load, make_variants, run_variant
    from agentlightning_plugins.shared.configuration.assembly import check_setup
    from agentlightning_plugins.shared.configuration.dataset import load_dataset
    from agentlightning_plugins.shared.configuration.run_directory import choose_directory

    variants = make_variants(algorithms, document.values.get("algorithm"))
    tasks = None if test is None else load_dataset(test)
    try:
        chosen_seeds = [int(text) for text in seeds.split(",")]
    except ValueError:
        raise click.UsageError(f"--seeds {seeds}: numbers separated by commas are needed, as in 0,1,2") from None
    for variant in variants:  # check every algorithm before the first one trains
        stages: list[Any] = [*variant.stages] or [None]
        for spec in stages:
            checked, parts = load(document, spec, chosen_seeds[0])
            if spec is not None:
                check_setup(checked, parts)
            hold_out(parts, tasks)
    directory = run_dir or choose_directory(None, "compare")
    for number, variant in enumerate(variants):
        for seed in chosen_seeds:
            place = directory / f"{number}-{variant.name}-{seed}"
            run_variant(document, variant, seed, place, tasks, repetitions, budget, quiet=as_json)
    rows = compare_variants(variants)
    page = write_comparison(variants, rows, chosen_seeds, directory)
    if as_json:
        print_json(rows)
    else:
        print_comparison(rows, len(chosen_seeds))
        echo(f"report: {page}")
    return rows
