"""``live``: learns from the traffic of a serving process, one guarded trial after another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, TypeAlias

from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import require_least
from agentlightning.types import Dataset
from agentlightning_algorithms import live_resources as live
from agentlightning_algorithms.live.proposal import Proposer, load_proposer
from agentlightning_algorithms.live.session import Session

logger = logging.getLogger("agentlightning")


class LiveLearning(Algorithm):
    """Improves the resources of a process that serves, without putting its users at risk.

    Again and again: rewards of the stable version come in; the proposer makes a candidate; runners run that on tasks
    that were served before (the offline check); it is served to a small share of the traffic, while rewards of both
    versions come in at the same time; a sequential test ends the trial. A candidate that is not worse is promoted:
    published as the run's latest resources. One that is worse is rolled back: nobody is served with it any more.

    Serving processes ask ``agl.LiveResources`` for the version of each task. All of the state is in the store, so a
    learner that was killed goes on where it was; while there is none, everybody is served with the stable version.
    """

    Experience: TypeAlias = live.Experience
    Result: TypeAlias = live.Result

    def __init__(
        self,
        propose: Proposer | str | Mapping[str, Any],
        *,
        evidence: int = 20,
        check_tasks: int = 16,
        check_tolerance: float = 0.2,
        check_timeout_s: float = 300.0,
        share: float = 0.1,
        risk: float = 0.05,
        margin: float = 0.1,
        max_treated: int = 1000,
        reward_range: tuple[float, float] = (0.0, 1.0),
        reward_timeout_s: float = 3600.0,
        refresh_s: float = 1.0,
        max_trials: int | None = None,
    ) -> None:
        """Sets how candidates are made and judged. Margin and range are in units of the agent's reward.

        Args:
            propose: makes candidates. In configuration files ``"module:function"``, or an algorithm that can, as in
                ``{"name": "apo", "max_calls": 200}``.
            evidence: rewards of the stable version before a candidate is asked for, each time anew.
            check_tasks: recorded tasks of the offline check; 0 leaves it out.
            check_tolerance: how much lower the mean reward on them may be than it was with the stable version, as a
                share of ``reward_range``; and how much larger the share of those that fail.
            check_timeout_s: seconds in which runners must have run them.
            share: of the traffic that a candidate gets during its trial.
            risk: probability of rolling back a candidate that is not worse, and of promoting one that is worse by more
                than ``margin``, before ``max_treated`` ends the trial.
            margin: how much worse still counts as not worse.
            max_treated: rewards of a candidate after which its trial ends undecided: then it is promoted if its mean is
                at least the control's, and rolled back otherwise.
            reward_range: the least and the greatest reward.
            reward_timeout_s: seconds after the end of a rollout until which its reward is waited for.
            refresh_s: seconds between two looks for rewards that come late; the end of a rollout is seen at once.
            max_trials: ``run`` returns after so many candidates of the run; None goes on until it is stopped.

        Raises:
            ConfigError: a value out of range, or a proposer that is not there.
        """
        shares = {"share": share, "risk": risk}
        if wrong := {name: value for name, value in shares.items() if not 0 < value < 1}:
            raise ConfigError(f"{_show(wrong)}: a number between 0 and 1 is needed")
        require_least(1, evidence=evidence, max_treated=max_treated, max_trials=max_trials)
        require_least(0, check_tasks=check_tasks, check_tolerance=check_tolerance, margin=margin)
        times = {"check_timeout_s": check_timeout_s, "reward_timeout_s": reward_timeout_s, "refresh_s": refresh_s}
        if wrong := {name: value for name, value in times.items() if value <= 0}:
            raise ConfigError(f"{_show(wrong)}: more than 0 is needed")
        if not reward_range[0] < reward_range[1]:
            raise ConfigError(f"reward_range = {reward_range}: the least reward comes first, the greatest second")
        self.propose = load_proposer(propose)
        self.evidence = evidence
        self.check_tasks = check_tasks
        self.check_tolerance = check_tolerance
        self.check_timeout_s = check_timeout_s
        self.share = share
        self.risk = risk
        self.margin = margin
        self.max_treated = max_treated
        self.reward_range = (float(reward_range[0]), float(reward_range[1]))
        self.reward_timeout_s = reward_timeout_s
        self.refresh_s = refresh_s
        self.max_trials = max_trials

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Learns until ``max_trials`` candidates were decided on, or for ever. Datasets are not used.

        Raises:
            ConfigError: nothing to improve was published in the run.
            ConflictError: another learner works on the run.
        """
        if self.context.adapter is not None:
            unread = type(self.context.adapter).__name__
            logger.warning("the adapter %s has no effect: live learning reads rewards; leave adapter out", unread)
        session = Session(self, self.get_store())
        following = [asyncio.create_task(session.feed.follow()), asyncio.create_task(session.beat())]
        try:
            await session.learn()
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)


def _show(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())
