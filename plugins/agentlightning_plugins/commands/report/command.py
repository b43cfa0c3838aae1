"""``agl report``: prints the report of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from agentlightning.cli import echo
from agentlightning.errors import ConfigError, StoreError
from agentlightning.run.directory import read_record
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.commands.report.report import REPORT_NAME, Report, read_report
from agentlightning_plugins.shared.terminal import json_option, print_json


@click.command("report")
@click.argument("directory", type=click.Path(path_type=Path), metavar="RUN_DIR")
@click.option("--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write one web page instead.")
@click.option("--png", "picture", type=click.Path(path_type=Path, dir_okay=False), help="Write the reward curve.")
@json_option
def command(directory: Path, page: Path | None, picture: Path | None, as_json: bool) -> None:
    """Print the report of the run in RUN_DIR: rollouts, metrics, errors and learned resources."""
    if page is not None or picture is not None:
        if as_json:
            raise click.UsageError("--html and --png write files and --json prints values; choose one of them")
        for file in asyncio.run(_write_files(directory, page, picture)):
            echo(str(file))
        return
    written = directory / REPORT_NAME
    try:
        report = asyncio.run(_read(directory))
    except StoreError as error:
        if as_json or not written.is_file():
            raise
        echo(f"{error}\nThe report that was written when the run ended:\n", err=True)
        echo(written.read_text(encoding="utf-8"), nl=False)
        return
    if as_json:
        print_json(report.to_json())
    else:
        echo(report.to_markdown(), nl=False)


async def _read(directory: Path) -> Report:
    read_record(directory)
    store = _open_store(directory)
    try:
        return await read_report(store, directory)
    finally:
        await store.close()


async def _write_files(directory: Path, page: Path | None, picture: Path | None) -> list[Path]:
    from agentlightning_plugins.commands.report.html import write_html, write_png

    read_record(directory)
    store = _open_store(directory)
    written = []
    try:
        if page is not None:
            written.append(await write_html(store, directory, page))
        if picture is not None:
            written.append(await write_png(store, picture))
        return written
    except OSError as error:
        raise ConfigError(f"{error.filename or directory} cannot be written: {error.strerror or error}") from error
    finally:
        await store.close()


def _open_store(directory: Path) -> LightningStore:
    from agentlightning_plugins.shared.configuration.assembly import open_store
    from agentlightning_plugins.shared.configuration.config import read_config
    from agentlightning_plugins.shared.configuration.document import read_document
    from agentlightning_plugins.shared.configuration.run_directory import CONFIG_NAME

    if (directory / "store.db").is_file():
        return create_store(f"sqlite:///{directory / 'store.db'}")
    config = directory / CONFIG_NAME
    if config.is_file() and (checked := read_config(read_document(config))).store is not None:
        return open_store(checked, directory.resolve())
    raise ConfigError(f"{directory} has no store; see {directory / REPORT_NAME}, written when the run ended")
