"""The engine's runs, their metrics and their events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, get_args

from agentlightning.errors import NotFoundError
from agentlightning.event import Event, RunFinished, RunStarted, StepFinished
from agentlightning.frozen import FrozenDict, freeze
from agentlightning.store.filter import Filter, check_choice, find
from agentlightning.store.transaction import Transactional, now
from agentlightning.store.transition import Change
from agentlightning.store.waiting import Subscription
from agentlightning.types import Metrics, PaginatedResult, Run, RunStatus

EVENT_KINDS: Final[tuple[str, ...]] = tuple(kind.model_fields["kind"].default for kind in get_args(get_args(Event)[0]))


class RunMethods(Transactional):
    """Runs, metrics and the event stream."""

    async def create_run(
        self,
        name: str,
        *,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Run:
        time = now()
        run = Run(
            run_id=run_id if run_id is not None else self.run_id,
            name=name,
            created_at=time,
            config=freeze(config or {}, "config"),
            metadata=freeze(metadata, "metadata"),
        )

        async def plan() -> Change[Run]:
            known = await self._row(Run, run.run_id)
            if known is not None:
                return Change(known.record)
            change = Change(run)
            change.insert(run)
            change.events.append(RunStarted(run_id=run.run_id, time=time, name=name))
            return change

        return await self._commit(plan)

    async def get_run_by_id(self, run_id: str) -> Run | None:
        row = await self._row(Run, run_id)
        return None if row is None else row.record

    async def update_run(self, run_id: str, status: RunStatus) -> Run:
        """Says how a run stands. An interrupted or failed run may be running again when it is resumed.

        Raises:
            NotFoundError: an unknown run.
        """
        check_choice("status", status, get_args(RunStatus))

        async def plan() -> Change[Run]:
            row = await self._row(Run, run_id)
            if row is None:
                raise NotFoundError(f"no run {run_id!r} in this store; create it with create_run")
            change = Change(row.record.model_copy(update={"status": status}))
            if status != row.record.status:
                change.replace(row, change.result)
                if status != "running":
                    change.events.append(RunFinished(run_id=run_id, time=now(), status=status))
            return change

        return await self._commit(plan)

    async def query_runs(self, *, limit: int = -1, offset: int = 0) -> PaginatedResult[Run]:
        return await find(self._database.backend, Filter().query(Run, limit=limit, offset=offset))

    async def add_metrics(self, step: int, values: Mapping[str, float]) -> Metrics:
        """Records the numbers of a step of this run; repeating a step adds to and replaces its values.

        The event of it carries all values of the step, so that the last event of a step is the whole truth.
        """
        given = Metrics(run_id=self.run_id, step=step, time=now(), values=dict(values))

        async def plan() -> Change[Metrics]:
            row = await self._row(Metrics, self.run_id, step)
            if row is None:
                change = Change(given)
                change.insert(given)
            else:
                merged = FrozenDict({**row.record.values, **given.values})
                change = Change(given.model_copy(update={"values": merged}))
                change.replace(row, change.result)
            values = change.result.values
            change.events.append(StepFinished(run_id=self.run_id, time=given.time, step=step, values=values))
            return change

        return await self._commit(plan)

    async def query_metrics(self, *, limit: int = -1, offset: int = 0) -> PaginatedResult[Metrics]:
        query = Filter().scope(run_id=self.run_id).query(Metrics, sort_by="step", limit=limit, offset=offset)
        return await find(self._database.backend, query)

    async def subscribe(self, kinds: Sequence[str] | None = None) -> AsyncIterator[Event]:
        """Yields the events of this run from the first ``anext`` on, until the iterator or the store is closed.

        Raises:
            ConfigError: an unknown kind.
            StoreError: the reader does not keep up and events were lost.
        """
        for kind in kinds or ():
            check_choice("kinds", kind, EVENT_KINDS)
        subscription = Subscription(self.run_id, None if kinds is None else frozenset(kinds))
        waiters = self._database.waiters
        waiters.subscribe(subscription)
        try:
            while True:
                subscription.rung = False
                while subscription.unread or subscription.overflown:
                    yield subscription.take()
                if waiters.closed:
                    return
                await subscription.wait()
        finally:
            waiters.unsubscribe(subscription)
