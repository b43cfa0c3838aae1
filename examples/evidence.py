"""Shows whether an example learns: several seeds, two controls, a test split used only before and after training.

    python -m examples.evidence math --out runs/evidence --seeds 0 1 2 3 4

Each variant runs with each seed and the example's own train.yaml:

    trained    the training as configured
    shuffled   the rewards of a step are exchanged between its rollouts at random: shows what training does when
               rewards carry no information
    frozen     a learning rate of 1e-30, which changes no weight: shows how much the reward varies by chance

A finished run is not repeated. The script prints a table of all runs below OUT and writes it to OUT/EXAMPLE.md, and
the curves to OUT/EXAMPLE.svg.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import psutil

from agentlightning_algorithms.shared.advantage import Scored, compute_advantages
from agentlightning_plugins.shared.configuration.assembly import fit, load_parts, make_trainer
from agentlightning_plugins.shared.configuration.config import read_config
from agentlightning_plugins.shared.configuration.document import read_with_overrides
from agentlightning_plugins.shared.configuration.sources import load_attribute

VARIANTS: dict[str, tuple[str, ...]] = {
    "trained": (),
    "shuffled": (
        "algorithm.experience.estimator=examples.evidence.shuffled",
        "algorithm.experience.keep_flat_groups=true",
    ),
    "frozen": ("algorithm.update.lr=1.0e-30",),
}
COLOURS = {"trained": "#2f6fed", "shuffled": "#d9480f", "frozen": "#868e96"}
STUDENT_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantile .975 of Student's t by degrees of freedom, from 1."""
PROCESSES = {
    "agentlightning_algorithms.shared.policy.server": "sampler",
    "agentlightning_plugins.gateway.launch": "gateway",
    "agentlightning_plugins.shared.processes.job_process": "agent",
}
"""Purpose of a process, by a part of its command line; the main process holds the store and updates the weights."""
WIDTH, HEIGHT, MARGIN = 720, 300, 44

Step = dict[str, Any]


def shuffled(items: Sequence[Scored], *, std_floor: float) -> list[float]:
    """The estimator ``grpo`` on rewards that are exchanged between all rollouts of a step at random."""
    rewards: dict[Any, float] = {item.rollout: item.value for item in items}
    values = list(rewards.values())
    random.Random(repr(values)).shuffle(values)
    exchanged = dict(zip(rewards, values, strict=True))
    return compute_advantages([item._replace(value=exchanged[item.rollout]) for item in items], std_floor=std_floor)


