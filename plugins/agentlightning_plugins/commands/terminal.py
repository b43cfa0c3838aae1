"""Library: opening a store from the command line, printing records at a terminal, and exporting them to files."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import click
from pydantic import BaseModel

from agentlightning.cli import echo
from agentlightning.errors import ConfigError, NotFoundError, StoreError
from agentlightning.logging import printable
from agentlightning.resources import ResourcesUpdate
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, PaginatedResult, Span, Worker

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
_PAGE = 500
_BATCH = 1000
_RECORDS: dict[str, type[BaseModel]] = {
    "rollouts": AttemptedRollout,
    "snapshots": ResourcesUpdate,
    "spans": Span,
    "workers": Worker,
}
"""Type of the records in each Parquet export; the fields of the type are the columns of the file."""
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
export_path = click.argument("path", type=click.Path(path_type=Path, dir_okay=False))


def with_store(command: Callable[Concatenate[LightningStore, P], Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Adds ``--json``, ``--store`` and ``--run`` to a coroutine function, which gets the opened store."""

    @json_option
    @click.option(
        "--store",
        "where",
        metavar="URL",
        help="URL of the store, or directory of a run. Default: AGL_STORE, else ./agl.db, else http://127.0.0.1:4747.",
    )
    @click.option("--run", metavar="NAME", help="A run of a shared store; default is `default`.")
    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        where, run = kwargs.pop("where"), kwargs.pop("run")

        async def main() -> None:
            store = open_store(where if isinstance(where, str) else None, run if isinstance(run, str) else None)
            try:
                await command(store, *args, **kwargs)
            finally:
                await store.close()

        try:
            asyncio.run(main())
        except StoreError as error:
            if type(error) is StoreError and where is None and "AGL_STORE" not in os.environ:
                raise StoreError(f"{error} Select another store with --store URL or --store runs/NAME.") from error
            raise

    return wrapper


def open_store(where: str | None, run: str | None = None) -> LightningStore:
    """Opens the store that the user names, or a default.

    Args:
        where: a URL or the directory of a run. None: AGL_STORE, else ``agl.db`` in the working directory, else
            ``agl store`` on its default port.
        run: name of the run; None is ``default``.

    Raises:
        UsageError: the store does not exist.
    """
    where = where or os.environ.get("AGL_STORE")
    if where is None:
        where = "sqlite:///agl.db" if Path("agl.db").is_file() else "http://127.0.0.1:4747"
    if where.startswith("sqlite:///") and not Path(where.removeprefix("sqlite:///").split("?")[0]).is_file():
        raise click.UsageError(f"--store {where}: the file does not exist")
    return create_store(where, run=run)


async def every(query: Callable[..., Awaitable[PaginatedResult[T]]], *args: Any, **conditions: Any) -> AsyncIterator[T]:
    """Yields the items of a query. Reads page by page, so memory stays bounded."""
    offset, cursor = 0, None
    while True:
        place = {"offset": offset} if cursor is None else {"cursor": cursor}
        page = await query(*args, limit=_PAGE, **place, **conditions)
        for item in page.items:
            yield item
        if len(page.items) < _PAGE:
            return
        offset, cursor = offset + _PAGE, page.cursor


def found(item: T | None, what: str, id: str) -> T:
    """Returns ``item``, the result of a getter.

    Raises:
        NotFoundError: ``item`` is None.
    """
    if item is None:
        raise NotFoundError(f"no {what} {id!r} in this store")
    return item


def to_json(record: BaseModel) -> Any:
    """Converts a record to plain JSON values."""
    return record.model_dump(mode="json")


def print_json(value: Any) -> None:
    """Prints plain values as indented JSON."""
    echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_result(as_json: bool, value: dict[str, Any], text: str) -> None:
    """Prints the result of a command, as JSON or as text."""
    if as_json:
        print_json(value)
    else:
        echo(text)


