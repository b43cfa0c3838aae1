"""Conformance tests for algorithms.

Use them like this::

    class TestMyAlgorithm(AlgorithmConformance):
        bad_settings = [{"rounds": 0}]

        @pytest.fixture
        def make_algorithm(self):
            return MyAlgorithm
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle

from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.errors import ConfigError, LightningError
from agentlightning.records import Metrics
from agentlightning.resources import PromptTemplate, Resource, read_resources
from agentlightning.runner import Hook
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.testing import promised, refusal
from agentlightning.trainer import Trainer

__all__ = ["AlgorithmConformance"]


def rate_prompt(task: Any, prompt: PromptTemplate) -> float:
    """The kit's agent: its reward depends on task and prompt."""
    return (int(task) * 7 + len(prompt.template)) % 10 / 10


def return_nothing(task: Any) -> None:
    """An agent without rewards."""


def raise_an_error(task: Any) -> float:
    """An agent that always fails."""
    raise RuntimeError("this agent always fails")


class KillAfter(Hook):
    """Kills its process after some rollouts, when no attempt is running."""

    def __init__(self, rollouts: int) -> None:
        self._left = rollouts

    async def on_rollout_end(self, **given: Any) -> None:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(kw_only=True)
class Training:
    """One run of an algorithm; it travels to the process that is killed."""

    make_algorithm: Callable[..., Algorithm]
    agent: Any
    tasks: tuple[Any, Any]
    resources: Mapping[str, Resource | str] | None
    directory: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def fit(
        self, *, resume: bool = False, kill_after: int | None = None, store: LightningStore | None = None
    ) -> tuple[Algorithm, str]:
        """Trains and returns the algorithm and the status of the run."""
        algorithm = self.make_algorithm(**self.settings)
        trainer = Trainer(
            algorithm=algorithm,
            store=store,
            strategy="shm",
            tracer="dummy",
            trackers=[],
            run_dir=self.directory,
            resume=resume,
            initial_resources=self.resources,
            max_concurrency=1,
            hooks=None if kill_after is None else KillAfter(kill_after),
        )
        return algorithm, trainer.fit(self.agent, *self.tasks).status


async def read_result(store: LightningStore) -> tuple[list[Metrics], Mapping[str, Resource], int]:
    """Returns the metrics of a run, its latest resources and the number of its rollouts, and closes the store."""
    latest = await store.get_latest_resources()
    steps, rollouts = await store.query_metrics(), await store.query_rollouts(limit=1)
    await store.close()
    return list(steps), {} if latest is None else latest.resources, rollouts.total


