"""Imports objects and loads tasks that are named in a configuration or on the command line."""

from __future__ import annotations

import array
import codecs
import csv
import functools
import hashlib
import importlib
import importlib.util
import logging
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

import cloudpickle

from agentlightning.errors import ConfigError, install_command, suggest
from agentlightning.frozen import freeze_row, parse_lenient
from agentlightning.plugin.registry import get_manager
from agentlightning.types import Dataset


def load_attribute(target: str) -> Any:
    """Imports ``module:attribute`` or ``path/to/file.py:attribute``; raises ConfigError if that fails.

    The folder of the file, or the working directory, is appended to the import path: a file there never replaces an
    installed package that other code imports.
    """
    name, separator, attribute = target.rpartition(":")
    if not separator or not name or not attribute:
        raise ConfigError(f"{target!r}: write module:attribute or path/to/file.py:attribute, as in my_agents:writer")
    file = Path(name if name.endswith(".py") else f"{name}.py").resolve()
    if name.endswith(".py"):
        if not file.is_file():
            raise ConfigError(f"{target!r}: {file} does not exist; in a configuration, paths start at its folder")
        name = file.stem
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        module = _import_file(name, file) if file.is_file() else importlib.import_module(name)
    except Exception as error:  # isolation point: the user's module may raise anything
        raise ConfigError(f"{target!r}: importing {name} failed: {type(error).__name__}: {error}") from error
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        known = [known for known in vars(module) if not known.startswith("_")]
        raise ConfigError(f"{target!r}: {name} has no {attribute}.{suggest(attribute, known)}") from error


