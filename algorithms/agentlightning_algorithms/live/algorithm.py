"""``live``: learns from the traffic of a serving process, in one guarded trial after another."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar, TypeAlias

from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.types import Dataset
from agentlightning_algorithms.live.learner import Learner
from agentlightning_algorithms.live.settings import LiveSettings
from agentlightning_algorithms.shared import live_resources

logger = logging.getLogger("agentlightning")


class LiveLearning(LiveSettings, Algorithm):
    """Improves the resources of a serving process without putting its users at risk.

    The learner repeats these phases: rewards of the stable version come in; the proposer makes a candidate; runners run
    it on tasks that were served before (the offline check); a small share of the traffic gets it, while rewards of both
    versions come in at the same time; a sequential test ends the trial. A candidate that is better is promoted:
    published as the run's latest resources. A worse one is rolled back: its share ends.

    Serving processes ask ``agl.LiveResources`` for the version of each task. All state is in the store, so a restarted
    learner continues where it was killed; while no learner runs, all tasks get the stable version.

    The arguments are those of :class:`~agentlightning_algorithms.live.settings.LiveSettings`.
    """

    Experience: TypeAlias = live_resources.LiveExperience
    Result: TypeAlias = live_resources.Result

    continues_from_latest: ClassVar[bool] = True

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Learns until ``max_trials`` candidates were decided on, or until it is stopped. Datasets are not used.

        Raises:
            ConfigError: no resources were published in the run.
            ConflictError: another learner works on the run.
        """
        if self.context.adapter is not None:
            adapter = type(self.context.adapter).__name__
            logger.warning("the adapter %s has no effect: live learning reads rewards; leave adapter out", adapter)
        learner = Learner(self, self.get_store(), self.context.directory)
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
