"""The engine's resources: versioned snapshots of what can be tuned."""

from __future__ import annotations

from collections.abc import Mapping

from agentlightning.errors import ConfigError
from agentlightning.event import ResourcesPublished
from agentlightning.frozen import FrozenDict
from agentlightning.resources import Resource, ResourcesUpdate, read_resources, split_version_id
from agentlightning.store.backend import Condition, Query
from agentlightning.store.filter import Filter, find
from agentlightning.store.transaction import Transactional, now
from agentlightning.store.transition import Change
from agentlightning.types import PaginatedResult, SortOrder, new_resources_id


class ResourceMethods(Transactional):
    """Publishing resources and reading any version of them."""

    async def add_resources(self, resources: Mapping[str, Resource | str]) -> ResourcesUpdate:
        return await self.update_resources(new_resources_id(), resources)

    async def update_resources(self, resources_id: str, resources: Mapping[str, Resource | str]) -> ResourcesUpdate:
        """Publishes the next version of a snapshot (version 1 of a new one), which becomes the latest.

        Raises:
            ConfigError: an empty id or that of a version, a value that is no resource, or a snapshot of another run.
        """
        if not resources_id:
            raise ConfigError("resources_id is empty; give a name, or call add_resources")
        if split_version_id(resources_id)[1] is not None:
            raise ConfigError(f"resources_id={resources_id!r} names one version, which never changes; leave the @ out")
        named = FrozenDict(read_resources(resources))

        async def plan() -> Change[ResourcesUpdate]:
            newest = await self._newest(resources_id)
            if newest is not None and newest.run_id != self.run_id:
                raise ConfigError(
                    f"resources {resources_id!r} belong to run {newest.run_id!r}; publish to run {self.run_id!r} "
                    "under another resources_id"
                )
            time = now()
            update = ResourcesUpdate.model_construct(
                resources_id=resources_id,
                create_time=time if newest is None else newest.create_time,
                update_time=time,
                version=1 if newest is None else newest.version + 1,
                resources=named,
                run_id=self.run_id,
            )
            change = Change(update)
            change.insert(update)
            change.events.append(
                ResourcesPublished(run_id=self.run_id, time=time, resources_id=resources_id, version=update.version)
            )
            return change

        return await self._commit(plan)

    async def get_resources_by_id(self, resources_id: str, version: int | None = None) -> ResourcesUpdate | None:
        resources_id, version = split_version_id(resources_id, version)
        if version is None:
            return await self._newest(resources_id)
        row = await self._row(ResourcesUpdate, resources_id, version)
        return None if row is None else row.record

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        where = (Condition("run_id", "eq", self.run_id),)
        rows = await self._rows(Query(ResourcesUpdate, where, descending=True, limit=1))
        return rows[0].record if rows else None

    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        query = (
            Filter()
            .scope(run_id=self.run_id)
            .equal(resources_id=resources_id)
            .contain(resources_id=resources_id_contains)
            .query(ResourcesUpdate, sort_by=sort_by, sort_order=sort_order, limit=limit, offset=offset)
        )
        return await find(self._database.backend, query)

    async def _newest(self, resources_id: str) -> ResourcesUpdate | None:
        where = (Condition("resources_id", "eq", resources_id),)
        rows = await self._rows(Query(ResourcesUpdate, where, descending=True, limit=1))
        return rows[0].record if rows else None
