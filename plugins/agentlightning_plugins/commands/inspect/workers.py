"""``agl workers``."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from agentlightning.event import AttemptFinished, RolloutStarted
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Worker, WorkerStatus
from agentlightning_plugins.commands.terminal import (
    every,
    export,
    export_path,
    found,
    print_event,
    print_fields,
    print_json,
    print_page,
    print_result,
    show_time,
    to_json,
    with_store,
)


@click.group("workers")
def workers() -> None:
    """List, show, follow, end and export workers."""


@workers.command("list")
@click.option("--status", multiple=True, type=click.Choice(get_args(WorkerStatus)), help="Only these; may be repeated.")
@click.option("--contains", metavar="TEXT", help="Only workers whose id contains this.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(-1), help="-1 for all.")
@with_store
async def list_workers(
    store: LightningStore, status: tuple[str, ...], contains: str | None, limit: int, as_json: bool
) -> None:
    """List workers, sorted by their last heartbeat."""
    page = await store.query_workers(
        status_in=status or None,
        worker_id_contains=contains,
        sort_by="last_heartbeat_time",
        sort_order="desc",
        limit=limit,
    )
    rows = [(w.worker_id, w.status, _ago(w.last_heartbeat_time, store.now()), _rollouts(w)) for w in page]
    print_page(as_json, page, ("worker", "status", "last heartbeat", "rollouts"), rows)


@workers.command("show")
@click.argument("worker_id")
@with_store
async def show_worker(store: LightningStore, worker_id: str, as_json: bool) -> None:
    """Show a worker."""
    worker = to_json(found(await store.get_worker_by_id(worker_id), "worker", worker_id))
    (print_json if as_json else print_fields)(worker)


@workers.command("follow")
@with_store
async def follow_workers(store: LightningStore, as_json: bool) -> None:
    """Print each worker that starts or finishes an attempt, until Ctrl-C."""
    async for event in store.subscribe(["rollout_started", "attempt_finished"]):
        if not isinstance(event, RolloutStarted | AttemptFinished):
            continue
        attempt = await store.get_latest_attempt(event.rollout_id)
        if attempt is None or attempt.worker_id is None:
            continue
        worker = await store.get_worker_by_id(attempt.worker_id)
        if worker is None:
            continue
        text = f"{show_time(event.time)} {worker.worker_id} {worker.status} {worker.current_rollout_id or ''}"
        print_event(as_json, to_json(worker), text)


@workers.command("end")
@click.argument("worker_id")
@with_store
async def end_worker(store: LightningStore, worker_id: str, as_json: bool) -> None:
    """Declare a worker dead: its attempts end immediately instead of when their lease expires."""
    found(await store.get_worker_by_id(worker_id), "worker", worker_id)
    ended = await store.end_worker(worker_id)
    print_result(as_json, {"ended": ended}, f"{ended} attempts ended")


@workers.command("export")
@export_path
@with_store
async def export_workers(store: LightningStore, path: Path, as_json: bool) -> None:
    """Write workers to PATH (.jsonl or .parquet)."""
    await export(every(store.query_workers), path, "workers", as_json)


def _ago(instant: float | None, now: float) -> str:
    return "never" if instant is None else f"{max(now - instant, 0):.0f} s ago"


def _rollouts(worker: Worker) -> str:
    """Returns the newest rollout that a worker runs, and the number of its other rollouts."""
    others = len(worker.attempt_ids or ()) - 1
    return f"{worker.current_rollout_id or ''}{f' and {others} more' if others > 0 else ''}"
