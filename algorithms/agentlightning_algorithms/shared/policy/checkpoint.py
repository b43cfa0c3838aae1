"""Atomic writing of directories, and the random state of a process."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yields an empty directory that replaces ``target``, durably, when the block ends without an error.

    An existing ``target`` is first moved to ``<target>.old``; if the process is killed before the replacement,
    :func:`recover_directory` restores it.
    """
    scratch = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir(parents=True)
    try:
        yield scratch
        for path in [*scratch.rglob("*"), scratch]:
            _fsync(path)
        old = target.with_name(f"{target.name}.old")
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        scratch.rename(target)
        _fsync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def recover_directory(target: Path) -> Path:
    """Returns ``target``, after restoring its predecessor if the process was killed while replacing it."""
    old = target.with_name(f"{target.name}.old")
    if old.exists() and not target.exists():
        old.rename(target)
    return target


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def random_state() -> dict[str, Any]:
    """Returns the state of Python's, numpy's and torch's generators, in types that a weights-only load accepts."""
    name, keys, position, has_gauss, cached_gaussian = numpy.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached_gaussian)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restores what :func:`random_state` returned; CUDA's part only if the number of devices is the same."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached_gaussian = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached_gaussian))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
