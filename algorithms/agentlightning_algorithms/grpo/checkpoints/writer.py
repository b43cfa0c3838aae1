"""Writes checkpoints and kept weights while the next rollouts run."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentlightning_algorithms.grpo.trained_policy import PolicySet
from agentlightning_algorithms.shared.policy.model.checkpoint import atomic_directory
from agentlightning_algorithms.shared.trained_model import STEPS


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread; the weights may change only after :meth:`wait`."""

    def __init__(self, policies: PolicySet, directory: Path | None, *, keep_every: int, keep_last: int) -> None:
        """Keeps the weights of every ``keep_every``-th step, and those of the ``keep_last`` newest checkpoints.

        Without a directory it writes nothing.
        """
        self._policies = policies
        self._directory = directory
        self._keep_every = keep_every
        self._keep_last = keep_last
        self._writing: asyncio.Task[float] | None = None
        self.seconds: float | None = None
        """Duration of the last checkpoint."""

    async def begin(self, state: Mapping[str, Mapping[str, Any]] | None, step: int) -> None:
        """Begins to write ``state``, if it is given, and the weights of ``step`` if they are to be kept."""
        await self.wait()
        keeps = bool(self._keep_every and step % self._keep_every == 0) or bool(state is not None and self._keep_last)
        if self._directory is not None and (state is not None or keeps):
            self._writing = asyncio.create_task(asyncio.to_thread(self._write, self._directory, state, step, keeps))

    async def wait(self) -> None:
        """Returns when everything is written.

        Raises:
            OSError: the checkpoint could not be written.
        """
        if self._writing is not None:
            self.seconds = await asyncio.shield(self._writing)
            self._writing = None

    def _write(self, directory: Path, state: Mapping[str, Mapping[str, Any]] | None, step: int, keeps: bool) -> float:
        started = time.monotonic()
        if state is not None:
            self._policies.write(directory / "checkpoint", state)
        if keeps:
            with atomic_directory(directory / STEPS / str(step)) as scratch:
                self._policies.save(scratch)
            self._prune(directory / STEPS)
        return time.monotonic() - started

    def _prune(self, folder: Path) -> None:
        """Deletes the weights of steps that are neither among the newest nor kept permanently."""
        if self._keep_last:
            kept = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
            for step in kept[: -self._keep_last]:
                if not self._keep_every or step % self._keep_every:
                    shutil.rmtree(folder / str(step))
