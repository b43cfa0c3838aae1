"""``agl workers``."""

from __future__ import annotations

import time

import click

from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.inspection.access import found, with_store
from agentlightning_plugins.inspection.output import print_fields, print_json, print_table, to_json


@click.group("workers")
def workers() -> None:
    """List, show and end workers."""


@workers.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_store
async def list_workers(store: LightningStore, as_json: bool) -> None:
    """List workers, those heard of last first."""
    page = await store.query_workers(sort_by="last_heartbeat_time", sort_order="desc")
    if as_json:
        print_json([to_json(worker) for worker in page])
        return
    print_table(
        ("worker", "status", "heard of", "rollout"),
        [(w.worker_id, w.status, _ago(w.last_heartbeat_time), w.current_rollout_id) for w in page],
    )


@workers.command("show")
@click.argument("worker_id")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_store
async def show_worker(store: LightningStore, worker_id: str, as_json: bool) -> None:
    """Show a worker."""
    worker = to_json(found(await store.get_worker_by_id(worker_id), "worker", worker_id))
    (print_json if as_json else print_fields)(worker)


@workers.command("end")
@click.argument("worker_id")
@with_store
async def end_worker(store: LightningStore, worker_id: str) -> None:
    """Say that a worker is dead: what it ran is run again, or failed, without waiting for its lease."""
    found(await store.get_worker_by_id(worker_id), "worker", worker_id)
    click.echo(f"{await store.end_worker(worker_id)} attempts ended")


def _ago(instant: float | None) -> str:
    return "never" if instant is None else f"{max(time.time() - instant, 0):.0f} s ago"
