"""``agl resources``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from agentlightning.cli import echo
from agentlightning.event import ResourcesPublished
from agentlightning.resources import LLM, ResourcesUpdate
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
    shorten,
    show_time,
    to_json,
    with_store,
)


@click.group("resources")
def resources() -> None:
    """List, show, follow, promote, roll back and export published resources."""


@resources.command("list")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(min=1), help="Show the newest N.")
@with_store
async def list_resources(store: LightningStore, limit: int, as_json: bool) -> None:
    """List all versions of all snapshots, the newest first."""
    page = await store.query_resources(sort_by="update_time", sort_order="desc", limit=limit)
    latest = await store.get_latest_resources()
    rows = [
        (
            update.resources_id,
            update.version,
            show_time(update.update_time),
            "latest" if latest is not None and update.resources_id == latest.resources_id else "",
            ", ".join(f"{name} ({kind['resource_type']})" for name, kind in _plain(update)["resources"].items()),
        )
        for update in page
    ]
    print_page(as_json, page, ("resources", "version", "updated", "", "contents"), rows, _plain)


@resources.command("show")
@click.argument("resources_id", default="latest")
@click.option("--version", type=click.IntRange(min=1), help="Version; default is the newest.")
@with_store
async def show_resources(store: LightningStore, resources_id: str, version: int | None, as_json: bool) -> None:
    """Show a snapshot: RESOURCES_ID, or the latest."""
    shown = _plain(await _find(store, resources_id, version))
    if as_json:
        print_json(shown)
        return
    contents = shown.pop("resources")
    print_fields(shown)
    for name, resource in contents.items():
        echo(f"\n{name}")
        print_fields(resource)


@resources.command("follow")
@with_store
async def follow_resources(store: LightningStore, as_json: bool) -> None:
    """Print resources as they are published, until Ctrl-C."""
    async for event in store.subscribe(["resources_published"]):
        if isinstance(event, ResourcesPublished):
            update = await store.get_resources_by_id(event.resources_id, event.version)
            if update is not None:
                shown = _plain(update)
                contents = shorten(shown["resources"], 120)
                text = f"{show_time(event.time)} {event.resources_id} {event.version} {contents}"
                print_event(as_json, shown, text)


@resources.command("promote")
@click.argument("resources_id")
@with_store
async def promote_resources(store: LightningStore, resources_id: str, as_json: bool) -> None:
    """Make RESOURCES_ID, a snapshot or one version of it (rs-1@3), the latest resources of the run."""
    update = await store.promote(resources_id)
    print_result(as_json, _plain(update), f"{resources_id} is now the latest, as {update.version_id}")


@resources.command("rollback")
@click.argument("resources_id")
@click.argument("version", type=click.IntRange(min=1))
@with_store
async def rollback_resources(store: LightningStore, resources_id: str, version: int, as_json: bool) -> None:
    """Publish an earlier VERSION of a snapshot again, as its newest version."""
    update = await store.rollback(resources_id, version)
    print_result(as_json, _plain(update), f"{resources_id}: version {update.version} equals version {version}")


@resources.command("export")
@export_path
@with_store
async def export_resources(store: LightningStore, path: Path, as_json: bool) -> None:
    """Write all versions of all snapshots, without keys, to PATH (.jsonl or .parquet)."""
    await export((_without_keys(update) async for update in every(store.query_resources)), path, "snapshots", as_json)


def _without_keys(update: ResourcesUpdate) -> ResourcesUpdate:
    """Returns a copy of a snapshot without the API keys, which must not be printed or written to a file."""
    resources = {
        name: resource.model_copy(update={"api_key": None}) if isinstance(resource, LLM) else resource
        for name, resource in update.resources.items()
    }
    return update.model_copy(update={"resources": resources})


def _plain(update: ResourcesUpdate) -> dict[str, Any]:
    shown: dict[str, Any] = to_json(_without_keys(update))
    return shown


async def _find(store: LightningStore, resources_id: str, version: int | None) -> ResourcesUpdate:
    if resources_id != "latest":
        return found(await store.get_resources_by_id(resources_id, version), "resources", resources_id)
    latest = found(await store.get_latest_resources(), "resources", "latest")
    if version is None:
        return latest
    return found(await store.get_resources_by_id(latest.resources_id, version), "version", str(version))