def _import_file(name: str, file: Path) -> ModuleType:
    """Imports the module of a file, under a different name if an installed module is called ``name``."""
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # the module of this name has no spec, like __main__
        return importlib.import_module(name)
    if found is None or (found.origin is not None and Path(found.origin).resolve() == file):
        return importlib.import_module(name)
    own_name = f"{name}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if own_name in sys.modules:
        return sys.modules[own_name]
    spec = importlib.util.spec_from_file_location(own_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[own_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own_name]
        raise
    cloudpickle.register_pickle_by_value(module)  # runner processes cannot import it by this name
    return module


logger = logging.getLogger("agentlightning")
_READERS: Final = (".jsonl", ".json", ".csv", ".parquet")
_LARGE: Final = 2**28
"""Size in bytes from which a .jsonl or .parquet file is read row by row."""


def load_dataset(
    source: str,
    *,
    reader: str | Mapping[str, Any] | None = None,
    split: str | None = None,
    limit: int | None = None,
    shuffle_seed: int | None = None,
) -> Dataset[Any]:
    """Loads tasks.

    Args:
        source: a file (.jsonl, .json, .csv, .parquet), ``module:attribute`` of a sequence or of a function that returns
            one, ``hf:name`` of a Hugging Face data set, the directory of a saved one, or what a component of the kind
            ``dataset`` reads.
        reader: name of this component, alone or with settings. By default the component named like the ending of the
            source, or like its prefix, as in ``lance:tasks``.
        split: the split of a Hugging Face data set; default ``train``.
        limit: maximum number of tasks, applied after shuffling.
        shuffle_seed: seed for shuffling; None keeps the order.

    Rows become JSON (``freeze_row``). A list is checked as a whole; of other sequences, a row that cannot be used is
    left out when it is drawn, with a warning.

    Raises:
        ConfigError: the source cannot be loaded, is empty, or is a list with a row that cannot be used.
    """
    if reader is None:
        reader, source = _find_reader(source)
    if reader is not None:
        tasks = _check_sequence(get_manager().create("dataset", reader)(source), source)
    elif source.startswith("hf:"):
        tasks = _load_hugging_face(source.removeprefix("hf:"), split or "train")
    elif Path(source).is_dir():
        tasks = _load_hugging_face(source, split or "train")
    elif split is not None:
        raise ConfigError(f"{source!r} has no splits; only hf: data sets do")
    elif Path(source).suffix in _READERS:
        tasks = _read_file(Path(source))
    elif ":" in source:
        found = load_attribute(source)
        tasks = _check_sequence(found() if callable(found) and not hasattr(found, "__getitem__") else found, source)
    else:
        raise ConfigError(
            f"{source!r}: give a file ({', '.join(_READERS)}), module:attribute, or hf:name of a Hugging Face data set"
        )
    if not len(tasks):
        raise ConfigError(f"{source} contains no tasks")
    if isinstance(tasks, (list, tuple)):
        tasks = [freeze_row(task, f"{source}, row {number}: task") for number, task in enumerate(tasks, 1)]
    else:
        tasks = _Rows(tasks, source)
    if shuffle_seed is None and limit is None:
        return tasks
    order = list(range(len(tasks)))
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(order)
    return _Selection([tasks], [(0, index) for index in order[:limit]])


def mix(sets: Sequence[Dataset[Any]], weights: Sequence[float | None]) -> Dataset[Any]:
    """Returns a set that draws from several: each row once, or with weights, as often as its set's share.

    Every stretch of rows has about the shares of the whole, which has as many rows as all sets together. A set begins
    again when all of its rows were drawn. Raises ConfigError if only some sets have a weight.
    """
    if None in weights and set(weights) != {None}:
        raise ConfigError("some sources have a weight and others do not; give each a weight, or none")
    shares = [len(tasks) if weight is None else weight for tasks, weight in zip(sets, weights, strict=True)]
    drawn, places = [0] * len(sets), []
    for _ in range(sum(map(len, sets))):
        number = min(range(len(sets)), key=lambda each: (drawn[each] + 1) / shares[each])
        places.append((number, drawn[number] % len(sets[number])))
        drawn[number] += 1
    return _Selection(sets, places)


class _Selection(Sequence[Any]):
    """Rows of sets, each given by the number of its set and its position there."""

    def __init__(self, sets: Sequence[Dataset[Any]], places: Sequence[tuple[int, int]]) -> None:
        self._sets = sets
        self._numbers = array.array("I", [number for number, _ in places])
        self._positions = array.array("Q", [position for _, position in places])

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return self._sets[self._numbers[index]][self._positions[index]]


class _Lines(Sequence[Any]):
    """The rows of a large .jsonl file, of which only the places of the lines are in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array.array("Q")
        start = 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._starts.append(start + (3 if not start and line.startswith(codecs.BOM_UTF8) else 0))
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        with self._path.open("rb") as file:
            file.seek(self._starts[index])
            try:
                return parse_lenient(file.readline(), exact=True)
            except ValueError as error:
                raise ConfigError(f"{self._path}, row {index + 1}: not JSON: {error}") from error


class _Rows(Sequence[Any]):
    """A data set whose rows are read when they are drawn. The next row takes the place of one that cannot be used."""

    def __init__(self, rows: Dataset[Any], source: str) -> None:
        self._rows = rows
        self._source = source
        self._left_out: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        size = len(self._rows)
        first = range(size)[index]  # raises IndexError
        for number in (*range(first, size), *range(first)):
            try:
                return freeze_row(self._rows[number], f"{self._source}, row {number + 1}: task")
            except ConfigError as error:
                if number not in self._left_out:
                    self._left_out.add(number)
                    logger.warning("%s. The row is left out; so far, %d are", error, len(self._left_out))
        raise ConfigError(f"{self._source}: none of the {size} rows can be used")


def _find_reader(source: str) -> tuple[str | None, str]:
    """Returns the reader that a plugin offers for a source, if any, and what it reads."""
    prefix, _, rest = source.partition(":")
    readers = get_manager().components("dataset")
    if rest and prefix in readers and prefix != "hf":
        return prefix, rest
    ending = Path(source).suffix
    return ending[1:] if ending[1:] in readers and ending not in _READERS else None, source


def _read_file(path: Path) -> Sequence[Any]:
    try:
        is_large = path.suffix in (".jsonl", ".parquet") and path.stat().st_size >= _LARGE
        if is_large and path.suffix == ".parquet":
            return cast(Sequence[Any], _import_datasets(str(path)).Dataset.from_parquet(str(path)))
        if path.suffix == ".jsonl":
            return _Lines(path) if is_large else _read_lines(path)
        if path.suffix == ".json":
            tasks = parse_lenient(path.read_text(encoding="utf-8-sig"), exact=True)
            if not isinstance(tasks, list):
                raise ConfigError(f"{path}: a list of tasks is needed, got {type(tasks).__name__}")
            return tasks
        if path.suffix == ".csv":
            return _read_table(path)
        return read_parquet(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist (in {Path.cwd()}; in a configuration, paths start at its folder)"
        ) from None
    except ConfigError:  # a ValueError too
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _read_table(path: Path) -> list[Any]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True)
        header = next(lines, [])
        rows = []
        for cells in lines:
            if cells and len(cells) != len(header):
                raise ConfigError(
                    f"{path}, line {lines.line_num}: {len(cells)} fields, but the header has {len(header)}; quote "
                    "fields that contain commas or line breaks"
                )
            rows += [dict(zip(header, cells, strict=True))] if cells else []
    return rows


def _read_lines(path: Path) -> list[Any]:
    tasks = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                task = parse_lenient(line, exact=True)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
            tasks.append(freeze_row(task, f"{path}, line {number}: task"))
    return tasks


def read_parquet(path: Path) -> list[Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(f"{path}: Parquet needs pyarrow. Install with: {install_command('datasets')}") from error
    try:
        return list(parquet.read_table(path).to_pylist())
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise ConfigError(f"{path} is not a Parquet file: {error}") from error


def _import_datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{source} needs datasets. Install with: {install_command('datasets')}") from error
    return datasets


def _load_hugging_face(name: str, split: str) -> Dataset[Any]:
    datasets = _import_datasets(f"hf:{name}")
    try:
        if Path(name).is_dir():
            loaded = datasets.load_from_disk(name)
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(name, split=split)
    except Exception as error:  # isolation point: loaders of the library raise arbitrary exceptions
        raise ConfigError(f"hf:{name}, split {split!r}, cannot be loaded: {type(error).__name__}: {error}") from error
    return cast(Dataset[Any], loaded)


def _check_sequence(found: Any, source: str) -> Dataset[Any]:
    if hasattr(found, "columns"):  # a DataFrame
        from agentlightning.trainer import to_rows

        found = to_rows(found, source)
    if isinstance(found, (str, bytes, dict)) or not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise ConfigError(
            f"{source} is a {type(found).__name__}; a sequence of tasks is needed, or a function that returns one"
        )
    return cast(Dataset[Any], found)
