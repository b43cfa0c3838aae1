"""Training with one algorithm or a sequence of algorithms, and the evaluation of the result on the test tasks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from agentlightning.algorithm.algorithm import Algorithm, RunContext
from agentlightning.cli import echo
from agentlightning.errors import ConfigError
from agentlightning.event import RolloutEnqueued
from agentlightning.resources import LLM, PromptTemplate, Resource
from agentlightning.run.thread import run_in_thread
from agentlightning.types import Dataset
from agentlightning_plugins.commands.evaluation.evaluate import evaluate
from agentlightning_plugins.shared.configuration.assembly import Parts, find_class, fit, load_parts, make_trainer
from agentlightning_plugins.shared.configuration.config import TrainConfig, read_config
from agentlightning_plugins.shared.configuration.document import ConfigDocument
from agentlightning_plugins.shared.configuration.run_directory import saved_weights, served_model
from agentlightning_plugins.shared.statistics.score import Score, count_failed_alike
from agentlightning_plugins.shared.terminal import failing_run

Spec = dict[str, Any]
"""An algorithm: its name and its settings."""


@dataclasses.dataclass
class Variant:
    """An algorithm, or a sequence of algorithms, with the results of each seed."""

    stages: Sequence[Spec]
    """The algorithms, each of which continues from the result of the previous one; if empty, nothing is trained."""
    label: str
    scores: list[Score] = dataclasses.field(default_factory=list)
    """Score of each seed on the test tasks after training."""
    rollouts: list[int] = dataclasses.field(default_factory=list)
    """Number of rollouts of each seed's training, including validation."""
    seconds: list[float] = dataclasses.field(default_factory=list)
    prompts: list[dict[str, str]] = dataclasses.field(default_factory=list)
    """Prompts that each seed used on the test tasks, by name."""
    places: list[Path] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        """The names of the algorithms, in a form that fits a directory name."""
        return "-".join(_to_folder(stage["name"]) for stage in self.stages) or "none"

    def by_task(self) -> list[dict[int, float]]:
        """Mean reward by seed and test task, without the tasks that have no reward."""
        return [{task: mean for task, mean in enumerate(score.by_task()) if mean is not None} for score in self.scores]

    def pooled(self) -> Score:
        """The score over all seeds."""
        scores = count_failed_alike(self.scores)
        outcomes = [
            [reward for score in scores for reward in score.outcomes[task]] for task in range(len(scores[0].outcomes))
        ]
        missing = sum(score.missing for score in scores)
        return Score(outcomes, missing=missing, failed_reward=scores[0].failed_reward)


@dataclasses.dataclass
class _Learned:
    """The result of the stages that have run so far."""

    resources: dict[str, Resource] = dataclasses.field(default_factory=dict)
    """The latest published resources, by name."""
    weights: Path | None = None
    """Directory of the last run that trained weights."""
    checkpoint: str | None = None
    """Checkpoint of these weights; None selects the best."""

    @contextlib.contextmanager
    def served(self) -> Iterator[dict[str, Resource]]:
        """Serves the trained model, if there is one, and yields the learned resources."""
        with served_model(self.weights, self.checkpoint, trust=True) as models:
            yield {**self.resources, **models}


def make_variants(texts: Sequence[str], configured: Any) -> list[Variant]:
    """Reads each ``--algorithm``, in YAML: a name, a mapping with a name, or a list of these.

    The settings of the configuration's algorithm are the defaults for algorithms of the same name.
    """
    chains = [_read_stages(text, configured) for text in texts]
    return [Variant(stages, label) for stages, label in zip(chains, _labels(chains), strict=True)]


def _read_stages(text: str, configured: Any) -> list[Spec]:
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError:
        given = None
    stages = []
    for each in given if isinstance(given, list) else [given]:
        spec = {"name": each} if isinstance(each, str) else each
        if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
            raise click.UsageError(
                f"--algorithm {text!r}: a name, a mapping with a name, or a list of these is needed, as in "
                "'{name: apo}' or '[apo, grpo]'"
            )
        own = configured if isinstance(configured, dict) and configured.get("name") == spec["name"] else {}
        stages.append({**own, **spec})
    return stages


