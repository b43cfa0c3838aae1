"""Limits the number of rollouts that an algorithm may use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from agentlightning.algorithm.algorithm import Algorithm, RunContext
from agentlightning.event import RolloutEnqueued
from agentlightning.resources import LLM, Resource
from agentlightning.run.thread import run_in_thread
from agentlightning.types import Dataset


class Budgeted(Algorithm):
    """Runs another algorithm, counts its rollouts and stops the algorithm when they exceed the budget."""

    def __init__(self, algorithm: Algorithm, budget: int | None) -> None:
        """Wraps an algorithm.

        Args:
            algorithm: the algorithm to run. A synchronous algorithm cannot be stopped; its rollouts are only counted.
            budget: maximum number of rollouts, excluding those in mode ``test``; None only counts them.
        """
        self.algorithm = algorithm
        self.budget = budget
        self._counted: set[str] = set()
        self.was_stopped = False
        self.resources: dict[str, Resource] = {}
        """The run's latest resources, set when the algorithm has ended."""

    @property
    def rollouts(self) -> int:
        """Number of rollouts so far, excluding those in mode ``test``."""
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
