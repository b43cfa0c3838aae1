"""The policy server's process, as the trainer holds it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import aiohttp

from agentlightning.errors import ConfigError, LightningError
from agentlightning_algorithms.policy_backend import PolicySetup

_LOG_TAIL_BYTES = 4000


class PolicyServer:
    """Starts a policy server, swaps its weights, and ends it; it also ends when this process dies.

        async with PolicyServer("checkpoint", log_path="policy.log") as server:
            await server.load_weights("checkpoint-2", version=2)

    Attributes:
        model_name: what requests call the model.
        log_path: where the server's log goes.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        log_path: str | Path,
        model_name: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        options: Mapping[str, str | int | None] | None = None,
        ready_timeout_s: float = 300.0,
        stop_timeout_s: float = 10.0,
    ) -> None:
        """Prepares the server; :meth:`start` starts it.

        Args:
            model: directory written by ``save_pretrained``, or a hub name.
            log_path: a file; its directory is made. What is in it stays.
            model_name: what requests call the model.
            host: address to bind.
            port: 0 takes a free one.
            options: further options of the server by their long names without dashes: ``dtype``, ``device``,
                ``max_batch_size``, ``max_length``, ``prefix_cache_mb``, ``threads``, ``seed``, ``weight_version``.
                None leaves the server's default.
            ready_timeout_s: how long loading may take.
            stop_timeout_s: how long it may take to end on request before it is killed.
        """
        self.model_name = model_name
        self.log_path = Path(log_path)
        self._ready_timeout_s = ready_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._endpoint: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [sys.executable, "-m", "agentlightning_algorithms.grpo.server.server", "--exit-with-parent"]
        given = {"model": str(model), "model_name": model_name, "host": host, "port": port, **(options or {})}
        for name, value in given.items():
            if value is not None:
                self._command += [f"--{name.replace('_', '-')}", str(value)]

    @property
    def endpoint(self) -> str:
        """The OpenAI base URL, such as ``http://127.0.0.1:41234/v1``.

        Raises:
            LightningError: the server is not running.
        """
        if self._endpoint is None:
            raise LightningError("the policy server is not running; call start() first.")
        return self._endpoint

    @property
    def running(self) -> bool:
        """True while the process lives and is ready."""
        return self._endpoint is not None and self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Harmless while the server lives.

        Raises:
            LightningError: it has ended; the message has the end of its log.
        """
        if not self.running:
            raise LightningError(self._failure("has ended"))

    async def start(self) -> None:
        """Starts the process and returns when it answers.

        Raises:
            LightningError: it did not get ready; the message has the end of its log.
        """
        self._process = process = _spawn(self._command, self.log_path)
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), self._ready_timeout_s)
        except TimeoutError:
            await self.stop()
            raise LightningError(self._failure(f"was not ready after {self._ready_timeout_s:g} s")) from None
        except asyncio.CancelledError:
            await self.stop()
            raise
        if not line:
            code = await asyncio.to_thread(process.wait)
            await self.stop()
            raise LightningError(self._failure(f"ended with exit status {code} before it was ready"))
        address = json.loads(line)
        self._endpoint = f"http://{address['host']}:{address['port']}/v1"

    async def load_weights(self, path: str | Path, version: int) -> None:
        """Swaps the weights, between batches, and returns when they are in use.

        Args:
            path: directory written by ``save_pretrained``, readable by the server.
            version: what its answers will carry from then on.

        Raises:
            ConfigError: the weights do not fit; the server keeps those it has.
            LightningError: the server does not answer.
        """
        status, answer = await self._ask("POST", "/weights", {"path": _absolute(path), "version": version})
        if status != 200:
            raise ConfigError(f"the policy server refused weights version {version}: {answer['error']['message']}")

    async def statistics(self) -> Mapping[str, float]:
        """Returns totals since the start.

        Of sampling: ``requests``, ``prompt_tokens``, of them ``reused_tokens``, ``sampled_tokens``, ``decode_steps``,
        ``decode_rows``, ``swaps``, ``busy_s``. Of prompts, and of what tokenizing them anew would have changed:
        :data:`~agentlightning_algorithms.grpo.server.conversation.COUNTS`.

        Raises:
            LightningError: the server does not answer.
        """
        _, answer = await self._ask("GET", "/statistics")
        return {name: float(value) for name, value in answer.items()}

    async def stop(self) -> None:
        """Ends the process: asked first, killed if it takes too long. Harmless when it has ended."""
        process, self._process, self._endpoint = self._process, None, None
        if process is not None:
            await asyncio.to_thread(_end, process, self._stop_timeout_s)

    async def __aenter__(self) -> PolicyServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        url = self.endpoint.removesuffix("/v1") + path
        timeout = aiohttp.ClientTimeout(total=None, connect=30)  # weights wait for the longest answer under way
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, url, json=body) as response,
            ):
                return response.status, await response.json(content_type=None)
        except aiohttp.ClientError as error:
            raise LightningError(self._failure(f"does not answer ({type(error).__name__}: {error})")) from error

    def _failure(self, what: str) -> str:
        with self.log_path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - _LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace").strip()
        return f"the policy server {what}. The end of its log, {self.log_path}:\n{tail or '(empty)'}"


class TransformersBackend:
    """``backend: transformers``: a policy server of our own, started and ended with the training."""

    tells_versions = True

    def __init__(
        self,
        *,
        port: int = 0,
        max_length: int | None = None,
        prefix_cache_mb: int = 512,
        ready_timeout_s: float = 300.0,
    ) -> None:
        """Sets what is the server's alone.

        Args:
            port: on 127.0.0.1; 0 takes a free one.
            max_length: tokens of a prompt and its response together; default the model's.
            prefix_cache_mb: memory for prompts seen before; 0 for none.
            ready_timeout_s: how long loading may take.
        """
        self._port = port
        self._options = {"max_length": max_length, "prefix_cache_mb": prefix_cache_mb}
        self._ready_timeout_s = ready_timeout_s
        self._server: PolicyServer | None = None

    @property
    def model_entry(self) -> Mapping[str, Any]:
        """The entry in the gateway's model list."""
        server = self._started()
        return {"model": server.model_name, "endpoint": server.endpoint}

    async def start(self, setup: PolicySetup) -> None:
        """Starts the process and returns when it answers.

        Raises:
            LightningError: it did not get ready; the message has the end of its log.
        """
        own = {
            "dtype": setup.dtype,
            "device": setup.device,
            "threads": setup.threads,
            "seed": setup.seed,
            "max_batch_size": setup.max_batch_size,
        }
        self._server = PolicyServer(
            setup.model,
            log_path=setup.directory / "policy_server.log",
            model_name=setup.model_name,
            port=self._port,
            options={**own, **self._options},
            ready_timeout_s=self._ready_timeout_s,
        )
        await self._server.start()

    async def load_weights(self, path: Path, version: int) -> None:
        """As :meth:`PolicyServer.load_weights`."""
        await self._started().load_weights(path, version)

    def check(self) -> None:
        """As :meth:`PolicyServer.check`."""
        self._started().check()

    async def statistics(self) -> Mapping[str, float]:
        """As :meth:`PolicyServer.statistics`."""
        return await self._started().statistics()

    async def stop(self) -> None:
        """Ends the process; harmless at any time."""
        if self._server is not None:
            await self._server.stop()

    def _started(self) -> PolicyServer:
        if self._server is None:
            raise LightningError("the policy server is not running; call start() first.")
        return self._server


def _spawn(command: list[str], log_path: Path) -> subprocess.Popen[bytes]:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        # A session of its own: Ctrl-C is for the trainer, which then ends the server in order.
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            # Threads that spin while they wait for each other make a busy machine ten times slower.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
        )


def _absolute(path: str | Path) -> str:
    return str(Path(path).resolve())


def _end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    _close(process.stdin)
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _close(process.stdout)


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        pipe.close()
