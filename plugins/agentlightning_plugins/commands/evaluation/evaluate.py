"""``agl eval``: evaluates one agent on one dataset."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import click

from agentlightning.cli import echo
from agentlightning_plugins.shared.configuration.run_directory import learned_resources
from agentlightning_plugins.shared.rendering.text import print_table
from agentlightning_plugins.shared.statistics.score import FAILED, POWER, SampleSizePlan, Score, plan
from agentlightning_plugins.shared.terminal import failing_run, json_option, print_json


@click.command("eval")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--data", metavar="val|train|SOURCE", help="The tasks; default is data.val, else data.train.")
@click.option(
    "--repetitions", "-n", default=1, show_default=True, type=click.IntRange(min=1), help="Rollouts per task."
)
@click.option("--success", default=1.0, show_default=True, type=float, help="Smallest reward that counts as a success.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Time limit of a rollout."
)
@click.option("--resources", "learned", metavar="RUN_DIR|URL", help="Use the prompts and model that a run learned.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Keep the rollouts in this directory.")
@click.option("--fail-under", type=float, metavar="REWARD", help="Exit with 1 if the mean reward is lower.")
@click.option(
    "--confidence",
    type=click.FloatRange(0.5, 0.999),
    metavar="C",
    help="With --fail-under: exit with 1 unless the whole interval of this confidence is above, as in 0.95.",
)
@click.option(
    "--plan",
    "difference",
    type=click.FloatRange(min=0, min_open=True),
    metavar="DIFFERENCE",
    help="Print how many tasks and repetitions are needed to detect this difference between two agents.",
)
@click.option("--trust", is_flag=True, help="Read files of --resources that can run code: shards of verl.")
@json_option
def command(
    config: Path,
    overrides: tuple[str, ...],
    data: str | None,
    repetitions: int,
    success: float,
    timeout_s: float | None,
    learned: str | None,
    trust: bool,
    run_dir: Path | None,
    fail_under: float | None,
    confidence: float | None,
    difference: float | None,
    as_json: bool,
) -> None:
    """Evaluate the agent of CONFIG: mean reward with its 95 % interval, pass@k, errors.

    The exit code is 1 if no rollout succeeded, or if the mean reward (with --confidence, the lower end of its interval)
    is less than --fail-under, else 0.
    """
    if confidence is not None and fail_under is None:
        raise click.UsageError("--confidence belongs to --fail-under REWARD")
    from agentlightning_plugins.shared.configuration.assembly import load_parts
    from agentlightning_plugins.shared.configuration.config import read_config
    from agentlightning_plugins.shared.configuration.document import enter_folder, read_with_overrides
    from agentlightning_plugins.shared.configuration.sources import load_dataset

    document = read_with_overrides(config, overrides)
    from_start = enter_folder(config)
    document.values.pop("algorithm", None)  # evaluation ignores the training algorithm
    checked = read_config(document)
    parts = load_parts(checked, document)
    own_data = {"val": parts.val, "train": parts.train, None: parts.train if parts.val is None else parts.val}
    chosen = own_data[data] if data in own_data else load_dataset(from_start(str(data)))
    if chosen is None:
        raise click.UsageError(f"{config} has no data.{data or 'val'}; add it, or use --data SOURCE")
    if difference is not None and len(chosen) < 2:
        raise click.UsageError(f"--plan needs at least two tasks, but there is {len(chosen)}")
    settings = {"repetitions": repetitions, "success_threshold": success, "rollout_timeout_s": timeout_s}
    learned = learned and from_start(learned)
    with tempfile.TemporaryDirectory() as scratch, failing_run(), learned_resources(learned, trust=trust) as found:
        directory = Path(scratch) / "eval" if run_dir is None else Path(from_start(str(run_dir)))
        resources = {**(parts.resources or {}), **found}
        own = dataclasses.replace(parts, resources=resources or None)
        score = evaluate(checked, own, chosen, directory, settings, quiet=as_json)
    metrics = score.to_metrics()
    plans = [] if difference is None else plan(score, difference)
    if as_json:
        print_json({**metrics, **({"plan": [dataclasses.asdict(each) for each in plans]} if plans else {})})
    else:
        _print_score(metrics)
        if difference is not None:
            _print_plan(plans, difference, is_repeated=repetitions > 1)
    if fail_under is not None and metrics["reward"] < fail_under:
        raise click.ClickException(
            f"the mean reward {metrics['reward']:.3f} is less than {fail_under:g} (--fail-under)"
        )
    if fail_under is not None and confidence is not None:
        _check_interval(score, fail_under, confidence)
    if score.errors.total() == metrics["rollouts"]:
        raise SystemExit(1)


def evaluate(config: Any, parts: Any, dataset: Any, directory: Path, settings: dict[str, Any], *, quiet: bool) -> Any:
    """Runs the algorithm ``evaluation`` with these settings in a directory, and returns its score."""
    from agentlightning.plugin.registry import get_manager
    from agentlightning_plugins.shared.configuration.assembly import fit, make_trainer

    components = {key: value for key, value in parts.components.items() if key not in ("algorithm", "trackers")}
    algorithm = get_manager().create("algorithm", {"name": "evaluation", **settings})
    components |= {"algorithm": algorithm, "trackers": [] if quiet else [{"name": "console", "brief": True}]}
    own = dataclasses.replace(parts, train=None, val=dataset, components=components)
    fit(make_trainer(config, own, directory, resume=False), own)
    return algorithm.score


def _check_interval(score: Score, least: float, confidence: float) -> None:
    """Raises ClickException if the interval of the mean reward is not above ``least``."""
    interval, needed = score.interval(confidence), score.tasks_for(least, confidence)
    if interval is not None and interval[0] >= least:
        return
    low = "there is no interval from these rewards"
    if interval is not None:
        low = f"the lower end {interval[0]:.3f} of the {confidence:.4g} interval is less than {least:g}"
    more = "no number of tasks is enough" if needed is None else f"about {needed} tasks with these results are needed"
    raise click.ClickException(f"{low} (--fail-under, --confidence); {more}")


def _print_score(metrics: dict[str, float]) -> None:
    interval = "no interval from these rewards"
    if "reward_low" in metrics:
        interval = f"95 % interval [{metrics['reward_low']:.3f}, {metrics['reward_high']:.3f}]"
    elif metrics["tasks"] == 1:
        interval = "no interval from one task"
    echo(f"reward   {metrics['reward']:.3f}  {interval}")
    for name, value in metrics.items():
        if name.startswith("pass@"):
            echo(f"{name:<8} {value:.3f}")
    echo(f"{metrics['tasks']:.0f} tasks, {metrics['rollouts']:.0f} rollouts; {FAILED}")
    if "missing" in metrics:
        echo(f"{metrics['missing']:.0f} rollouts without a reward, excluded")
    for name, value in metrics.items():
        if name.startswith("errors/"):
            echo(f"{value:.0f} failed: {name.removeprefix('errors/')}")


def _print_plan(plans: list[SampleSizePlan], difference: float, *, is_repeated: bool) -> None:
    conditions = f"(power {POWER * 100:.0f} %, level 5 %)"
    echo(f"\ntasks needed to detect a difference of {difference:g} between two agents {conditions}:")
    rows = [(each.repetitions, each.same_tasks, each.other_tasks) for each in plans]
    print_table(("repetitions", "same tasks", "different tasks"), rows)
    echo("assuming the same difference on every task; more tasks are needed if it varies")
    if not is_repeated:
        echo(
            "with one repetition the variance within a task is unknown, so the worst case is assumed; "
            "measure it with -n 2 or more"
        )