class AlgorithmConformance:
    """Tests that every algorithm must pass.

    Subclass it and define one fixture, ``make_algorithm``: a function of settings that returns a new algorithm, which
    trains in seconds with its defaults. It can be pickled (a class, or a function of a module). The attributes below
    fit an algorithm that needs tasks and a prompt.
    """

    agent: ClassVar[Any] = staticmethod(rate_prompt)
    train_dataset: ClassVar[Sequence[Any] | None] = [1, 2, 3, 4]
    val_dataset: ClassVar[Sequence[Any] | None] = [5, 6]
    initial_resources: ClassVar[Mapping[str, Resource | str] | None] = {"prompt": "Answer {task}.", "other": "Stays."}
    bad_settings: ClassVar[Sequence[Mapping[str, Any]]] = []
    """Settings of wrong values; each must be refused."""
    is_resumable: ClassVar[bool | None] = None
    """Whether a killed run can be resumed; None: if the algorithm implements ``save_state``."""
    unstable_metrics: ClassVar[Sequence[str]] = ["seconds"]
    """Metrics that differ between two equal runs, such as times."""

    def learned(self, algorithm: Any) -> Mapping[str, Resource | str]:
        """Returns the resources that the algorithm reports as found; override it if it reports any."""
        return {}

    def training(
        self, make_algorithm: Any, directory: Path | None = None, agent: Any = None, **settings: Any
    ) -> Training:
        """Makes a run; in a directory, if it is to be killed or resumed."""
        return Training(
            make_algorithm=make_algorithm,
            agent=agent or self.agent,
            tasks=(self.train_dataset, self.val_dataset),
            resources=self.initial_resources,
            directory=directory,
            settings=settings,
        )

    def test_it_reports_its_progress_with_each_step(self, make_algorithm: Any) -> None:
        store = create_store("memory://")
        with promised("run() learns from rollouts with rewards"):
            self.training(make_algorithm).fit(store=store)
        steps, _, _ = asyncio.run(read_result(store))
        progress = [step.values.get("progress", -1.0) for step in steps]
        promise = "context.log(step, values) reports every step, with `progress` rising from 0 to 1"
        assert progress, f"{promise}; no step was logged"
        assert progress == sorted(progress), f"{promise}; it was {progress}"
        assert (progress[0] >= 0.0, progress[-1]) == (True, 1.0), f"{promise}; it was {progress}"

    def test_it_publishes_what_it_has_learned_and_keeps_other_resources(self, make_algorithm: Any) -> None:
        store = create_store("memory://")
        algorithm, status = self.training(make_algorithm).fit(store=store)
        _, latest, _ = asyncio.run(read_result(store))
        assert status == "succeeded", f"run() ends without an error when rollouts succeed; the run has {status}"
        missing = set(self.initial_resources or {}) - set(latest)
        assert not missing, f"add_resources publishes all resources, also those that stay; without {sorted(missing)}"
        for name, resource in read_resources(self.learned(algorithm)).items():
            assert latest.get(name) == resource, f"run() returns after what it has learned is in the store: {name}"

    def test_a_run_without_rewards_ends_with_the_reason(self, make_algorithm: Any) -> None:
        promise = "run() ends, or raises a LightningError that says that there are no rewards"
        reason = refusal(promise, LightningError, self.training(make_algorithm, agent=return_nothing).fit)
        assert reason is None or "reward" in reason, f"{promise}; it says: {reason}"

    def test_failing_rollouts_do_not_end_a_run_unless_all_of_them_fail(self, make_algorithm: Any) -> None:
        failing = (self.train_dataset or self.val_dataset or [None])[0]

        @functools.wraps(self.agent)
        def fail_once(task: Any, **given: Any) -> Any:
            return raise_an_error(task) if task == failing else self.agent(task, **given)

        with promised("run() goes on after a rollout that failed, and has no result"):
            status = self.training(make_algorithm, agent=fail_once).fit()[1]
        assert status == "succeeded", f"a run in which some rollouts succeed has the status succeeded, not {status}"
        promise = "run() ends, or raises a LightningError, when every rollout fails"
        refusal(promise, LightningError, self.training(make_algorithm, agent=raise_an_error).fit)

    def test_wrong_settings_are_refused_before_the_first_rollout(self, make_algorithm: Any) -> None:
        for settings in self.bad_settings:
            promise = f"the constructor, or check_setup, raises a ConfigError that names the wrong setting: {settings}"
            store = create_store("memory://")
            fit = functools.partial(self.training(make_algorithm, **settings).fit, store=store)
            reason = refusal(promise, ConfigError, fit)
            assert reason is not None, f"{promise}; the run succeeded"
            assert any(name in reason for name in settings), f"{promise}; it says: {reason}"
            assert asyncio.run(read_result(store))[2] == 0, f"{promise}; it ran rollouts first"

    def test_a_killed_run_continues_and_ends_like_an_undisturbed_one(self, make_algorithm: Any, tmp_path: Path) -> None:
        saves = type(make_algorithm()).save_state is not Algorithm.save_state
        if not (saves if self.is_resumable is None else self.is_resumable):
            return
        self.training(make_algorithm, tmp_path / "whole").fit()
        expected = self._read(tmp_path / "whole")
        killed = self.training(make_algorithm, tmp_path / "killed")
        rollouts = expected[-1]
        work = cloudpickle.dumps(functools.partial(killed.fit, kill_after=max(1, rollouts * 2 // 3)))
        process = subprocess.run(
            [sys.executable, "-c", "import cloudpickle, sys; cloudpickle.load(sys.stdin.buffer)()"],
            input=work,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            check=False,
        )
        code = process.returncode
        assert code == -signal.SIGKILL, f"the run ended with {code} before it was killed: {process.stderr.decode()}"
        with promised("load_state(directory) reads what save_state wrote at the last checkpoint()"):
            killed.fit(resume=True)
        steps, latest, ran = self._read(tmp_path / "killed")
        assert ran == rollouts, (
            f"context.rollout_id(...) names rollouts, so that a resumed run repeats none: {ran} instead of {rollouts}"
        )
        promise = "checkpoint() is called after each step, and save_state writes all that the next step needs"
        assert steps == expected[0], f"{promise}; the metrics of a killed and an undisturbed run differ"
        assert latest == expected[1], f"{promise}; the resources of a killed and an undisturbed run differ"

    def _read(self, directory: Path) -> tuple[dict[int, dict[str, float]], Mapping[str, Resource], int]:
        steps, latest, rollouts = asyncio.run(read_result(create_store(f"sqlite:///{directory}/store.db")))
        values = {
            step.step: {name: value for name, value in step.values.items() if name not in self.unstable_metrics}
            for step in steps
        }
        return values, latest, rollouts
