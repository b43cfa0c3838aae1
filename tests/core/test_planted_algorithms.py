"""Algorithms with a planted mistake, each of which fails the conformance test that is named next to it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

import agentlightning as agl
from agentlightning.testing.algorithm import AlgorithmConformance
from agentlightning.types import EnqueueRolloutRequest, Rollout
from tests.planted import assert_each_test_finds_one, assert_found


class Adding(agl.Algorithm):
    """A correct algorithm: two rounds, each of which adds the rewards to a total that the prompt states."""

    def __init__(self, rounds: int = 2) -> None:
        self.rounds = rounds
        self.round, self.total = 0, 0.0
        self.check()

    def check(self) -> None:
        if self.rounds < 1:
            raise agl.ConfigError(f"rounds = {self.rounds}: at least 1 is needed")

    def save_state(self, directory: Path) -> None:
        (directory / "state.json").write_text(json.dumps([self.round, self.total]))

    def load_state(self, directory: Path) -> None:
        self.round, self.total = json.loads((directory / "state.json").read_text())

    def prompt(self) -> agl.PromptTemplate:
        return agl.PromptTemplate(f"Answer {{task}}. {self.total:.3f}")

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        while self.round < self.rounds:
            ids = [self.name(task) for task in train_dataset]
            requests = [EnqueueRolloutRequest(input=t, rollout_id=i) for t, i in zip(train_dataset, ids, strict=True)]
            await self.get_store().enqueue_many_rollouts(requests)  # at once: a kill comes before all or after all
            self.learn(await self.get_store().wait_for_rollouts(ids))
            await self.publish({**(self.get_initial_resources() or {}), "prompt": self.prompt()})
            self.round += 1
            self.report()
            await self.context.flush()
            self.checkpoint()

    def name(self, task: Any) -> str:
        return self.context.rollout_id("train", self.round, task)

    def learn(self, rollouts: Any) -> None:
        self.total += sum(self.rate(rollout) for rollout in rollouts)

    def rate(self, rollout: Rollout) -> float:
        return rollout.attempt.reward or 0.0 if isinstance(rollout, agl.AttemptedRollout) else 0.0

    async def publish(self, resources: Mapping[str, Any]) -> None:
        await self.get_store().add_resources(resources)

    def report(self) -> None:
        self.context.log(self.round, {"total": self.total, "progress": self.round / self.rounds})


class TestAdding(AlgorithmConformance):
    bad_settings: ClassVar = [{"rounds": 0}]

    @pytest.fixture
    def make_algorithm(self) -> type[Adding]:
        return Adding

    def learned(self, algorithm: Any) -> Mapping[str, Any]:
        return {"prompt": algorithm.prompt()}


class ReportsNothing(Adding):
    def report(self) -> None: ...


class CountsProgressInPercent(Adding):
    def report(self) -> None:
        self.context.log(self.round, {"progress": 100.0 * self.round / self.rounds})


class DropsOtherResources(Adding):
    async def publish(self, resources: Mapping[str, Any]) -> None:
        await super().publish({"prompt": resources["prompt"]})


class PublishesTheLastRoundOnly(Adding):
    async def publish(self, resources: Mapping[str, Any]) -> None:
        if self.round + 1 < self.rounds:
            await super().publish(resources)


class NeedsRewards(Adding):
    def rate(self, rollout: Any) -> float:
        return float(rollout.attempt.reward) if rollout.status == "succeeded" else 0.0


class NeedsSuccess(Adding):
    def rate(self, rollout: Any) -> float:
        assert rollout.status == "succeeded"
        return super().rate(rollout)


class ChecksNothing(Adding):
    def check(self) -> None: ...


class ChecksTooLate(ChecksNothing):
    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        rollout = await self.get_store().enqueue_rollout(train_dataset[0])
        await self.get_store().wait_for_rollouts([rollout.rollout_id])
        Adding.check(self)


class NamesNoSetting(Adding):
    def check(self) -> None:
        if self.rounds < 1:
            raise agl.ConfigError("at least 1 is needed")


class SavesOnlyTheRound(Adding):
    def save_state(self, directory: Path) -> None:
        (directory / "state.json").write_text(json.dumps([self.round, 0.0]))


class RepeatsRollouts(Adding):
    def name(self, task: Any) -> str:
        return f"ro-{uuid.uuid4().hex}"


class SavesBeforeTheStep(Adding):
    def name(self, task: Any) -> str:
        self.round += 1
        self.checkpoint()
        self.round -= 1
        return super().name(task)


class CannotLoad(Adding):
    def load_state(self, directory: Path) -> None:
        super().load_state(directory / "old")


PLANTED = [
    (ReportsNothing, "test_it_reports_its_progress_with_each_step", "no step was logged"),
    (CountsProgressInPercent, "test_it_reports_its_progress_with_each_step", "from 0 to 1; it was [50.0, 100.0]"),
    (DropsOtherResources, "test_it_publishes_what_it_has_learned_and_keeps_other_resources", "without ['other']"),
    (PublishesTheLastRoundOnly, "test_it_publishes_what_it_has_learned_and_keeps_other_resources", "is in the store"),
    (NeedsRewards, "test_a_run_without_rewards_ends_with_the_reason", "it raised TypeError"),
    (NeedsSuccess, "test_failing_rollouts_do_not_end_a_run_unless_all_of_them_fail", "run() goes on after a rollout"),
    (ChecksNothing, "test_wrong_settings_are_refused_before_the_first_rollout", "the run succeeded"),
    (ChecksTooLate, "test_wrong_settings_are_refused_before_the_first_rollout", "it ran rollouts first"),
    (NamesNoSetting, "test_wrong_settings_are_refused_before_the_first_rollout", "it says: at least 1 is needed"),
    (SavesOnlyTheRound, "test_a_killed_run_continues_and_ends_like_an_undisturbed_one", "all that the next step needs"),
    (RepeatsRollouts, "test_a_killed_run_continues_and_ends_like_an_undisturbed_one", "a resumed run repeats none"),
    (SavesBeforeTheStep, "test_a_killed_run_continues_and_ends_like_an_undisturbed_one", "checkpoint() is called"),
    (CannotLoad, "test_a_killed_run_continues_and_ends_like_an_undisturbed_one", "load_state(directory) reads"),
]


@pytest.mark.parametrize(("algorithm", "test", "message"), PLANTED, ids=[planted[0].__name__ for planted in PLANTED])
def test_the_kit_finds_a_planted_mistake(
    algorithm: type[Adding], test: str, message: str, request: pytest.FixtureRequest
) -> None:
    assert_found(TestAdding, test, request, message, make_algorithm=algorithm)


def test_every_test_of_the_kit_finds_a_mistake() -> None:
    assert_each_test_finds_one(AlgorithmConformance, [test for _, test, _ in PLANTED])
