"""``agl report``: prints the report of a run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from agentlightning.cli import echo
from agentlightning.errors import ConfigError, StoreError
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.run.directory import inside, read_record
from agentlightning_plugins.shared.terminal import find_store, json_option, print_json

if TYPE_CHECKING:
    from agentlightning.store.protocol import LightningStore

T = TypeVar("T")


@click.command("report")
@click.argument("where", required=False, metavar="[RUN_DIR]")
@click.option("--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write one web page instead.")
@click.option("--store", "url", metavar="URL", help="The store of the run, if not in RUN_DIR. Default: AGL_STORE.")
@json_option
def command(where: str | None, page: Path | None, url: str | None, as_json: bool) -> None:
    """Print the report of the run in RUN_DIR: rollouts, metrics, errors and learned resources.

    The default is the newest run under runs/.
    """
    from agentlightning_plugins.commands.report.report import REPORT_NAME, read_report, write_html

    directory = Path(find_store(where))
    if page is not None:
        if as_json:
            raise click.UsageError("--html writes a file and --json prints values; choose one of them")
        try:
            _with_store(directory, url, lambda store: write_html(store, directory, page))
        except OSError as error:
            raise ConfigError(f"{error.filename or directory} cannot be written: {error.strerror or error}") from error
        echo(str(page))
        return
    written = directory / REPORT_NAME
    try:
        report = _with_store(directory, url, lambda store: read_report(store, directory))
    except StoreError as error:
        if as_json or not written.is_file():
            raise
        echo(f"{error}\nThe report that was written when the run ended:\n", err=True)
        echo(inside(directory, written).read_text(encoding="utf-8"), nl=False)
        return
    if as_json:
        print_json(report.to_json())
    else:
        echo(report.to_markdown(), nl=False)


def _with_store(directory: Path, url: str | None, action: Callable[[LightningStore], Awaitable[T]]) -> T:
    """Returns the result of an action on the store of a run."""

    async def main() -> T:
        read_record(directory)
        store = _open_store(directory, url)
        try:
            return await action(store)
        finally:
            await store.close()

    return asyncio.run(main())


def _open_store(directory: Path, url: str | None) -> LightningStore:
    """Opens the store in the directory, or the one that the user names.

    The configuration in the directory may name another store; it is not asked, because the directory may be someone
    else's, and its variables and our token would go where that person wants.
    """
    from agentlightning.store.factory import create_store

    if url is None and not (directory / "store.db").is_file() and (url := os.environ.get("AGL_STORE")) is None:
        raise ConfigError(
            f"{directory} has no store; see {directory}/report.md, written when the run ended, or name the store: "
            f"agl report {directory} --store URL"
        )
    return create_store(str(directory)) if url is None else create_store(url, run=directory.resolve().name)


@hookimpl
def components() -> Iterable[Component]:
    where = "agentlightning_plugins.commands.report.report"
    return [
        Component("report", "html", f"{where}:write_html", summary="report.html in the run's directory"),
        Component("report", "markdown", f"{where}:write_report", summary="report.md in the run's directory"),
    ]


@hookimpl
def add_commands(cli: click.Group) -> None:
    cli.add_command(command)
