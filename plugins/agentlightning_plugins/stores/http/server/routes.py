"""The route table of the server: store methods, and handlers for requests that do more than call a method."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field, FiniteFloat
from typing_extensions import TypedDict  # pydantic refuses typing's before Python 3.12

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.run.attempt_token import DEFAULT_LIFETIME_S
from agentlightning.store.protocol import LightningStore
from agentlightning.types import (
    MAX_INT,
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    PaginatedResult,
    Rollout,
    SortOrder,
    Span,
)
from agentlightning_plugins.stores.http.message import MAX_POLL_S
from agentlightning_plugins.stores.http.methods import METHOD_ROUTES
from agentlightning_plugins.stores.http.route import Route
from agentlightning_plugins.stores.http.server.access import StoreAccess
from agentlightning_plugins.stores.http.server.polling import Polls

_NotNegative = Annotated[int, Field(ge=0, le=MAX_INT)]
_RequestId = Annotated[str, Field(max_length=200)]
_Seconds = Annotated[FiniteFloat, Field(ge=0)]


class Context(NamedTuple):
    """State that handlers share."""

    store: LightningStore
    """The store as seen from the run that the request names."""
    polls: Polls
    access: StoreAccess


def make_handler(route: Route) -> Callable[[Context, dict[str, Any]], Awaitable[Any]]:
    """Returns the function that answers a route, given the validated arguments of a request.

    Raises:
        NotFoundError: a getter has found nothing.
    """
    name, defaults = route.function.__name__, route.defaults
    if getattr(LightningStore, name, None) is not route.function:
        return lambda context, arguments: route.function(context, **arguments)
    names_run = "run_id" in route.path_names and "run_id" not in route.parameters

    async def call_store(context: Context, arguments: dict[str, Any]) -> Any:
        store = context.store.with_run(arguments.pop("run_id")) if names_run else context.store
        result = await getattr(store, name)(**(defaults | arguments if defaults else arguments))
        if result is None and route.missing:
            raise NotFoundError(route.missing.format(**arguments))
        return result if route.result_key is None else {route.result_key: result}

    return call_store


class StoreHealth(TypedDict):
    """The answer of ``/health``."""

    status: Literal["ok"]
    capabilities: dict[str, bool]


async def _health(context: Context) -> StoreHealth:
    """Reports that the server answers and which capabilities its store has; needs no token."""
    able = {name: bool(value) for name, value in context.store.capabilities.items()}
    return {"status": "ok", "capabilities": {**able, "otlp_traces": True}}


async def enqueue_rollouts(context: Context, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
    """Queues rollouts in order, all or none; an existing ``rollout_id`` returns the existing rollout."""
    return await context.store.enqueue_many_rollouts(rollouts)


async def dequeue_rollouts(
    context: Context,
    limit: _NotNegative = 1,
    worker_id: str | None = None,
    timeout: _Seconds = 0,
    request_id: _RequestId | None = None,
) -> Sequence[AttemptedRollout]:
    """Takes up to ``limit`` queued rollouts; waits up to ``timeout``, at most 30 s, for the first.

    Within a minute, the same ``request_id`` (chosen by the client) returns the same rollouts again.
    """

    async def dequeue() -> Sequence[AttemptedRollout]:
        return await context.store.dequeue_many_rollouts(
            limit=limit, worker_id=worker_id, timeout=min(timeout, MAX_POLL_S)
        )

    return await context.polls.claim(request_id, dequeue)


async def release_rollouts(context: Context, request_id: _RequestId) -> dict[str, int]:
    """Releases the rollouts that a cancelled dequeue has claimed or would claim."""
    claimed = await context.polls.release(request_id)
    for item in claimed:
        with contextlib.suppress(NotFoundError, ConflictError):  # it has changed since
            await context.store.release_attempt(item.rollout_id, item.attempt.attempt_id)
    return {"released": len(claimed)}


async def wait_for_rollouts(
    context: Context, rollout_ids: Sequence[str], timeout: _Seconds | None = None
) -> Sequence[Rollout]:
    """Returns the rollouts that end within ``timeout``, at most 30 s, in the requested order."""
    timeout = MAX_POLL_S if timeout is None else min(timeout, MAX_POLL_S)
    work = context.store.wait_for_rollouts(rollout_ids, timeout)
    return await context.polls.wait(asyncio.ensure_future(work)) or ()


async def search_attempts(
    context: Context,
    rollout_id: str,
    sort_by: str | None = None,
    sort_order: SortOrder = "asc",
    limit: int = -1,
    offset: int = 0,
) -> PaginatedResult[Attempt]:
    """Returns the attempts of a rollout, as the client of Agent Lightning 0.3 requests them."""
    return await context.store.query_attempts(
        rollout_id, sort_by=sort_by or "sequence_id", sort_order=sort_order, limit=limit, offset=offset
    )


async def _add_span(context: Context, record: Span) -> Span | None:
    """Stores a span; null when it is stored already."""
    return await context.store.add_span(record)


async def add_spans(context: Context, spans: Sequence[Span]) -> dict[str, list[int | None]]:
    """Stores spans and returns the ``sequence_id`` of each, null if it was stored before."""
    numbers = {
        (span.rollout_id, span.attempt_id, span.span_id): span.sequence_id
        for span in await context.store.add_many_spans(spans)
    }
    return {"sequence_ids": [numbers.pop((span.rollout_id, span.attempt_id, span.span_id), None) for span in spans]}


class MintedToken(TypedDict):
    """A token that is valid for one attempt."""

    token: str
    rollout_id: str
    attempt_id: str
    expires_at: float


async def mint_token(
    context: Context,
    rollout_id: str,
    attempt_id: str,
    lifetime_s: Annotated[float, Field(gt=0, le=31_536_000)] = DEFAULT_LIFETIME_S,
) -> MintedToken:
    """Makes a token with which an agent can only write one attempt's spans and reward, and read its rollout."""
    attempts = [attempt.attempt_id for attempt in await context.store.query_attempts(rollout_id)]
    if attempt_id == "latest" and attempts:
        attempt_id = attempts[-1]
    if attempt_id not in attempts:
        raise NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
    token, expires_at = context.access.mint(rollout_id, attempt_id, lifetime_s)
    return {"token": token, "rollout_id": rollout_id, "attempt_id": attempt_id, "expires_at": expires_at}


ROUTES: Final = (
    Route("POST", "/rollouts/{rollout_id}/attempts/search", search_attempts),  # before the route of any attempt
    *METHOD_ROUTES,
    Route("GET", "/health", _health),
    Route("POST", "/queues/rollouts/enqueue", enqueue_rollouts, 201),
    Route("POST", "/queues/rollouts/dequeue", dequeue_rollouts),
    Route("POST", "/queues/rollouts/release", release_rollouts),
    Route("POST", "/waits/rollouts", wait_for_rollouts),
    Route("GET", "/rollouts", LightningStore.query_rollouts),
    Route("POST", "/rollouts/{rollout_id}/attempts/{attempt_id}/token", mint_token, 201),
    Route("GET", "/spans", LightningStore.query_spans),
    Route("POST", "/spans", _add_span, 201, body=Span, for_attempts=True),
    Route("POST", "/spans/batch", add_spans, 201, for_attempts=True),
    Route("POST", "/resources/{resources_id}/rollback", LightningStore.rollback),
    Route("GET", "/workers", LightningStore.query_workers),
)
