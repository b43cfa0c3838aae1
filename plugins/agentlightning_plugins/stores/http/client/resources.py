from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

from agentlightning.resources import Resource, ResourcesUpdate, read_resources, split_version_id
from agentlightning.types import PaginatedResult, SortOrder
from agentlightning_plugins.stores.http.client.call import StoreCalls, query_string, quoted, read_page

_KEPT_VERSIONS: Final = 64


class ResourcesCalls(StoreCalls):
    """The part of the client that is about resources."""

    _versions: Versions

    async def add_resources(self, resources: Mapping[str, Resource | str]) -> ResourcesUpdate:
        body = {"resources": _dump(resources)}
        return self._versions.keep(await self._post("/resources", body, repeatable=False))

    async def update_resources(self, resources_id: str, resources: Mapping[str, Resource | str]) -> ResourcesUpdate:
        body = {"resources": _dump(resources)}
        return self._versions.keep(await self._post(f"/resources/{quoted(resources_id)}", body, repeatable=False))

    async def get_resources_by_id(self, resources_id: str, version: int | None = None) -> ResourcesUpdate | None:
        """A snapshot at a version; versions never change, so one that was seen before costs no request."""
        resources_id, version = split_version_id(resources_id, version)
        if version is None:
            content = await self._find(f"/resources/{quoted(resources_id)}")
        else:
            known = self._versions.get(resources_id, version)
            if known is not None:
                return known
            content = await self._find(f"/resources/{quoted(resources_id)}?version={version}")
        return None if content is None else self._versions.keep(content)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        content = await self._find("/resources/latest")
        return None if content is None else self._versions.keep(content)

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
        query = {
            "resources_id": resources_id,
            "resources_id_contains": resources_id_contains,
            "sort_by": sort_by,
            "sort_order": sort_order,
            "limit": limit,
            "offset": offset,
        }
        page = await self._get("/resources?" + query_string(query))
        return read_page(page, [ResourcesUpdate.model_validate(item) for item in page["items"]])


class Versions:
    """The versions of resources that were seen last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, int], ResourcesUpdate] = {}

    def get(self, resources_id: str, version: int) -> ResourcesUpdate | None:
        return self._kept.get((resources_id, version))

    def keep(self, content: Any) -> ResourcesUpdate:
        update = ResourcesUpdate.model_validate(content)
        with self._lock:
            self._kept[update.resources_id, update.version] = update
            if len(self._kept) > _KEPT_VERSIONS:
                del self._kept[next(iter(self._kept))]
        return update


def _dump(resources: Mapping[str, Resource | str]) -> dict[str, Any]:
    return {name: resource.model_dump(mode="json") for name, resource in read_resources(resources).items()}
