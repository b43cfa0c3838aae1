"""The REST contract as a table: each row says which store method answers a request, and with which body."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from typing_extensions import TypedDict  # pydantic refuses typing's before Python 3.12

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.run.attempt_token import DEFAULT_LIFETIME_S
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Metrics, PaginatedResult, Rollout, Span
from agentlightning_plugins.stores.http import message
from agentlightning_plugins.stores.http.message import MAX_POLL_S
from agentlightning_plugins.stores.http.server.access import Access, AttemptIds
from agentlightning_plugins.stores.http.server.polling import Polls


class Context(NamedTuple):
    """What a request works with."""

    store: LightningStore
    """As seen from the run that the request names."""
    polls: Polls
    access: Access


Answer = Callable[..., Awaitable[Any]]
About = Callable[[Mapping[str, Any]], Iterable[AttemptIds]]
"""Which attempts a request is about, given the arguments of its ``answer``."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the REST contract."""

    method: str
    path: str
    """Below the prefix; ``{names}`` become keyword arguments of ``answer``."""
    answer: Answer
    """Called with the context, the path's names and the keys of the message; a Record comes whole, as ``record``.

    The first line of its docstring and the type that it returns go into the OpenAPI document.
    """
    message: Any = None
    """Type of the body, or of the query string for GET."""
    status: int = 200
    about: About | None = None
    """None: the route is not for those who hold the token of an attempt."""


def _call(method: Callable[..., Awaitable[Any]]) -> Answer:
    """Answers with a method of the store, as it is."""
    name = method.__name__

    def answer(context: Context, **arguments: Any) -> Awaitable[Any]:
        return getattr(context.store, name)(**arguments)  # type: ignore[no-any-return] # each is a coroutine method

    answer.__doc__ = method.__doc__
    answer.__annotations__ = {"return": get_type_hints(method)["return"]}
    return answer


def _get(method: Callable[..., Awaitable[Any]], missing: str) -> Answer:
    """Answers with a getter of the store, and with 404 where it returns None."""
    name = method.__name__

    async def answer(context: Context, **arguments: Any) -> Any:
        record = await getattr(context.store, name)(**arguments)
        if record is None:
            raise NotFoundError(missing.format(**arguments))
        return record

    answer.__doc__ = method.__doc__
    kinds = [kind for kind in get_args(get_type_hints(method)["return"]) if kind is not NoneType]
    answer.__annotations__ = {"return": kinds[0]}
    return answer


class Health(TypedDict):
    """That the server is there, and what its store can do."""

    status: Literal["ok"]
    capabilities: dict[str, bool]


async def _health(context: Context) -> Health:
    """Says that the server is there; open to everybody."""
    able = {name: bool(value) for name, value in context.store.capabilities.items()}
    return {"status": "ok", "capabilities": {**able, "otlp_traces": True}}


async def _enqueue(context: Context, rollouts: Sequence[Any]) -> Sequence[Rollout]:
    """Queues rollouts in order, all or none; a known ``rollout_id`` gives the rollout that is there."""
    return await context.store.enqueue_many_rollouts(rollouts)


async def _dequeue(
    context: Context,
    limit: int = 1,
    worker_id: str | None = None,
    timeout: float = 0,
    request_id: str | None = None,
) -> Sequence[AttemptedRollout]:
    """Takes up to ``limit`` queued rollouts; waits up to ``timeout``, at most 30 s, for the first."""

    async def dequeue() -> Sequence[AttemptedRollout]:
        return await context.store.dequeue_many_rollouts(
            limit=limit, worker_id=worker_id, timeout=min(timeout, MAX_POLL_S)
        )

    return await context.polls.claim(request_id, dequeue)


async def _release(context: Context, request_id: str) -> dict[str, int]:
    """Hands back what a dequeue whose answer nobody waits for has claimed or would claim."""
    claimed = await context.polls.release(request_id)
    for item in claimed:
        with contextlib.suppress(NotFoundError, ConflictError):  # somebody has touched it since
            await context.store.release_attempt(item.rollout_id, item.attempt.attempt_id)
    return {"released": len(claimed)}


