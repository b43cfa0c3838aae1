"""``agl workers``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from agentlightning.event import AttemptFinished, RolloutStarted
from agentlightning.store.protocol import LightningStore
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
@with_store
async def list_workers(store: LightningStore, as_json: bool) -> None:
    """List workers, sorted by their last heartbeat."""
    page = await store.query_workers(sort_by="last_heartbeat_time", sort_order="desc")
    rows = [(w.worker_id, w.status, _ago(w.last_heartbeat_time), w.current_rollout_id) for w in page]
    print_page(as_json, page, ("worker", "status", "last heartbeat", "rollout"), rows)


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
    """Declare a worker dead: its attempts end at once instead of at the end of their lease."""
    found(await store.get_worker_by_id(worker_id), "worker", worker_id)
    ended = await store.end_worker(worker_id)
    print_result(as_json, {"ended": ended}, f"{ended} attempts ended")


@workers.command("export")
@export_path
@with_store
async def export_workers(store: LightningStore, path: Path, as_json: bool) -> None:
    """Write workers to PATH (.jsonl or .parquet)."""
    await export(every(store.query_workers), path, "workers", as_json)


def _ago(instant: float | None) -> str:
    return "never" if instant is None else f"{max(time.time() - instant, 0):.0f} s ago"
