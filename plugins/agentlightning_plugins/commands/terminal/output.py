"""Prints records at the terminal, and writes them to files."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic import BaseModel

from agentlightning.errors import ConfigError

M = TypeVar("M", bound=BaseModel)
_BATCH = 1000
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def to_json(record: BaseModel) -> Any:
    """The record as plain JSON values."""
    return record.model_dump(mode="json")


def print_json(value: Any) -> None:
    """Prints records, or lists of them, as JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_line(value: Any) -> None:
    """Prints a record of a stream as one line of JSON, at once."""
    click.echo(json.dumps(value, ensure_ascii=False))


def print_result(as_json: bool, value: dict[str, Any], text: str) -> None:
    """Prints the result of a command, as JSON or as text."""
    if as_json:
        print_json(value)
    else:
        click.echo(text)


def print_fields(record: dict[str, Any]) -> None:
    """Prints one record: one line for each field that is set."""
    for name, value in record.items():
        if value not in (None, {}, []):
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            click.echo(f"{name:<22} {shown}")


def show_time(instant: float | None) -> str:
    """A Unix time as local time; includes the date unless it is today."""
    if instant is None:
        return ""
    then, today = time.localtime(instant), time.localtime()
    is_today = (then.tm_year, then.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", then)


def shorten(value: Any, length: int = 60) -> str:
    """A value as one line of JSON, at most ``length`` characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


async def export(records: AsyncIterator[M], path: Path, what: str, as_json: bool) -> None:
    """Writes records to a .jsonl or .parquet file, and prints their number.

    The file appears only when it is complete. In Parquet, values that are mappings or lists are JSON text.

    Raises:
        ConfigError: the suffix is not supported, or the file cannot be written.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{path}: the file name of an export must end in .jsonl or .parquet")
    draft = path.with_name(path.name + ".draft")
    try:
        count = await (_write_lines if path.suffix == ".jsonl" else _write_parquet)(records, draft)
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


async def _write_parquet(records: AsyncIterator[BaseModel], path: Path) -> int:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("writing Parquet needs pyarrow. Install with: pip install 'lightning[datasets]'") from error
    count, writer = 0, None
    batch: list[dict[str, Any]] = []

    def flush() -> None:
        nonlocal writer
        columns = {name: [row.get(name) for row in batch] for name in batch[0]}
        if writer is None:
            fields = [arrow.field(name, _arrow_type(arrow, name)) for name in columns]
            writer = parquet.ParquetWriter(path, arrow.schema(fields))
        writer.write_table(arrow.table(columns, schema=writer.schema))
        batch.clear()

    try:
        async for record in records:
            row = to_json(record)
            names = type(record).model_fields
            batch.append({name: _flat(name, row.get(name)) for name in names})
            count += 1
            if len(batch) == _BATCH:
                flush()
        if batch:
            flush()
        elif writer is None:
            parquet.write_table(arrow.table({}), path)
    finally:
        if writer is not None:
            writer.close()
    return count


def _arrow_type(arrow: Any, name: str) -> Any:
    if name == "reward" or name.endswith(("_time", "_at")):
        return arrow.float64()
    return arrow.int64() if name in ("sequence_id", "version", "spans_dropped") else arrow.string()


def _flat(name: str, value: Any) -> Any:
    is_text = value is None or isinstance(value, str)
    if is_text or name.endswith(("_time", "_at")) or name in ("sequence_id", "version", "spans_dropped", "reward"):
        return value
    return json.dumps(value, ensure_ascii=False)
