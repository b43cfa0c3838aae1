"""``live``: learns from the traffic of a serving process, in one guarded trial after another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeAlias

from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import require_least
from agentlightning.types import Dataset
from agentlightning_algorithms import live_resources
from agentlightning_algorithms.live.learner import Learner
from agentlightning_algorithms.live.proposal import Proposer, load_proposer

logger = logging.getLogger("agentlightning")


class _ProposerTypes:  # a base, because a dataclass would take them for settings
    Experience: TypeAlias = live_resources.Experience
    Result: TypeAlias = live_resources.Result


@dataclass(eq=False, repr=False)
class LiveLearning(Algorithm, _ProposerTypes):
    """Improves the resources of a serving process without putting its users at risk.

    The learner repeats these phases: rewards of the stable version come in; the proposer makes a candidate; runners run
    it on tasks that were served before (the offline check); a small share of the traffic gets it, while rewards of both
    versions come in at the same time; a sequential test ends the trial. A candidate that is better is promoted:
    published as the run's latest resources. A worse one is rolled back: its share ends.

    Serving processes ask ``agl.LiveResources`` for the version of each task. All state is in the store, so a restarted
    learner continues where it was killed; while no learner runs, all tasks get the stable version.

    Raises:
        ConfigError: a value is out of range, or the proposer does not exist.
    """

    continues_from_latest: ClassVar[bool] = True

    propose: Proposer | str | Mapping[str, Any]
    """Makes candidates. In configuration files ``"module:function"``, or an algorithm that has ``propose``, as in
    ``{"name": "apo", "max_calls": 200}``."""
    _: KW_ONLY
    evidence: int = 20
    """Number of rewards of the stable version to collect before each candidate."""
    check_tasks: int = 16
    """Number of recorded tasks in the offline check; 0 disables it."""
    check_tolerance: float = 0.2
    """How much lower than the stable version's the mean reward on these tasks may be, as a share of ``reward_range``,
    and how much larger the share of failures. A larger difference rejects the candidate if it is also significant. The
    check gets half of ``risk``; it cannot reject with fewer than 7 tasks."""
    check_timeout_s: float = 300.0
    """Time limit of the offline check, in seconds; it starts again when a killed learner is restarted."""
    share: float = 0.1
    """Share of the traffic that a candidate gets during its trial."""
    risk: float = 0.05
    """Largest probability of rejecting or rolling back a candidate that is not worse. Also the largest probability,
    over all candidates of the run, of promoting one that is not better (with ``margin``: worse by more than it)."""
    margin: float = 0.0
    """How far all promotions together may lower the reward below the first stable version's, in units of reward. 0
    promotes only better candidates. A positive margin also promotes a candidate that is lower by less than half of the
    remaining margin, for candidates that are cheaper or faster."""
    max_treated: int = 1000
    """Number of rollouts after which a candidate gets no more traffic, whether they have ended or not. Without a
    decision once their rewards are known, the stable version stays."""
    max_trial_s: float = 604800.0
    """Seconds after which a candidate gets no more traffic."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The lowest and the highest reward. A failed rollout gets the lowest."""
    reward_timeout_s: float = 3600.0
    """Seconds after the end of a rollout during which its reward may arrive. A promotion waits at most this long for
    the rewards of earlier rollouts."""
    rollout_timeout_s: float = 3600.0
    """Seconds after the start of a rollout after which it counts as failed. A promotion waits at most this long for
    earlier rollouts to end."""
    refresh_s: float = 1.0
    """Seconds between two reads of late rewards; the end of a rollout is noticed immediately."""
    max_trials: int | None = None
    """``run`` returns after this many candidates; None means until it is stopped."""

    def __post_init__(self) -> None:
        for name in ("share", "risk"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: a number between 0 and 1 is needed")
        for name in ("check_timeout_s", "max_trial_s", "reward_timeout_s", "rollout_timeout_s", "refresh_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: more than 0 is needed")
        require_least(1, evidence=self.evidence, max_treated=self.max_treated, max_trials=self.max_trials)
        require_least(0, check_tasks=self.check_tasks, check_tolerance=self.check_tolerance, margin=self.margin)
        low, high = self.reward_range
        if not low < high:
            raise ConfigError(f"reward_range = {self.reward_range}: the lower bound must come first")
        self.reward_range = (float(low), float(high))
        self.propose = load_proposer(self.propose)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Learns until ``max_trials`` candidates were decided on, or until it is stopped. Datasets are not used.

        Raises:
            ConfigError: no resources were published in the run.
            ConflictError: another learner works on the run.
        """
        if self.context.adapter is not None:
            adapter = type(self.context.adapter).__name__
            logger.warning("the adapter %s has no effect: live learning reads rewards; leave adapter out", adapter)
        learner = Learner(self, self.get_store())
        parts = learner.learn(), learner.feed.follow(), learner.send_heartbeats()
        work = [asyncio.create_task(part) for part in parts]
        try:
            ended, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        for task in ended:
            task.result()  # raises the error of any part
