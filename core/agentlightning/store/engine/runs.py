"""Runs, their metrics, and the resources that are published in them."""

from __future__ import annotations

from collections.abc import Mapping

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.event import ResourcesPublished, RunFinished, RunStarted, StepFinished
from agentlightning.frozen import FrozenDict
from agentlightning.records import Metrics, Run, RunStatus
from agentlightning.resources import Resource, ResourcesUpdate, read_resources, split_version_id
from agentlightning.store.engine.change import Change
from agentlightning.store.engine.database import Database


class Runs:
    """Writes runs, metrics and resources."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, run: Run) -> Run:
        async def plan() -> Change[Run]:
            known = await self._database.row(Run, run.run_id)
            if known is not None:
                return Change(known.record)
            change = Change(run)
            change.insert(run)
            change.events.append(RunStarted(run_id=run.run_id, time=run.created_at, name=run.name))
            return change

        return await self._database.commit(plan)

    async def update(self, run_id: str, status: RunStatus) -> Run:
        async def plan() -> Change[Run]:
            row = await self._database.row(Run, run_id)
            if row is None:
                raise NotFoundError(f"no run {run_id!r} in this store; create it with create_run")
            change = Change(row.record.model_copy(update={"status": status}))
            if status != row.record.status:
                change.replace(row, change.result)
                if status != "running":
                    change.events.append(RunFinished(run_id=run_id, time=self._database.now(), status=status))
            return change

        return await self._database.commit(plan)

    async def add_metrics(self, run_id: str, step: int, values: Mapping[str, float]) -> Metrics:
        """Adds metrics to a step. The event carries all values of the step, so a step's last event is complete."""
        given = Metrics(run_id=run_id, step=step, time=self._database.now(), values=dict(values))

        async def plan() -> Change[Metrics]:
            row = await self._database.row(Metrics, run_id, step)
            change = Change(given)
            if row is None:
                change.insert(given)
            else:
                merged = FrozenDict({**row.record.values, **given.values})
                change.result = given.model_copy(update={"values": merged})
                change.replace(row, change.result)
            change.events.append(StepFinished(run_id=run_id, time=given.time, step=step, values=change.result.values))
            return change

        return await self._database.commit(plan)

    async def publish(self, run_id: str, resources_id: str, resources: Mapping[str, Resource | str]) -> ResourcesUpdate:
        if resources_id == "latest":
            raise ConfigError("resources_id='latest' means the newest resources of a run; choose another name")
        if split_version_id(resources_id)[1] is not None:
            raise ConfigError(f"resources_id={resources_id!r} names one version, which never changes; omit the @")
        named = FrozenDict(read_resources(resources))

        async def plan() -> Change[ResourcesUpdate]:
            newest = await self._database.newest_resources(resources_id=resources_id)
            if newest is not None and newest.run_id != run_id:
                raise ConfigError(
                    f"resources {resources_id!r} belong to run {newest.run_id!r}; publish to run {run_id!r} "
                    "under another resources_id"
                )
            now = self._database.now()
            update = ResourcesUpdate.model_construct(
                resources_id=resources_id,
                create_time=now if newest is None else newest.create_time,
                update_time=now,
                version=1 if newest is None else newest.version + 1,
                resources=named,
                run_id=run_id,
            )
            change = Change(update)
            change.insert(update)
            change.events.append(
                ResourcesPublished(run_id=run_id, time=now, resources_id=resources_id, version=update.version)
            )
            return change

        return await self._database.commit(plan)
