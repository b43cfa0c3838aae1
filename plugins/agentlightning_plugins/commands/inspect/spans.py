"""``agl spans``."""

from __future__ import annotations

from pathlib import Path

import click

from agentlightning.cli import print_table
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.commands.terminal.access import every, found, with_store
from agentlightning_plugins.commands.terminal.output import (
    export,
    json_option,
    print_fields,
    print_json,
    print_line,
    shorten,
    show_time,
    to_json,
)


@click.group("spans")
def spans() -> None:
    """List, show, follow and export spans."""


@spans.command("list")
@click.argument("rollout_id", required=False)
@click.option("--attempt", metavar="ID", help="Of one attempt, or of the `latest`.")
@click.option("--name", help="Only spans whose name contains this.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(min=1), help="Show at most N.")
@json_option
@with_store
async def list_spans(
    store: LightningStore, rollout_id: str | None, attempt: str | None, name: str | None, limit: int, as_json: bool
) -> None:
    """List the spans of ROLLOUT_ID, or of all rollouts."""
    if rollout_id is not None:
        found(await store.get_rollout_by_id(rollout_id), "rollout", rollout_id)
    page = await store.query_spans(rollout_id, attempt, name_contains=name, limit=limit)
    if as_json:
        print_json([to_json(span) for span in page])
        return
    print_table(
        ("rollout", "", "span", "status", "id", "attributes"),
        [
            (
                span.rollout_id,
                span.sequence_id,
                span.name,
                span.status.status_code,
                span.span_id,
                shorten(dict(span.attributes)),
            )
            for span in page
        ],
    )
    if page.total > len(page):
        click.echo(f"{len(page)} of {page.total}; --limit shows more", err=True)


@spans.command("show")
@click.argument("rollout_id")
@click.argument("span_id")
@json_option
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
@json_option
@with_store
async def follow_spans(store: LightningStore, rollout_id: str | None, as_json: bool) -> None:
    """Print the spans of each attempt as it ends, of ROLLOUT_ID or of all rollouts, until Ctrl-C."""
    async for event in store.subscribe(["attempt_finished"]):
        if event.kind != "attempt_finished" or rollout_id not in (None, event.rollout_id):
            continue
        async for span in every(store.query_spans, event.rollout_id, event.attempt_id):
            if as_json:
                print_line(to_json(span))
                continue
            shown = shorten(dict(span.attributes), 100)
            click.echo(f"{show_time(span.end_time)} {span.rollout_id} {span.sequence_id} {span.name} {shown}")


@spans.command("export")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--rollout", "rollout_id", metavar="ID", help="Of one rollout; default is all.")
@json_option
@with_store
async def export_spans(store: LightningStore, path: Path, rollout_id: str | None, as_json: bool) -> None:
    """Write spans to PATH (.jsonl or .parquet)."""
    await export(every(store.query_spans, rollout_id), path, "spans", as_json)
