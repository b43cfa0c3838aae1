"""The directory of a run that was started from the command line, and the resources that a run learned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from agentlightning.errors import NotFoundError
from agentlightning.resources import Resource
from agentlightning.run.directory import make_directory
from agentlightning_algorithms.shared.trained_model import list_checkpoints, read_training, serve_model
from agentlightning_plugins.shared.terminal import use_store

CONFIG_NAME: Final = "config.yaml"
"""The file in a run's directory that contains the run's configuration."""


def choose_directory(named: str | None, name: str, from_start: Callable[[str], str]) -> Path:
    """Returns ``named``, or creates and returns the first of runs/name, runs/name-2, ... that does not exist.

    Both start at the working directory of the command; ``from_start`` is what ``enter_folder`` returned.
    """
    if named is not None:
        return Path(from_start(named))
    root, number = Path(from_start("runs")), 1
    # Created immediately, so that two runs that start together do not choose the same directory.
    while not make_directory(directory := root / (name if number == 1 else f"{name}-{number}")):
        number += 1
    return directory


@contextlib.contextmanager
def learned_resources(where: str | None, *, trust: bool = False) -> Iterator[dict[str, Resource]]:
    """Yields the latest resources of a run's directory or a store's URL; serves the model if the run trained weights.

    ``trust`` reads files of the run that can run code, and files outside of its directory. Raises LightningError if the
    store has no resources, or the model cannot be served.
    """
    if where is None:
        yield {}
        return
    run = Path(where)
    if read_training(run) is None:
        latest = _read_latest(where)
        if not latest:
            raise NotFoundError(f"{where} contains no resources")
        yield latest
        return
    # If the run's store was in memory or elsewhere, its directory has only the model.
    learned = _read_latest(where) if (run / "store.db").is_file() else {}
    with served_model(run, trust=trust) as models:
        yield {**learned, **models}


def saved_weights(run: Path) -> list[str] | None:
    """Returns the names of the checkpoints that a run saved; None if the run does not train weights.

    Raises ConfigError if the run's record is damaged.
    """
    return None if read_training(run) is None else list(list_checkpoints(run))


@contextlib.contextmanager
def served_model(run: Path | None, checkpoint: str | None = None, *, trust: bool) -> Iterator[dict[str, Resource]]:
    """Serves the model that a run trained, and yields its resources; without a run, yields none.

    ``trust``: as in ``learned_resources``. The checkpoint is ``best``, ``latest`` or a step; None selects best, or
    latest if there is no best.
    """
    if run is None:
        yield {}
        return
    with serve_model(str(run), checkpoint, trust=trust) as served:
        yield served.resources()


def _read_latest(where: str) -> dict[str, Resource]:
    latest = use_store(where, None, lambda store: store.get_latest_resources())
    return {} if latest is None else dict(latest.resources)
