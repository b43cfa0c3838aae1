"""Loads tasks from files, Python modules and Hugging Face data sets."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from agentlightning.errors import ConfigError
from agentlightning.types import Dataset
from agentlightning_plugins.shared.configuration.attribute import load_attribute

_READERS: Final = (".jsonl", ".json", ".csv", ".parquet")


def load_dataset(
    source: str, *, split: str | None = None, limit: int | None = None, shuffle_seed: int | None = None
) -> Dataset[Any]:
    """Loads tasks.

    Args:
        source: a file (.jsonl, .json, .csv, .parquet), ``module:attribute`` of a sequence or of a function that returns
            one, or ``hf:name`` of a Hugging Face data set.
        split: the split of a Hugging Face data set; default ``train``.
        limit: maximum number of tasks, applied after shuffling.
        shuffle_seed: seed for shuffling; None keeps the order.

    Raises:
        ConfigError: the source cannot be loaded, or is empty.
    """
    if source.startswith("hf:"):
        tasks: Dataset[Any] = _load_hugging_face(source.removeprefix("hf:"), split or "train")
    elif split is not None:
        raise ConfigError(f"{source!r} has no splits; only hf: data sets do")
    elif Path(source).suffix in _READERS:
        tasks = _read_file(Path(source))
    elif ":" in source:
        tasks = _load_sequence(source)
    else:
        raise ConfigError(
            f"{source!r}: give a file ({', '.join(_READERS)}), module:attribute, or hf:name of a Hugging Face data set"
        )
    if not len(tasks):
        raise ConfigError(f"{source} contains no tasks")
    if shuffle_seed is None and limit is None:
        return tasks
    order = list(range(len(tasks)))
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(order)
    return [tasks[index] for index in order[:limit]]


def _read_file(path: Path) -> Sequence[Any]:
    try:
        if path.suffix == ".jsonl":
            return _read_lines(path)
        if path.suffix == ".json":
            tasks = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(tasks, list):
                raise ConfigError(f"{path}: a list of tasks is needed, got {type(tasks).__name__}")
            return tasks
        if path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                return list(csv.DictReader(file))
        return _read_parquet(path)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist (working directory: {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError, csv.Error, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _read_lines(path: Path) -> list[Any]:
    tasks = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                tasks.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
    return tasks


def _read_parquet(path: Path) -> list[Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(f"{path}: Parquet needs pyarrow. Install with: pip install 'lightning[datasets]'") from error
    try:
        return list(parquet.read_table(path).to_pylist())
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise ConfigError(f"{path} is not a Parquet file: {error}") from error


def _load_hugging_face(name: str, split: str) -> Dataset[Any]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"hf:{name} needs datasets. Install with: pip install 'lightning[datasets]'") from error
    try:
        if Path(name).is_dir():
            loaded = datasets.load_from_disk(name)
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(name, split=split)
    except Exception as error:  # isolation point: loaders of the library raise arbitrary exceptions
        raise ConfigError(f"hf:{name}, split {split!r}, cannot be loaded: {type(error).__name__}: {error}") from error
    return cast(Dataset[Any], loaded)


def _load_sequence(source: str) -> Dataset[Any]:
    found = load_attribute(source)
    if callable(found) and not hasattr(found, "__getitem__"):
        found = found()
    if isinstance(found, (str, bytes, dict)) or not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise ConfigError(
            f"{source} is a {type(found).__name__}; a sequence of tasks is needed, or a function that returns one"
        )
    return cast(Dataset[Any], found)
