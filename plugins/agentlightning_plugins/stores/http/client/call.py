from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from agentlightning.errors import NotFoundError
from agentlightning.frozen import freeze
from agentlightning.types import UNSET, AttemptedRollout, PaginatedResult, Record, Rollout
from agentlightning_plugins.stores.http.client.connection import StoreConnection

R = TypeVar("R", bound=Record)


class StoreCalls:
    """What each part of the client stands on: one connection, seen from one run."""

    run_id: str
    _connection: StoreConnection

    async def _get(self, path: str) -> Any:
        return await self._connection.request("GET", path, run_id=self.run_id, repeatable=True)

    async def _find(self, path: str) -> Any:
        try:
            return await self._get(path)
        except NotFoundError:
            return None

    async def _post(self, path: str, body: Any = None, *, repeatable: bool, wait_s: float = 0.0) -> Any:
        return await self._connection.request(
            "POST", path, body, run_id=self.run_id, repeatable=repeatable, wait_s=wait_s
        )


def given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not UNSET}


def frozen(value: Any, name: str) -> Any:
    """What is refused here is what the store behind the server would refuse, before it becomes something else."""
    return value if value is UNSET else freeze(value, name)


def quoted(text: str) -> str:
    return quote(text, safe="")


def query_string(arguments: Mapping[str, Any]) -> str:
    return urlencode({name: value for name, value in arguments.items() if value is not None})


def read_rollout(content: dict[str, Any]) -> Rollout:
    return (AttemptedRollout if "attempt" in content else Rollout).model_validate(content)


def read_page(content: dict[str, Any], items: list[R]) -> PaginatedResult[R]:
    return PaginatedResult[R].model_construct(**{**content, "items": items})
