"""Exports of records to files."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from pydantic import BaseModel

from agentlightning.errors import ConfigError, install_command
from agentlightning.resources import ResourcesUpdate
from agentlightning.types import AttemptedRollout, Span, Worker
from agentlightning_plugins.shared.terminal import print_result, to_json

M = TypeVar("M", bound=BaseModel)
_BATCH: Final = 1000
_RECORDS: Final[dict[str, type[BaseModel]]] = {
    "rollouts": AttemptedRollout,
    "snapshots": ResourcesUpdate,
    "spans": Span,
    "workers": Worker,
}
"""Type of the records in each Parquet export; the fields of the type are the columns of the file."""
_NUMBERS: Final = {"sequence_id": "int64", "version": "int64", "spans_dropped": "int64", "reward": "float64"}
export_path = click.argument("path", type=click.Path(path_type=Path, dir_okay=False))


async def export(records: AsyncIterator[M], path: Path, what: str, as_json: bool) -> None:
    """Writes records, whose name is ``what``, to a .jsonl or .parquet file, and prints their number.

    The file appears only when it is complete. In Parquet, mappings and lists are stored as JSON text.
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
        raise ConfigError(f"writing Parquet needs pyarrow. Install with: {install_command('datasets')}") from error
    types = {name: "float64" if name.endswith(("_time", "_at")) else "string" for name in kind.model_fields}
    types |= {name: number for name, number in _NUMBERS.items() if name in types}
    schema = arrow.schema([(name, arrow.type_for_alias(alias)) for name, alias in types.items()])
    count = 0
    with parquet.ParquetWriter(path, schema) as writer:
        batch: list[dict[str, Any]] = []
        async for record in records:
            cells = to_json(record).items()
            batch.append({name: _to_text(value) if types[name] == "string" else value for name, value in cells})
            count += 1
            if len(batch) == _BATCH:
                writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
                batch.clear()
        writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
    return count


def _to_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