def _labels(chains: Sequence[Sequence[Spec]]) -> list[str]:
    """Returns a label for each chain: its algorithms' names, with differing settings or a number if names repeat."""
    labels: list[str] = []
    for chain in chains:
        same = [other for other in chains if [spec["name"] for spec in other] == [spec["name"] for spec in chain]]
        parts = []
        for place, spec in enumerate(chain):
            differing = {key: v for key, v in spec.items() if any(other[place].get(key) != v for other in same)}
            shown = ", ".join(f"{key}={value}" for key, value in differing.items())
            parts.append(f"{spec['name']} ({shown})" if shown else str(spec["name"]))
        label = ", then ".join(parts) or "no training"
        labels.append(label if label not in labels else f"{label} #{len(labels) + 1}")
    return labels


def _to_folder(name: str) -> str:
    return re.sub(r"[^\w.-]", "-", name)


def takes(spec: Spec, setting: str) -> bool:
    """Returns whether an algorithm has this setting."""
    return setting in inspect.signature(find_class("algorithm", spec["name"])).parameters


@dataclasses.dataclass(frozen=True)
class Setup:
    """The settings that all variants of a comparison have in common."""

    document: ConfigDocument
    tasks: Dataset[Any] | None
    """The test tasks; None: half of ``data.val``."""
    repetitions: int
    budget: int | None
    """Maximum number of training rollouts of a variant."""
    quiet: bool

    def say(self, text: str) -> None:
        """Prints what is done next, unless the command prints JSON."""
        if not self.quiet:
            echo(f"== {text}", err=True)

    def load(self, spec: Spec | None, seed: int) -> tuple[TrainConfig, Parts]:
        """Reads the configuration with this algorithm, or without one, and loads its parts."""
        values = self.document.values
        values.pop("algorithm", None)
        values["seed"] = seed
        if spec is not None:
            values["algorithm"] = {**spec, "seed": seed} if takes(spec, "seed") else spec
        checked = read_config(self.document)
        return checked, load_parts(checked, self.document)

    def hold_out(self, parts: Parts) -> tuple[Parts, list[Any]]:
        """Returns the parts without test tasks in their data, and the test tasks."""
        tasks, first, stride = (parts.val, 1, 2) if self.tasks is None else (self.tasks, 0, 1)
        test = [] if tasks is None else [tasks[n] for n in range(first, len(tasks), stride)]
        if not test:
            raise ConfigError(
                "comparing needs test tasks: --test SOURCE, or at least two tasks in data.val to hold out half"
            )
        kept: dict[str, Any] = {}
        held_out = {repr(task) for task in test}
        for name, data in (("train", parts.train), ("val", parts.val)):
            kept[name] = data and [data[n] for n in range(len(data)) if repr(data[n]) not in held_out]
            if data and not kept[name]:
                raise ConfigError(
                    f"every task of data.{name} is also a test task, so none is left for the algorithm; select other "
                    "test tasks with --test"
                )
        return dataclasses.replace(parts, **kept), test


def run_variant(setup: Setup, variant: Variant, seed: int, place: Path) -> None:
    """Trains with the algorithms of a variant, evaluates the learned resources, and adds the results to the variant.

    The directory is ``place``; several algorithms have subdirectories. The budget holds for all of them together.
    """
    learned, rollouts, started = _Learned(), 0, time.monotonic()
    for number, spec in enumerate(variant.stages, start=1):
        own = place if len(variant.stages) == 1 else place / f"{number}-{_to_folder(spec['name'])}"
        setup.say(f"{variant.label}, seed {seed}: {own}")
        left = None if setup.budget is None else max(setup.budget - rollouts, 0)
        rollouts += _train(setup, spec, seed, own, left, learned)
    variant.seconds.append(time.monotonic() - started)
    variant.rollouts.append(rollouts)
    checked, parts = setup.load(None, seed)
    _, test = setup.hold_out(parts)
    setup.say(f"{variant.label}, seed {seed}: {len(test)} test tasks")
    with failing_run(), learned.served() as found:
        resources = {**(parts.resources or {}), **found}
        own_parts = dataclasses.replace(parts, resources=resources or None)
        score = evaluate(checked, own_parts, test, place / "test", {"repetitions": setup.repetitions}, quiet=True)
    variant.scores.append(score)
    variant.prompts.append({n: each.template for n, each in resources.items() if isinstance(each, PromptTemplate)})
    variant.places.append(place)


