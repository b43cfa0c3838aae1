"""The REST contract as a table: each row says which store method answers a request, and with which body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentlightning.errors import NotFoundError
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Metrics, PaginatedResult, Rollout, Run, Span
from agentlightning_plugins import store_message as message
from agentlightning_plugins.store_message import MAX_POLL_S
from agentlightning_plugins.store_server.polling import Polls


class Context(NamedTuple):
    """What a request works with."""

    store: LightningStore
    """As seen from the run that the request names."""
    polls: Polls


Answer = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the REST contract."""

    method: str
    path: str
    """Below the prefix; ``{names}`` become keyword arguments of ``answer``."""
    answer: Answer
    """Called with the context, the path's names and the keys of the message; a Record comes whole, as ``record``."""
    message: Any = None
    """Type of the body, or of the query string for GET."""
    status: int = 200


def _call(method: Callable[..., Awaitable[Any]]) -> Answer:
    """Answers with a method of the store, as it is."""
    name = method.__name__

    def answer(context: Context, **arguments: Any) -> Awaitable[Any]:
        return getattr(context.store, name)(**arguments)  # type: ignore[no-any-return] # each is a coroutine method

    return answer


def _get(method: Callable[..., Awaitable[Any]], missing: str) -> Answer:
    """Answers with a getter of the store, and with 404 where it returns None."""
    name = method.__name__

    async def answer(context: Context, **arguments: Any) -> Any:
        record = await getattr(context.store, name)(**arguments)
        if record is None:
            raise NotFoundError(missing.format(**arguments))
        return record

    return answer


async def _health(context: Context) -> dict[str, Any]:
    return {"status": "ok", "capabilities": context.store.capabilities}


async def _enqueue(context: Context, rollouts: Sequence[Any]) -> Sequence[Rollout]:
    return await context.store.enqueue_many_rollouts(rollouts)


async def _dequeue(
    context: Context,
    limit: int = 1,
    worker_id: str | None = None,
    timeout: float = 0,
    request_id: str | None = None,
) -> Sequence[AttemptedRollout]:
    async def dequeue() -> Sequence[AttemptedRollout]:
        return await context.store.dequeue_many_rollouts(
            limit=limit, worker_id=worker_id, timeout=min(timeout, MAX_POLL_S)
        )

    return await context.polls.claim(request_id, dequeue)


async def _release(context: Context, request_id: str) -> dict[str, int]:
    claimed = await context.polls.release(request_id)
    for item in claimed:
        rollout = await context.store.get_rollout_by_id(item.rollout_id)
        if isinstance(rollout, AttemptedRollout) and rollout.attempt == item.attempt:  # nobody has touched it since
            await context.store.update_rollout(item.rollout_id, status="requeuing")
    return {"released": len(claimed)}


async def _wait(context: Context, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
    timeout = MAX_POLL_S if timeout is None else min(timeout, MAX_POLL_S)
    work = context.store.wait_for_rollouts(rollout_ids, timeout)
    return await context.polls.wait(asyncio.ensure_future(work)) or ()


async def _delete(context: Context, rollout_ids: Sequence[str]) -> dict[str, int]:
    return {"deleted": await context.store.delete_rollouts(rollout_ids)}


async def _add_span(context: Context, record: Span) -> Span | None:
    return await context.store.add_span(record)


async def _add_spans(context: Context, spans: Sequence[Span]) -> dict[str, list[int | None]]:
    """Says for each span which ``sequence_id`` it got, null if it was stored before: the client has the rest."""
    numbers = {
        (span.rollout_id, span.attempt_id, span.span_id): span.sequence_id
        for span in await context.store.add_many_spans(spans)
    }
    return {"sequence_ids": [numbers.pop((span.rollout_id, span.attempt_id, span.span_id), None) for span in spans]}


async def _query_spans(
    context: Context, rollout_id: str | None = None, attempt_id: str | None = None, **filters: Any
) -> PaginatedResult[Span]:
    return await context.store.query_spans(rollout_id, attempt_id, **filters)


async def _get_run(context: Context, run_id: str) -> Run:
    for run in await context.store.query_runs():
        if run.run_id == run_id:
            return run
    raise NotFoundError(f"no run {run_id!r}")


async def _add_metrics(context: Context, run_id: str, step: int, values: dict[str, float]) -> Metrics:
    return await context.store.with_run(run_id).add_metrics(step, values)


async def _query_metrics(context: Context, run_id: str, **page: Any) -> PaginatedResult[Metrics]:
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
    Route("POST", "/rollouts/delete", _delete, message.RolloutIds),
    Route("GET", "/rollouts/{rollout_id}", _get(S.get_rollout_by_id, "no rollout {rollout_id!r}")),
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
    Route("POST", "/spans", _add_span, Span, 201),
    Route("GET", "/spans", _query_spans, message.QuerySpans),
    Route("POST", "/spans/search", _query_spans, message.QuerySpans),
    Route("POST", "/spans/batch", _add_spans, message.AddSpans, 201),
    Route("POST", "/spans/next", _call(S.get_next_span_sequence_id), message.NextSpanId),
    Route("POST", "/spans/next/batch", _call(S.get_many_span_sequence_ids), message.NextSpanIds),
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
    Route("GET", "/workers", _call(S.query_workers), message.QueryWorkers),
    Route("POST", "/workers/search", _call(S.query_workers), message.QueryWorkers),
    Route("GET", "/workers/{worker_id}", _get(S.get_worker_by_id, "no worker {worker_id!r}")),
    Route("POST", "/workers/{worker_id}", _call(S.update_worker), message.UpdateWorker),
    Route("GET", "/runs", _call(S.query_runs), message.ReadPage),
    Route("POST", "/runs", _call(S.create_run), message.CreateRun, 201),
    Route("GET", "/runs/{run_id}", _get_run),
    Route("POST", "/runs/{run_id}", _call(S.update_run), message.UpdateRun),
    Route("GET", "/runs/{run_id}/metrics", _query_metrics, message.ReadPage),
    Route("POST", "/runs/{run_id}/metrics", _add_metrics, message.AddMetrics, 201),
)
