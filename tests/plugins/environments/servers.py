"""Servers of environments as processes."""

from __future__ import annotations

import contextlib
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.port import reserve_port
from tests.process import wait_for

FOLDER = Path(__file__).resolve().parent


class Server:
    """A program that serves on a port, and that can be killed and started again."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.port = reserve_port()
        self.log = folder / "server.log"
        self._command = [part.format(port=self.port) for part in command]

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_for(self._answers, self.process, self.log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        with contextlib.suppress(urllib.error.HTTPError):  # of a path that it does not have
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=30).close()
            except urllib.error.URLError as error:
                if isinstance(error, urllib.error.HTTPError):
                    raise
                return False
        return True


@contextlib.contextmanager
def serving(folder: Path, *command: str) -> Iterator[Server]:
    """Runs a program whose arguments name the port as ``{port}``."""
    server = Server(folder, *command)
    server.start()
    try:
        yield server
    finally:
        server.kill()
