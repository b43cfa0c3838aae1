"""``agl report``: prints the report of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import click

from agentlightning.cli import echo
from agentlightning.errors import ConfigError, StoreError
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.run.directory import inside, read_record
from agentlightning_plugins.shared.lazy import lazy_commands
from agentlightning_plugins.shared.terminal import (
    StoreCommand,
    find_store,
    json_option,
    print_json,
    run_option,
    store_option,
    use_store,
)


@click.command("report", cls=StoreCommand)
@click.argument("directory", required=False, type=click.Path(path_type=Path), metavar="")
@click.option("--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write one web page instead.")
@store_option
@run_option
@json_option
def command(directory: Path | None, page: Path | None, where: str | None, run: str | None, as_json: bool) -> None:
    """Print the report of a run: rollouts, metrics, errors and learned resources.

    If the store of the run in RUN_DIR is elsewhere, name both: agl report RUN_DIR --store URL.
    """
    from agentlightning_plugins.commands.report.report import REPORT_NAME, read_report, write_html

    if directory is None:
        where = find_store(where)
        directory = None if "://" in where else Path(where)
    else:
        run = run or directory.resolve().name
    if directory is not None:
        read_record(directory)  # fails here, before the store is opened
        # The configuration in the directory may name a store. It is not asked: the directory may be someone else's, and
        # its variables and our token would go where that person wants.
        where = where or os.environ.get("AGL_STORE")
        if not where:
            raise ConfigError(
                f"{directory} has no store; see {directory}/report.md, written when the run ended, or name the store: "
                f"agl report {directory} --store URL"
            )
    if page is not None:
        if as_json:
            raise click.UsageError("--html writes a file and --json prints values; choose one of them")
        try:
            use_store(where, run, lambda store: write_html(store, directory, page))
        except OSError as error:
            raise ConfigError(f"{error.filename or page} cannot be written: {error.strerror or error}") from error
        echo(str(page))
        return
    try:
        report = use_store(where, run, lambda store: read_report(store, directory))
    except StoreError as error:
        if as_json or directory is None or not (written := directory / REPORT_NAME).is_file():
            raise
        echo(f"{error}\nThe report that was written when the run ended:\n", err=True)
        echo(inside(directory, written).read_text(encoding="utf-8"), nl=False)
        return
    if as_json:
        print_json(report.to_json())
    else:
        echo(report.to_markdown(), nl=False)


@hookimpl
def components() -> Iterable[Component]:
    where = "agentlightning_plugins.commands.report.report"
    return [
        Component("report", "html", f"{where}:write_html", summary="report.html in the run's directory"),
        Component("report", "markdown", f"{where}:write_report", summary="report.md in the run's directory"),
    ]


add_commands = lazy_commands(f"{__name__}:command")