def _train(setup: Setup, spec: Spec, seed: int, place: Path, budget: int | None, learned: _Learned) -> int:
    """Runs one algorithm from ``learned``, adds its result to ``learned``, and returns its number of rollouts."""
    trains_weights = takes(spec, "model")
    if trains_weights and learned.weights is not None:
        spec = {**spec, "model": str(learned.weights)}
    checked, parts = setup.load(spec, seed)
    parts, _ = setup.hold_out(parts)
    limited = Budgeted(parts.components["algorithm"], budget)
    components = {**parts.components, "algorithm": limited, "trackers": [] if setup.quiet else ["console"]}
    before = contextlib.nullcontext(learned.resources) if trains_weights else learned.served()
    with failing_run(), before as found:
        resources = {**(parts.resources or {}), **found}
        own = dataclasses.replace(parts, components=components, resources=resources or None)
        fit(make_trainer(checked, own, place, resume=False), own)
    saved = saved_weights(place)
    if saved == []:  # it was stopped before it had learned anything
        return limited.rollouts
    learned.resources |= limited.resources
    if saved:
        # After a stop, the best weights may be the initial ones, which were validated before the first step.
        learned.weights, learned.checkpoint = place, "latest" if limited.was_stopped and "latest" in saved else None
    return limited.rollouts


class Budgeted(Algorithm):
    """Runs another algorithm, counts its rollouts and stops the algorithm when they exceed the budget."""

    def __init__(self, algorithm: Algorithm, budget: int | None) -> None:
        """Wraps an algorithm; a synchronous one cannot be stopped. A budget of None only counts rollouts."""
        self.algorithm = algorithm
        self.budget = budget
        self._counted: set[str] = set()
        self.was_stopped = False
        self.resources: dict[str, Resource] = {}
        """The run's latest resources, set when the algorithm has ended."""

    @property
    def rollouts(self) -> int:
        """Number of rollouts so far, without those in mode ``test``."""
        return len(self._counted)

    @property
    def default_adapter(self) -> str | None:  # type: ignore[override] # depends on the wrapped algorithm
        return self.algorithm.default_adapter

    @property
    def rollouts_at_once(self) -> int | None:  # type: ignore[override] # likewise
        return self.algorithm.rollouts_at_once

    @property
    def context(self) -> RunContext:
        return self.algorithm.context

    @context.setter
    def context(self, context: RunContext) -> None:
        self.algorithm.context = context

    def check_setup(self, context: RunContext) -> Sequence[LLM]:
        return self.algorithm.check_setup(context)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Runs the algorithm until it ends or exceeds its budget."""
        work = asyncio.ensure_future(self._work(train_dataset, val_dataset))
        counting = asyncio.create_task(self._count(work))
        await asyncio.sleep(0)  # lets it subscribe before the first rollout
        try:
            await work
        except asyncio.CancelledError:
            if self.budget is None or self.rollouts <= self.budget:
                raise
            self.was_stopped = True
        finally:
            counting.cancel()
            await asyncio.gather(counting, work, return_exceptions=True)
        # Events of the last rollouts may not have arrived yet; earlier rollouts may have been deleted.
        self._counted |= {each.rollout_id for each in await self.get_store().query_rollouts() if each.mode != "test"}
        latest = await self.get_store().get_latest_resources()
        self.resources = {} if latest is None else dict(latest.resources)

    async def _work(self, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None) -> None:
        algorithm = self.algorithm
        if not algorithm.is_async():
            await run_in_thread(lambda: algorithm.run(train_dataset, val_dataset), name="algorithm")
        elif (work := algorithm.run(train_dataset, val_dataset)) is not None:
            await work

    async def _count(self, work: asyncio.Future[None]) -> None:
        store = self.get_store()
        async for event in store.subscribe(["rollout_enqueued"]):
            if isinstance(event, RolloutEnqueued):
                rollout = await store.get_rollout_by_id(event.rollout_id)
                if rollout is None or rollout.mode != "test":
                    self._counted.add(event.rollout_id)
                if self.budget is not None and self.rollouts > self.budget:
                    work.cancel()