async def _wait(context: Context, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
    """Returns those that ended within ``timeout``, at most 30 s, in the order asked for."""
    timeout = MAX_POLL_S if timeout is None else min(timeout, MAX_POLL_S)
    work = context.store.wait_for_rollouts(rollout_ids, timeout)
    return await context.polls.wait(asyncio.ensure_future(work)) or ()


async def _delete(context: Context, **which: Any) -> dict[str, int]:
    """Removes rollouts that have ended, with attempts and spans."""
    return {"deleted": await context.store.delete_rollouts(**which)}


async def _end_worker(context: Context, worker_id: str) -> dict[str, int]:
    """Says that a worker is dead: its live attempts end now."""
    return {"ended": await context.store.end_worker(worker_id)}


async def _add_span(context: Context, record: Span) -> Span | None:
    """Stores a span; null when it is stored already."""
    return await context.store.add_span(record)


async def _add_spans(context: Context, spans: Sequence[Span]) -> dict[str, list[int | None]]:
    """Says for each span which ``sequence_id`` it got, null if it was stored before: the client has the rest."""
    numbers = {
        (span.rollout_id, span.attempt_id, span.span_id): span.sequence_id
        for span in await context.store.add_many_spans(spans)
    }
    return {"sequence_ids": [numbers.pop((span.rollout_id, span.attempt_id, span.span_id), None) for span in spans]}


def _about_span(arguments: Mapping[str, Any]) -> Iterable[AttemptIds]:
    yield arguments["record"].rollout_id, arguments["record"].attempt_id


def _about_spans(arguments: Mapping[str, Any]) -> Iterable[AttemptIds]:
    return {(span.rollout_id, span.attempt_id) for span in arguments["spans"]}


def _about_number(arguments: Mapping[str, Any]) -> Iterable[AttemptIds]:
    yield arguments["rollout_id"], arguments["attempt_id"]


def _about_numbers(arguments: Mapping[str, Any]) -> Iterable[AttemptIds]:
    return {(rollout_id, attempt_id) for rollout_id, attempt_id in arguments["rollout_attempt_ids"]}


def _about_rollout(arguments: Mapping[str, Any]) -> Iterable[AttemptIds]:
    yield arguments["rollout_id"], None


class MintedToken(TypedDict):
    """A token that is good for the spans of one attempt."""

    token: str
    rollout_id: str
    attempt_id: str
    expires_at: float


async def _mint_token(
    context: Context, rollout_id: str, attempt_id: str, lifetime_s: float = DEFAULT_LIFETIME_S
) -> MintedToken:
    """Makes a token with which an agent writes the spans and the reward of one attempt, and does nothing else."""
    attempts = [attempt.attempt_id for attempt in await context.store.query_attempts(rollout_id)]
    if attempt_id == "latest" and attempts:
        attempt_id = attempts[-1]
    if attempt_id not in attempts:
        raise NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
    token, expires_at = context.access.mint(rollout_id, attempt_id, lifetime_s)
    return {"token": token, "rollout_id": rollout_id, "attempt_id": attempt_id, "expires_at": expires_at}


async def _query_spans(
    context: Context, rollout_id: str | None = None, attempt_id: str | None = None, **filters: Any
) -> PaginatedResult[Span]:
    """Finds spans of one rollout, or (``rollout_id`` null) across the rollouts of a run."""
    return await context.store.query_spans(rollout_id, attempt_id, **filters)


async def _add_metrics(context: Context, run_id: str, step: int, values: dict[str, float]) -> Metrics:
    """Records the numbers of a step of a run; repeating a step adds to and replaces its values."""
    return await context.store.with_run(run_id).add_metrics(step, values)


async def _query_metrics(context: Context, run_id: str, **page: Any) -> PaginatedResult[Metrics]:
    """The metrics of a run in order of their steps."""
    return await context.store.with_run(run_id).query_metrics(**page)


S = LightningStore

ROUTES: tuple[Route, ...] = (
    Route("GET", "/health", _health),
    Route("GET", "/statistics", _call(S.statistics)),
    Route("POST", "/queues/rollouts/enqueue", _enqueue, message.EnqueueRollouts, 201),
    Route("POST", "/queues/rollouts/dequeue", _dequeue, message.DequeueRollouts),
    Route("POST", "/queues/rollouts/release", _release, message.ReleaseRollouts),
    Route("POST", "/waits/rollouts", _wait, message.WaitForRollouts),
    Route("POST", "/rollouts", _call(S.start_rollout), message.StartRollout, 201),
    Route("GET", "/rollouts", _call(S.query_rollouts), message.QueryRollouts),
    Route("POST", "/rollouts/search", _call(S.query_rollouts), message.QueryRollouts),
    Route("POST", "/rollouts/delete", _delete, message.DeleteRollouts),
    Route(
        "GET",
        "/rollouts/{rollout_id}",
        _get(S.get_rollout_by_id, "no rollout {rollout_id!r}"),
        about=_about_rollout,
    ),
    Route("POST", "/rollouts/{rollout_id}", _call(S.update_rollout), message.UpdateRollout),
    Route("POST", "/rollouts/{rollout_id}/cancel", _call(S.cancel_rollout)),
    Route("POST", "/rollouts/{rollout_id}/retry", _call(S.retry_rollout)),
    Route("GET", "/rollouts/{rollout_id}/attempts", _call(S.query_attempts), message.QueryAttempts),
    Route("POST", "/rollouts/{rollout_id}/attempts", _call(S.start_attempt), message.StartAttempt, 201),
    Route(
        "GET",
        "/rollouts/{rollout_id}/attempts/latest",
        _get(S.get_latest_attempt, "no attempt of a rollout {rollout_id!r}"),
    ),
    Route("POST", "/rollouts/{rollout_id}/attempts/{attempt_id}", _call(S.update_attempt), message.UpdateAttempt),
    Route("POST", "/rollouts/{rollout_id}/attempts/{attempt_id}/release", _call(S.release_attempt)),
    Route("POST", "/rollouts/{rollout_id}/attempts/{attempt_id}/token", _mint_token, message.MintToken, 201),
    Route("POST", "/spans", _add_span, Span, 201, _about_span),
    Route("GET", "/spans", _query_spans, message.QuerySpans),
    Route("POST", "/spans/search", _query_spans, message.QuerySpans),
    Route("POST", "/spans/batch", _add_spans, message.AddSpans, 201, _about_spans),
    Route("POST", "/spans/next", _call(S.get_next_span_sequence_id), message.NextSpanId, about=_about_number),
    Route(
        "POST",
        "/spans/next/batch",
        _call(S.get_many_span_sequence_ids),
        message.NextSpanIds,
        about=_about_numbers,
    ),
    Route("GET", "/resources", _call(S.query_resources), message.QueryResources),
    Route("POST", "/resources", _call(S.add_resources), message.PublishResources, 201),
    Route("GET", "/resources/latest", _get(S.get_latest_resources, "no resources were published in this run")),
    Route(
        "GET",
        "/resources/{resources_id}",
        _get(S.get_resources_by_id, "no resources {resources_id!r}, or not at that version"),
        message.GetResources,
    ),
    Route("POST", "/resources/{resources_id}", _call(S.update_resources), message.PublishResources),
    Route("POST", "/resources/{resources_id}/rollback", _call(S.rollback), message.Rollback),
    Route("GET", "/workers", _call(S.query_workers), message.QueryWorkers),
    Route("POST", "/workers/search", _call(S.query_workers), message.QueryWorkers),
    Route("GET", "/workers/{worker_id}", _get(S.get_worker_by_id, "no worker {worker_id!r}")),
    Route("POST", "/workers/{worker_id}", _call(S.update_worker), message.UpdateWorker),
    Route("POST", "/workers/{worker_id}/end", _end_worker),
    Route("GET", "/runs", _call(S.query_runs), message.ReadPage),
    Route("POST", "/runs", _call(S.create_run), message.CreateRun, 201),
    Route("GET", "/runs/{run_id}", _get(S.get_run_by_id, "no run {run_id!r}")),
    Route("POST", "/runs/{run_id}", _call(S.update_run), message.UpdateRun),
    Route("GET", "/runs/{run_id}/metrics", _query_metrics, message.ReadPage),
    Route("POST", "/runs/{run_id}/metrics", _add_metrics, message.AddMetrics, 201),
)
