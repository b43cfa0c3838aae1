"""The policy server in a thread of this process: a process of its own spends five CPU seconds on imports."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import secrets
import subprocess
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentlightning.errors import ConfigError
from agentlightning_algorithms.grpo import transformers_backend
from agentlightning_algorithms.shared.policy.server.__main__ import make_parser, open_app, serve
from agentlightning_algorithms.shared.policy_backend import API_KEY_VARIABLE
from tests.waiting import LIMIT_S


class ServerThread(threading.Thread):
    """Stands for the ``subprocess.Popen`` of the policy backend ``transformers``."""

    def __init__(self, command: Sequence[str], *, env: dict[str, str], stderr: io.BufferedWriter, **_: Any) -> None:
        super().__init__(name="policy server")
        self._options = make_parser().parse_args(command[command.index("--exit-with-parent") :])
        self._api_key = env[API_KEY_VARIABLE] or None
        self._key = secrets.token_urlsafe(8)
        self._log = os.fdopen(os.dup(stderr.fileno()), "w")
        reader, writer = os.pipe()
        self.stdout, self._output = os.fdopen(reader, "rb"), os.fdopen(writer, "w")
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._code = 0
        self.start()

    def run(self) -> None:
        if self._options.threads:
            torch.set_num_threads(self._options.threads)
        try:
            app = open_app(self._options, self._key, self._api_key)
        except ConfigError as error:
            self._log.write(str(error))
            self._code = 2
        else:
            self._loop.run_until_complete(serve(app, self._key, self._options, self._output, self._stopping))
            app.close()
        finally:
            self._loop.close()
            self._log.close()
            self._output.close()

    def poll(self) -> int | None:
        return None if self.is_alive() else self._code

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout or LIMIT_S)
        if self.is_alive():
            raise subprocess.TimeoutExpired("the policy server", timeout or LIMIT_S)
        return self._code

    def terminate(self) -> None:
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)

    kill = terminate

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.stdout.close()


@contextlib.contextmanager
def threads_for_servers() -> Iterator[None]:
    """Makes a thread of each policy server that is started in the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            transformers_backend, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": ServerThread})
        )
        yield