def run(example: str, variant: str, seed: int, directory: Path, options: Sequence[str], tests: int | None) -> None:
    """Trains a variant in ``directory`` with the example's configuration and writes ``seconds.json``.

    A run that was interrupted is resumed; its ``seconds.json`` is empty, because the earlier time is unknown.
    """
    folder, directory = Path(__file__).parent / example, directory.absolute()
    overrides = (f"seed={seed}", "trackers=[jsonl]", *VARIANTS[variant], *options)
    document = read_with_overrides(folder / "train.yaml", overrides)
    config = read_config(document)
    started, is_resumed = time.monotonic(), (directory / "run.json").exists()
    with chdir(folder), measured_cpu() as seconds:  # the configuration's paths start there
        parts = load_parts(config, document)
        parts.components["algorithm"].test_dataset = load_attribute(f"examples.{example}.problems:test")()[:tests]
        fit(make_trainer(config, parts, directory, resume=is_resumed), parts)
    seconds = {} if is_resumed else {**seconds, "wall": time.monotonic() - started}
    (directory / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")


@contextmanager
def measured_cpu() -> Iterator[dict[str, float]]:
    """Yields a dict that is filled at the end with the CPU seconds of this process and its children, by purpose."""
    own = psutil.Process()
    before = sum(own.cpu_times()[:2])
    seen: dict[int, tuple[str, float]] = {}
    stopped = threading.Event()

    def watch() -> None:
        is_last = False
        while not is_last:
            is_last = stopped.wait(0.5)
            for child in own.children(recursive=True):
                try:
                    line = " ".join(child.cmdline())
                    if not line:  # as of a process that is freeing its memory at its end
                        continue
                    kind = next((kind for part, kind in PROCESSES.items() if part in line), "other")
                    seen[child.pid] = kind, sum(child.cpu_times()[:2])
                except psutil.Error:  # it has ended
                    continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    seconds: dict[str, float] = {}
    try:
        yield seconds
    finally:
        stopped.set()
        watcher.join()
    spent: Counter[str] = Counter()
    for kind, used in seen.values():
        spent[kind] += round(used, 2)  # type: ignore[assignment]
    seconds |= {**spent, "main": round(sum(own.cpu_times()[:2]) - before, 2)}


def read_steps(directory: Path) -> list[Step]:
    """Returns the metrics of each step of a run; the last line of a step counts."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = {entry["step"]: entry for entry in map(json.loads, lines) if "step" in entry}
    return [steps[step] for step in sorted(steps)]


def read_runs(out: Path) -> dict[str, dict[int, list[Step]]]:
    """Returns the steps of all runs that have ended, by variant and seed."""
    runs: dict[str, dict[int, list[Step]]] = {}
    for variant in VARIANTS:
        for directory in sorted(out.glob(f"{variant}-*")):
            if (directory / "seconds.json").exists():
                runs.setdefault(variant, {})[int(directory.name.rpartition("-")[2])] = read_steps(directory)
    return runs


def test_rewards(steps: Sequence[Step]) -> tuple[float, float]:
    """Mean greedy reward on the test split before the first step and after the last one."""
    found = [step["test_reward"] for step in steps if "test_reward" in step]
    return found[0], found[-1]


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half of its 95 % interval over seeds, by Student's t; infinite for one seed."""
    if len(values) < 2:
        return values[0], float("inf")
    half = STUDENT_T[min(len(values) - 1, len(STUDENT_T)) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), half


def describe(runs: Mapping[str, Mapping[int, list[Step]]], seconds: Mapping[str, float], command: str) -> str:
    """Returns the table, the verdict, and where the time of a trained run went, in Markdown."""
    lines = [
        "| variant | seeds | test reward before | after, 95 % interval over seeds | each seed |",
        "|---|---|---|---|---|",
    ]
    after: dict[str, list[float]] = {}
    for variant, by_seed in runs.items():
        pairs = [test_rewards(steps) for steps in by_seed.values()]
        after[variant] = [pair[1] for pair in pairs]
        mean, half = mean_and_interval(after[variant])
        interval = "" if half == float("inf") else f" ± {half:.3f}"
        each = ", ".join(f"{value:.3f}" for value in after[variant])
        before = statistics.fmean(pair[0] for pair in pairs)
        lines.append(f"| {variant} | {len(pairs)} | {before:.3f} | {mean:.3f}{interval} | {each} |")
    controls = [value for variant, values in after.items() if variant != "trained" for value in values]
    if controls and len(after.get("trained", ())) > 1:
        gap, half = min(after["trained"]) - max(controls), mean_and_interval(after["trained"])[1]
        word = "more" if gap > half else "**not more**"
        lines += [
            "",
            f"The worst trained seed is {gap:.3f} above the best control, {word} than the interval ({half:.3f}).",
        ]
    if seconds:
        parts = {name: value for name, value in seconds.items() if name not in ("wall", "update")}
        shares = ", ".join(f"{name} {value:.0f}" for name, value in sorted(parts.items(), key=lambda part: -part[1]))
        text = (
            f"CPU seconds of a trained run (mean): {shares}; {seconds['update']:.0f} of those of main are the update."
        )
        lines += ["", f"{text} Wall time: {seconds['wall']:.0f} s."]
    return "\n".join([*lines, "", f"    {command}", ""])


def mean_seconds(out: Path, runs: Mapping[str, Mapping[int, list[Step]]]) -> dict[str, float]:
    """Mean CPU seconds of the trained runs, by purpose, with wall time and the seconds of updates."""
    found: list[dict[str, float]] = []
    for seed, steps in runs.get("trained", {}).items():
        seconds = json.loads((out / f"trained-{seed}" / "seconds.json").read_text(encoding="utf-8"))
        if seconds:
            found.append({**seconds, "update": sum(step.get("train_s", 0.0) for step in steps)})
    return {name: statistics.fmean(run.get(name, 0.0) for run in found) for name in (found[0] if found else ())}


def draw(runs: Mapping[str, Mapping[int, list[Step]]]) -> str:
    """Returns the curves of validation rewards, and the test rewards at the ends as dots, as SVG."""
    last = max(step["step"] for by_seed in runs.values() for steps in by_seed.values() for step in steps) or 1

    def x(step: Step) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * float(step["step"]) / last

    def y(value: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        'font-size="12" fill="#868e96">'
    ]
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts.append(f'<path d="M{MARGIN} {y(tick):.1f}H{WIDTH - MARGIN}" stroke="#868e96" opacity="0.3"/>')
        parts.append(f'<text x="{MARGIN - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    for place, (variant, by_seed) in enumerate(runs.items()):
        colour = COLOURS[variant]
        for steps in by_seed.values():
            line = " ".join(f"{x(step):.1f},{y(step['val_reward']):.1f}" for step in steps if "val_reward" in step)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            dots = [(x(step), y(step["test_reward"])) for step in steps if "test_reward" in step]
            parts += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="{colour}"/>' for across, down in dots]
        parts.append(f'<text x="{MARGIN + 90 * place}" y="{HEIGHT - 6}" fill="{colour}">{variant}</text>')
    caption = f"greedy reward over {last} steps: lines validation, dots test"
    parts.append(f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 6}" text-anchor="end">{caption}</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> None:
    """Runs what is missing, then writes the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", help="a folder of examples/ with train.yaml and problems.py")
    parser.add_argument("--out", type=Path, default=Path("runs/evidence"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--tests", type=int, help="number of test problems to use")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings for all variants")
    options = parser.parse_args()
    out = options.out / options.example
    for seed in options.seeds:
        for variant in options.variants:
            directory = out / f"{variant}-{seed}"
            if not (directory / "seconds.json").exists():
                run(options.example, variant, seed, directory, options.set, options.tests)
            before, after = test_rewards(read_steps(directory))
            print(f"{variant}, seed {seed}: test reward {before:.3f} before, {after:.3f} after", flush=True)
    runs = read_runs(out)
    command = f"python -m examples.evidence {shlex.join(sys.argv[1:])}"
    text = describe(runs, mean_seconds(out, runs), command)
    (options.out / f"{options.example}.md").write_text(text, encoding="utf-8")
    (options.out / f"{options.example}.svg").write_text(draw(runs), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
