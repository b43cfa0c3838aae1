"""The methods of ``LightningStore`` that send one request each: one table for client, server and OpenAPI document."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, TypeVar, cast

from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.stores.http.route import Route

M = TypeVar("M", bound=Callable[..., Any])

METHOD_ROUTES: Final[list[Route]] = []
"""The routes of ``RemoteMethods``."""


def _remote(method: str, path: str, function: M, status: int = 200, **options: Any) -> M:
    """Makes a method that sends its arguments as a request; ``options`` are fields of ``Route``."""
    route = Route(method, path, function, status, **options)
    METHOD_ROUTES.append(route)

    @wraps(function)
    async def send(self: RemoteMethods, **arguments: Any) -> Any:
        return await self._send(route, arguments)

    send.__dict__["__isabstractmethod__"] = False
    return cast("M", send)


_S = LightningStore


class RemoteMethods(LightningStore):
    """The methods that send their arguments as one request; the client implements all other methods."""

    @abstractmethod
    async def _send(self, route: Route, arguments: Mapping[str, Any]) -> Any:
        """Sends a call as a request and returns its result."""

    statistics = _remote("GET", "/statistics", _S.statistics)

    start_rollout = _remote("POST", "/rollouts", _S.start_rollout, 201, repeatable=False)
    query_rollouts = _remote("POST", "/rollouts/search", _S.query_rollouts)
    delete_rollouts = _remote("POST", "/rollouts/delete", _S.delete_rollouts, result_key="deleted")
    get_rollout_by_id = _remote(
        "GET", "/rollouts/{rollout_id}", _S.get_rollout_by_id, missing="no rollout {rollout_id!r}", for_attempts=True
    )
    update_rollout = _remote("POST", "/rollouts/{rollout_id}", _S.update_rollout)
    cancel_rollout = _remote("POST", "/rollouts/{rollout_id}/cancel", _S.cancel_rollout)
    retry_rollout = _remote("POST", "/rollouts/{rollout_id}/retry", _S.retry_rollout, repeatable=False)

    query_attempts = _remote("GET", "/rollouts/{rollout_id}/attempts", _S.query_attempts)
    start_attempt = _remote("POST", "/rollouts/{rollout_id}/attempts", _S.start_attempt, 201, repeatable=False)
    get_latest_attempt = _remote(
        "GET",
        "/rollouts/{rollout_id}/attempts/latest",
        _S.get_latest_attempt,
        missing="no attempt of rollout {rollout_id!r}",
    )
    update_attempt = _remote("POST", "/rollouts/{rollout_id}/attempts/{attempt_id}", _S.update_attempt)
    release_attempt = _remote("POST", "/rollouts/{rollout_id}/attempts/{attempt_id}/release", _S.release_attempt)

    query_spans = _remote("POST", "/spans/search", _S.query_spans)
    poll_new_spans = _remote("POST", "/spans/poll", _S.poll_new_spans)
    get_next_span_sequence_id = _remote(
        "POST", "/spans/next", _S.get_next_span_sequence_id, for_attempts=True, result_key="sequence_id"
    )
    get_many_span_sequence_ids = _remote("POST", "/spans/next/batch", _S.get_many_span_sequence_ids, for_attempts=True)

    query_resources = _remote("GET", "/resources", _S.query_resources)
    add_resources = _remote("POST", "/resources", _S.add_resources, 201, repeatable=False)
    get_latest_resources = _remote(
        "GET", "/resources/latest", _S.get_latest_resources, missing="no resources were published in this run"
    )
    get_resources_by_id = _remote(
        "GET",
        "/resources/{resources_id}",
        _S.get_resources_by_id,
        missing="no resources {resources_id!r}, or not at that version",
    )
    update_resources = _remote("POST", "/resources/{resources_id}", _S.update_resources, repeatable=False)

    query_workers = _remote("POST", "/workers/search", _S.query_workers)
    get_worker_by_id = _remote("GET", "/workers/{worker_id}", _S.get_worker_by_id, missing="no worker {worker_id!r}")
    update_worker = _remote("POST", "/workers/{worker_id}", _S.update_worker)
    end_worker = _remote("POST", "/workers/{worker_id}/end", _S.end_worker, result_key="ended")

    find_open_runs = _remote("GET", "/queues/runs", _S.find_open_runs)
    query_runs = _remote("GET", "/runs", _S.query_runs)
    create_run = _remote("POST", "/runs", _S.create_run, 201)
    get_run_by_id = _remote("GET", "/runs/{run_id}", _S.get_run_by_id, missing="no run {run_id!r}")
    update_run = _remote("POST", "/runs/{run_id}", _S.update_run)
    query_metrics = _remote("GET", "/runs/{run_id}/metrics", _S.query_metrics)
    add_metrics = _remote("POST", "/runs/{run_id}/metrics", _S.add_metrics, 201)