def print_event(as_json: bool, value: dict[str, Any], text: str) -> None:
    """Prints one line, as JSON or as text."""
    echo(json.dumps(value, ensure_ascii=False) if as_json else text)


def print_page(
    as_json: bool,
    page: PaginatedResult[M],
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    to_json: Callable[[M], Any] = to_json,
) -> None:
    """Prints the result of a query, as JSON or as a table; stderr shows how many records the table omits."""
    if as_json:
        print_json([to_json(record) for record in page])
        return
    print_table(columns, rows)
    if page.total > len(page):
        echo(f"{len(page)} of {page.total}; --limit shows more", err=True)


def print_fields(record: dict[str, Any]) -> None:
    """Prints one record: one line for each field that is set."""
    for name, value in record.items():
        if value not in (None, {}, []):
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            echo(f"{name:<22} {shown}")


def show_time(instant: float | None) -> str:
    """Formats a Unix time as local time, with the date unless it is today."""
    if instant is None:
        return ""
    then, today = time.localtime(instant), time.localtime()
    is_today = (then.tm_year, then.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", then)


def shorten(value: Any, length: int = 60) -> str:
    """Formats a value as one line of at most ``length`` characters: text as it is, other values as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


def json_or_text(text: str) -> Any:
    """Parses an argument: returns its value if it is JSON, otherwise its text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


async def export(records: AsyncIterator[M], path: Path, what: str, as_json: bool) -> None:
    """Writes records to a .jsonl or .parquet file, and prints their number.

    The file appears only when it is complete. In Parquet, mappings and lists are stored as JSON text.

    Args:
        records: the records to write.
        path: the file.
        what: name of the records; for a Parquet file, ``rollouts``, ``snapshots``, ``spans`` or ``workers``.
        as_json: print JSON.

    Raises:
        ConfigError: the suffix is not supported, or the file cannot be written.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{path}: the file name of an export must end in .jsonl or .parquet")
    draft = path.with_name(path.name + ".draft")
    try:
        if path.suffix == ".jsonl":
            count = await _write_lines(records, draft)
        else:
            count = await _write_parquet(records, draft, _RECORDS[what])
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
    print_result(as_json, {"path": str(path), "count": count}, f"{count} {what} in {path}")


async def _write_lines(records: AsyncIterator[BaseModel], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        async for record in records:
            file.write(record.model_dump_json() + "\n")
            count += 1
    return count


async def _write_parquet(records: AsyncIterator[BaseModel], path: Path, kind: type[BaseModel]) -> int:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("writing Parquet needs pyarrow. Install with: pip install 'lightning[datasets]'") from error
    schema = arrow.schema([(name, arrow.type_for_alias(_column_type(name))) for name in kind.model_fields])
    count = 0
    batch: list[dict[str, Any]] = []
    with parquet.ParquetWriter(path, schema) as writer:
        async for record in records:
            batch.append({name: _to_cell(name, value) for name, value in to_json(record).items()})
            count += 1
            if len(batch) == _BATCH:
                writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
                batch.clear()
        if batch:
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
    return count


def _column_type(name: str) -> str:
    if name == "reward" or name.endswith(("_time", "_at")):
        return "float64"
    return "int64" if name in ("sequence_id", "version", "spans_dropped") else "string"


def _to_cell(name: str, value: Any) -> Any:
    if value is None or isinstance(value, str) or _column_type(name) != "string":
        return value
    return json.dumps(value, ensure_ascii=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints rows in columns. Wraps only the last column, and only on a terminal; never truncates text."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    lines = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    *widths, last = (max(map(cell_len, cells)) for cells in zip(columns, *lines, strict=True))
    left = sum(width + 2 for width in widths)
    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        last = min(last, max(24, console.width - left - 2))
    console.width = left + last + 2  # rich before 14.2 pads the last column too
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column, width in zip(columns, (*widths, last), strict=True):
        table.add_column(column, overflow="fold", width=width)
    for line in lines:
        table.add_row(*line)
    console.print(table)
