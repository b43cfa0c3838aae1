"""Code that child processes of ``test_context_propagation`` import; small, so that they start quickly."""

from __future__ import annotations

import os
from multiprocessing.context import SpawnProcess
from typing import Any


def read_context() -> str | None:
    return os.environ.get("TRACEPARENT")


def tell_context(connection: Any) -> None:
    connection.send(read_context())


class Teller(SpawnProcess):
    """A process whose work is its method ``run``."""

    def __init__(self, connection: Any) -> None:
        super().__init__()
        self._connection = connection

    def run(self) -> None:
        tell_context(self._connection)
