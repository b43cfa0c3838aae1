"""A store in a separate process, and the cost of requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentlightning.run import attempt_token
from tests.process import cpu_unit_s, wait_for
from tests.waiting import LIMIT_S

TOKEN = "the-token-of-this-store"
AGL = "/v1/agl"


class Answer(NamedTuple):
    """Answer to a raw request; status 0 means that the connection was closed without an answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Cost(NamedTuple):
    """CPU time, in units of ``cpu_unit_s``, and memory of the process for one request."""

    cpu_units: float
    memory_bytes: int


class StoreProcess:
    """``agl store`` on a free port of 127.0.0.1."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        wait_for(lambda: b"Serving" in log.read_bytes(), process, log)
        found = re.search(rb"Serving .* at http://127\.0\.0\.1:(\d+)", log.read_bytes())
        assert found is not None, log.read_text()
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S)

    def ask(self, method: str, path: str, body: bytes = b"", *, token: str | None = None, headers: str = "") -> Answer:
        """Sends one request on a new connection and reads the answer while it sends."""
        shown = f"authorization: Bearer {token}\r\n" if token is not None else ""
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{shown}{headers}content-length: {len(body)}\r\n\r\n"
        with self.connect() as connection:

            def send() -> None:
                with contextlib.suppress(OSError):  # refused before it was completely sent
                    connection.sendall(head.encode() + body)

            sender = threading.Thread(target=send)
            sender.start()
            answer = _read_answer(connection)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            sender.join()
            return answer

    def post(self, path: str, content: Any, *, token: str | None = TOKEN) -> Answer:
        return self.ask("POST", AGL + path, json.dumps(content).encode(), token=token)

    def claim(self) -> tuple[str, str, str]:
        """Returns the ids of a newly started rollout and of its attempt, and the attempt's token."""
        rollout = self.post("/rollouts", {"input": "task"}).json()
        ids = rollout["rollout_id"], rollout["attempt"]["attempt_id"]
        return *ids, attempt_token.mint(attempt_token.derive_secret(TOKEN), *ids, time.time() + 3600)

    @property
    def memory_bytes(self) -> int:
        return self._status("VmRSS")

    def measure(
        self, method: str, path: str, body: bytes, *, token: str | None, headers: str, limit: Cost
    ) -> tuple[Answer, Cost]:
        """Calls ``ask``, up to five times if that costs more CPU time of all threads or peak memory than the limit.

        Other processes of a busy machine make a request cost more, never less.
        """
        for _ in range(5):
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")  # resets the peak
            memory, cpu_s = self.memory_bytes, self._cpu_s()
            answer = self.ask(method, path, body, token=token, headers=headers)
            cost = Cost((self._cpu_s() - cpu_s) / cpu_unit_s(), self._status("VmHWM") - memory)
            if cost.cpu_units < limit.cpu_units and cost.memory_bytes < limit.memory_bytes:
                break
        return answer, cost

    def _cpu_s(self) -> float:
        return time.clock_gettime((~self.process.pid << 3) | 2)  # Linux' clock of a process

    def _status(self, name: str) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"{name}:\s+(\d+) kB", status)
        assert found is not None, status
        return int(found[1]) * 1024


@contextlib.contextmanager
def running_store(
    folder: Path, *, backend: str = "memory://", wrapper: Sequence[str] = (), before: str = "pass"
) -> Iterator[StoreProcess]:
    """Runs a store until the block ends.

    Args:
        folder: the working directory of the store.
        backend: the URL of the database.
        wrapper: a command that runs the store.
        before: a statement that the process executes first.
    """
    log = folder / "store.log"
    program = f"{before}; from agentlightning.cli import main; main()"
    command = [*wrapper, sys.executable, "-c", program, "store", "--port", "0", "--backend", backend]
    environment = {**os.environ, "AGL_TOKEN": TOKEN}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder)
    try:
        yield StoreProcess(process, log)
    finally:
        process.terminate()
        process.wait(timeout=LIMIT_S)


def _read_answer(connection: socket.socket) -> Answer:
    received = b""
    with contextlib.suppress(OSError):
        while piece := connection.recv(65536):
            received += piece
            head, separator, body = received.partition(b"\r\n\r\n")
            size = re.search(rb"(?i)content-length: (\d+)", head)
            if separator and size is not None and len(body) >= int(size[1]):
                return Answer(int(head.split(b" ", 2)[1]), body)
    return Answer(0, received)
