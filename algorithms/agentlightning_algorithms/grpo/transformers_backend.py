"""The policy backend ``transformers``: our own policy server, in a process that the training starts and stops."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import aiohttp

from agentlightning.errors import ConfigError, LightningError
from agentlightning.plugin.settings import require_least
from agentlightning_algorithms.shared.policy_backend import API_KEY_VARIABLE, PolicySetup, digest_weights
from agentlightning_plugins.shared.web.request import client_url, is_loopback

logger = logging.getLogger("agentlightning")
_LOG_TAIL_BYTES = 4000
_MAX_RESTARTS = 3
_STOP_TIMEOUT_S = 10.0
_NOT_RUNNING = "the policy server is not running; call start() first."


class TransformersBackend:
    """A policy server in a child process, which also ends when this process dies.

    A server that crashes is started again, with the weights loaded last, up to three times; until then, calls fail.
    """

    tells_versions = True

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        max_length: int | None = None,
        prefix_cache_mb: int = 512,
        kv_cache_mb: int = 4096,
        tool_format: Literal["auto", "none", "hermes", "xml", "llama", "mistral"] = "auto",
        keep_thinking: bool = False,
        adapters: str | None = None,
        ready_timeout_s: float = 300.0,
    ) -> None:
        """Takes the address, where port 0 is any free port, and how long loading may take.

        ``api_key`` is the key that completions require; an address beyond loopback needs a key.
        ``max_length`` is the maximum of a prompt and its response together, by default the model's;
        ``prefix_cache_mb`` is the memory for keys and values of earlier prompts, ``kv_cache_mb`` for running
        calls; calls that do not fit wait. ``tool_format`` is the form of the model's tool calls, by default the one
        that its chat template writes; ``none``: calls with tools are refused. With ``keep_thinking``, prompts keep the
        thoughts of earlier turns, which the chat template must be able to write. Each LoRA adapter in the folder
        ``adapters`` is a model of the name of its own folder.
        """
        require_least(0, prefix_cache_mb=prefix_cache_mb)
        require_least(1, kv_cache_mb=kv_cache_mb, max_length=max_length)
        if not api_key and not is_loopback(host):
            advice = "set an API key (--api-key, AGL_API_KEY), or listen on 127.0.0.1"
            raise ConfigError(f"host = {host!r} lets other machines in; {advice}")
        self._options = {
            "port": port,
            "max_length": max_length,
            "prefix_cache_mb": prefix_cache_mb,
            "kv_cache_mb": kv_cache_mb,
            "tool_format": tool_format,
            "keep_thinking": keep_thinking,
            "adapters": adapters,
        }
        self._ready_timeout_s = ready_timeout_s
        self._host = host
        self._api_key = api_key
        self._setup: PolicySetup | None = None
        self._endpoint: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._key = ""
        self._published: dict[str, tuple[int, str]] = {}
        """Version and digest of the newest weights, by the name of the model or adapter."""
        self._paths: dict[str, Path] = {}
        """Directories of the newest weights, by the same names."""
        self._restarts = 0
        self._restart: Future[None] | None = None
        """The last restart, which runs in a thread."""
        self._totals: dict[str, float] = {}
        """The statistics read last."""
        self._earlier: dict[str, float] = {}
        """The statistics of servers that crashed."""

    @property
    def endpoint(self) -> str:
        """The OpenAI base URL, such as ``http://127.0.0.1:41234/v1``; only while the server runs."""
        if self._endpoint is None:
            raise LightningError(_NOT_RUNNING)
        return self._endpoint

    @property
    def model_entry(self) -> Mapping[str, Any]:
        """The entry in the gateway's model list."""
        key = {"api_key": self._api_key} if self._api_key else {}
        return {"model": self._started().model_name, "endpoint": self.endpoint, **key}

    @property
    def running(self) -> bool:
        """Whether the process is running and ready."""
        is_alive = self._endpoint is not None and self._process is not None and self._process.poll() is None
        return is_alive and (self._restart is None or self._restart.done())

    def check(self) -> None:
        """Starts a server that has crashed again, without waiting for it.

        Raises:
            LightningError: the server has ended for good; the message has the end of its log.
        """
        if self.running or (self._restart is not None and not self._restart.done()):
            return
        if self._restart is not None:
            self._restart.result()
        code = None if self._process is None else self._process.poll()
        if not code or self._restarts == _MAX_RESTARTS:
            raise LightningError(self._failure("has ended"))
        self._restarts += 1
        logger.error("%s", self._failure(f"has ended with exit status {code} and is started again"))
        thread = ThreadPoolExecutor(1, "agl-policy-restart")
        self._restart = thread.submit(asyncio.run, self._start_again())
        thread.shutdown(wait=False)

    async def start(self, setup: PolicySetup) -> None:
        """Starts the process and returns when it is ready; an error contains the end of its log."""
        self._setup = setup
        await self._launch(setup)

    async def _start_again(self) -> None:
        """Starts the server at its earlier address, with the newest weights."""
        setup = self._started()
        assert self._process is not None
        _end(self._process)
        self._earlier = dict(self._totals)
        path = self._paths.get(setup.model_name)
        if path is not None:
            setup = replace(setup, model=str(path))
        await self._launch(setup, self._published.get(setup.model_name, (0, ""))[0])
        for name, (version, _) in dict(self._published).items():
            await self._load(name, self._paths[name], version)

    async def _launch(self, setup: PolicySetup, weight_version: int = 0) -> None:
        self._process = process = self._spawn(setup, weight_version)
        assert process.stdout is not None
        is_ready = False
        try:
            line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), self._ready_timeout_s)
            if line:
                address = json.loads(line)
                self._key = address["key"]
                self._endpoint = client_url(address["host"], address["port"]) + "/v1"
                self._options["port"] = address["port"]
                is_ready = True
                return
            problem = f"ended with exit status {await asyncio.to_thread(process.wait)} before it was ready"
        except TimeoutError:
            problem = f"was not ready after {self._ready_timeout_s:g} s"
        finally:
            if not is_ready:
                await self._end_process()
        raise LightningError(self._failure(problem))

    async def load_weights(self, path: Path, version: int) -> None:
        """Replaces the weights between batches; if they do not fit, the server keeps the current ones."""
        await self.load_adapter(self._started().model_name, path, version)

    async def load_adapter(self, name: str, path: Path, version: int) -> None:
        """Adds the adapter ``name``, or replaces its weights between batches."""
        await self._wait_for_restart()
        await self._load(name, path, version)

    async def _load(self, name: str, path: Path, version: int) -> None:
        digest = await asyncio.to_thread(digest_weights, path)
        body = {"model": name, "path": str(Path.cwd() / path), "version": version, "digest": digest}
        status, answer = await self._request("POST", "/weights", body)
        if status != 200:
            raise ConfigError(f"the policy server refused weights version {version}: {answer['error']['message']}")
        self._published[name] = version, digest
        self._paths[name] = Path.cwd() / path

    async def _wait_for_restart(self) -> None:
        self.check()
        if self._restart is not None:
            await asyncio.shield(asyncio.wrap_future(self._restart))

    async def statistics(self) -> Mapping[str, float]:
        """Returns ``Sampler.statistics`` and ``Conversations.counts``, which are totals since the start.

        Raises:
            LightningError: the server serves weights other than those loaded last.
        """
        await self._wait_for_restart()
        if self._published:
            _, state = await self._request("GET", "/health")
            for name, published in self._published.items():
                found = state["models"].get(name, {})
                served = found.get("weight_version"), found.get("weights_digest")
                if served != published:
                    raise LightningError(
                        f"the policy server serves weights version {served[0]} of {name} with digest {served[1]}, but "
                        f"version {published[0]} with digest {published[1]} was published: another program replaced "
                        "them, so the samples since then cannot be trained on."
                    )
        _, answer = await self._request("GET", "/statistics")
        self._totals = {name: value + self._earlier.get(name, 0.0) for name, value in answer.items()}
        return dict(self._totals)

    async def stop(self) -> None:
        """Stops the process, by force if it takes too long."""
        await self._end_process()
        if self._restart is not None:
            await asyncio.gather(asyncio.wrap_future(self._restart), return_exceptions=True)
            await self._end_process()

    async def _end_process(self) -> None:
        process, self._process, self._endpoint = self._process, None, None
        if process is not None:
            await asyncio.to_thread(_end, process)

    def _spawn(self, setup: PolicySetup, weight_version: int) -> subprocess.Popen[bytes]:
        options = {**asdict(setup), "host": self._host, "weight_version": weight_version, **self._options}
        del options["directory"]
        command = [sys.executable, "-P", "-m", "agentlightning_algorithms.shared.policy.server", "--exit-with-parent"]
        for name, value in options.items():
            if value is True:
                command.append(f"--{name.replace('_', '-')}")
            elif value is not None and value is not False:
                command += [f"--{name.replace('_', '-')}", str(value)]
        setup.directory.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the trainer only, which then stops the server
                # Spinning threads slow a busy machine down tenfold.
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, API_KEY_VARIABLE: self._api_key or ""},
            )

    async def _request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        url = self.endpoint.removesuffix("/v1") + path
        headers = {"Authorization": f"Bearer {self._key}"}
        timeout = aiohttp.ClientTimeout(total=None, connect=30)  # new weights wait for the longest running answer
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, url, json=body, headers=headers) as response,
            ):
                return response.status, await response.json(content_type=None)
        except aiohttp.ClientError as error:
            raise LightningError(self._failure(f"does not answer ({type(error).__name__}: {error})")) from error

    def _started(self) -> PolicySetup:
        if self._setup is None:
            raise LightningError(_NOT_RUNNING)
        return self._setup

    @property
    def _log_path(self) -> Path:
        return self._started().directory / "policy_server.log"

    def _failure(self, what: str) -> str:
        with self._log_path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - _LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace").strip()
        return f"the policy server {what}. The end of its log, {self._log_path}:\n{tail or '(empty)'}"


def _end(process: subprocess.Popen[bytes]) -> None:
    with process:  # waits for its end and closes the pipes
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
