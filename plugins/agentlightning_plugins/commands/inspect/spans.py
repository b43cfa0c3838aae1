"""``agl spans``."""

from __future__ import annotations

from pathlib import Path

import click

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
    shorten,
    show_time,
    to_json,
    with_store,
)


@click.group("spans")
def spans() -> None:
    """List, show, follow and export spans."""


@spans.command("list")
@click.argument("rollout_id", required=False)
@click.option("--attempt", metavar="ID", help="Only spans of this attempt; `latest` for the newest.")
@click.option("--name", help="Only spans whose name contains this.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(min=1), help="Show at most N.")
@with_store
async def list_spans(
    store: LightningStore, rollout_id: str | None, attempt: str | None, name: str | None, limit: int, as_json: bool
) -> None:
    """List the spans of ROLLOUT_ID, or of all rollouts."""
    if rollout_id is not None:
        found(await store.get_rollout_by_id(rollout_id), "rollout", rollout_id)
    page = await store.query_spans(rollout_id, attempt, name_contains=name, limit=limit)
    rows = [
        (s.rollout_id, s.sequence_id, s.name, s.status.status_code, s.span_id, shorten(dict(s.attributes)))
        for s in page
    ]
    print_page(as_json, page, ("rollout", "", "span", "status", "id", "attributes"), rows)


@spans.command("show")
@click.argument("rollout_id")
@click.argument("span_id")
@with_store
async def show_span(store: LightningStore, rollout_id: str, span_id: str, as_json: bool) -> None:
    """Show one span of a rollout with all its attributes."""
    page = await store.query_spans(rollout_id, span_id=span_id)
    span = to_json(found(page.items[0] if page.items else None, "span", span_id))
    if as_json:
        print_json(span)
        return
    attributes = span.pop("attributes")
    print_fields(span)
    print_fields({f"  {name}": value for name, value in attributes.items()})


@spans.command("follow")
@click.argument("rollout_id", required=False)
@with_store
async def follow_spans(store: LightningStore, rollout_id: str | None, as_json: bool) -> None:
    """Print the spans of each attempt of ROLLOUT_ID, or of all rollouts, when it ends, until Ctrl-C."""
    async for event in store.subscribe(["attempt_finished"]):
        if event.kind != "attempt_finished" or rollout_id not in (None, event.rollout_id):
            continue
        async for span in every(store.query_spans, event.rollout_id, event.attempt_id):
            shown = shorten(dict(span.attributes), 100)
            text = f"{show_time(span.end_time)} {span.rollout_id} {span.sequence_id} {span.name} {shown}"
            print_event(as_json, to_json(span), text)


@spans.command("export")
@export_path
@click.option("--rollout", "rollout_id", metavar="ID", help="Only spans of this rollout; default is all.")
@with_store
async def export_spans(store: LightningStore, path: Path, rollout_id: str | None, as_json: bool) -> None:
    """Write spans to PATH (.jsonl or .parquet)."""
    await export(every(store.query_spans, rollout_id), path, "spans", as_json)
