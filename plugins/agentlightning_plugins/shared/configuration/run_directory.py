"""The directory of a run that was started from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from agentlightning.run.directory import make_directory

CONFIG_NAME: Final = "config.yaml"
"""The file in a run's directory that contains the run's configuration."""


def choose_directory(named: str | None, name: str) -> Path:
    """Returns ``named``, or creates and returns the first of runs/name, runs/name-2, ... that does not exist."""
    if named is not None:
        return Path(named)
    root, number = Path("runs"), 1
    # Created immediately, so that two runs that start together do not choose the same directory.
    while not make_directory(directory := root / (name if number == 1 else f"{name}-{number}")):
        number += 1
    return directory
