"""Strategy ``cs``: the store is served, every runner is a process that talks to it, and dead runners are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeVar, cast

import cloudpickle

from agentlightning.errors import ConfigError
from agentlightning.execution import AlgorithmJob, ExecutionStrategy, RunnerJob
from agentlightning.store.protocol import LightningStore

logger = logging.getLogger("agentlightning")

T = TypeVar("T")
Role = Literal["both", "algorithm", "runner"]

RECYCLE_EXIT_CODE: Final = 75
"""A runner process ends with this to be replaced at once: it had too many threads that would not stop."""

_DRAIN_S: Final = 20.0
_QUICK_DEATH_S: Final = 10.0
_QUICK_DEATHS: Final = 3


class ClientServerExecutionStrategy(ExecutionStrategy):
    """Processes: agents have cores of their own, and a crash takes one runner, not the run."""

    def __init__(
        self,
        role: Role | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
        n_runners: int = 1,
        managed_store: bool | None = None,
    ) -> None:
        """Chooses what runs here. Every None is read from the environment.

        Args:
            role: ``both``, or the half of a run that is spread over machines; AGL_CURRENT_ROLE, default both.
            server_host: where the store is served; AGL_SERVER_HOST, default 127.0.0.1. Beyond loopback a token is
                needed: AGL_TOKEN.
            server_port: AGL_SERVER_PORT; default is a free one for both, 4747 for the halves.
            n_runners: runner processes.
            managed_store: whether we serve the store, rather than use one that is served already at that address;
                AGL_MANAGED_STORE, default true.

        Raises:
            ConfigError: a value that is not allowed.
        """
        role = cast(Role, role or os.environ.get("AGL_CURRENT_ROLE", "both"))
        if role not in ("both", "algorithm", "runner"):
            raise ConfigError(f"role = {role!r}; roles: both, algorithm, runner")
        if n_runners < 1:
            raise ConfigError(f"n_runners = {n_runners}: at least 1 is needed")
        self.role: Role = role
        self.n_runners = n_runners
        self.server_host = server_host or os.environ.get("AGL_SERVER_HOST", "127.0.0.1")
        port = server_port if server_port is not None else _port_from_environment()
        self.server_port = port if port is not None else (0 if role == "both" else 4747)
        if managed_store is None:
            managed_store = os.environ.get("AGL_MANAGED_STORE", "true").strip().lower() not in ("0", "false", "no")
        self.managed_store = managed_store

    def execute(self, algorithm: AlgorithmJob, runner: RunnerJob, store: LightningStore) -> None:
        asyncio.run(self._execute(algorithm, runner, store))

    async def _execute(self, algorithm: AlgorithmJob, runner: RunnerJob, store: LightningStore) -> None:
        from agentlightning_plugins.store_client import LightningStoreClient
        from agentlightning_plugins.store_server import LightningStoreServer

        token = os.environ.get("AGL_TOKEN")
        url = f"http://{self.server_host}:{self.server_port}"
        async with contextlib.AsyncExitStack() as stack:
            if self.managed_store and self.role != "runner":
                if token is None and self.role == "both":
                    token = secrets.token_urlsafe(24)  # nobody else has business with a store that dies with us
                server = LightningStoreServer(store, self.server_host, self.server_port, token=token)
                await server.start()
                stack.push_async_callback(server.stop)
                url = server.endpoint
            elif self.role != "runner":
                store = LightningStoreClient(url, token=token, run_id=store.run_id)
                stack.push_async_callback(store.close)
            supervisor = _Supervisor(runner, url, token, store.run_id, self.n_runners)
            if self.role == "algorithm":
                await algorithm(store)
            elif self.role == "runner":
                await supervisor.run()
            else:
                await self._both(algorithm, store, supervisor)

    async def _both(self, algorithm: AlgorithmJob, store: LightningStore, supervisor: _Supervisor) -> None:
        runners = asyncio.create_task(supervisor.run())
        work = asyncio.ensure_future(algorithm(store))
        try:
            done, _ = await asyncio.wait({runners, work}, return_when=asyncio.FIRST_COMPLETED)
            if runners in done and runners.exception() is None:  # each ran as many rollouts as it was to
                await work
            for task in done:
                task.result()
        finally:
            for task in (work, runners):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


class _Supervisor:
    """Keeps runner processes alive. They are started from scratch, so the user's main module is not imported again."""

    def __init__(self, job: RunnerJob, url: str, token: str | None, run_id: str, n_runners: int) -> None:
        self._n_runners = n_runners
        self._payload = cloudpickle.dumps(
            {"sys_path": [path or str(Path.cwd()) for path in sys.path], "url": url, "token": token, "run_id": run_id}
        )
        self._job = cloudpickle.dumps(job)
        self._threads = ThreadPoolExecutor(2 * n_runners, thread_name_prefix="runner-supervisor")

    async def run(self) -> None:
        """Runs until every runner has reached its own limit; cancelling it drains and stops them."""
        runners = [
            asyncio.create_task(self._keep_alive(f"runner-{os.getpid()}-{index}")) for index in range(self._n_runners)
        ]
        try:
            await asyncio.gather(*runners)
        finally:
            for runner in runners:
                runner.cancel()
            await asyncio.gather(*runners, return_exceptions=True)
            self._threads.shutdown()

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _keep_alive(self, name: str) -> None:
        quick_deaths = 0
        for life in itertools.count():
            # A new id for each life: the heartbeats of the next one must not keep the leases of the dead one alive.
            worker_id = f"{name}-{life}"
            started = time.monotonic()
            code = await self._run_once(worker_id)
            if code == 0:
                return
            if code == RECYCLE_EXIT_CODE:
                logger.warning("%s was replaced: too many of its agents' threads would not stop", worker_id)
                continue
            quick_deaths = quick_deaths + 1 if time.monotonic() - started < _QUICK_DEATH_S else 1
            what = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
            if quick_deaths > _QUICK_DEATHS:
                raise RuntimeError(
                    f"{worker_id} died {quick_deaths} times in a row within seconds ({what}); see its output above"
                )
            logger.warning("%s died (%s) and is started again", worker_id, what)
            await asyncio.sleep(min(0.1 * 4**quick_deaths, 10.0))

    async def _run_once(self, worker_id: str) -> int:
        read_fd, write_fd = os.pipe()
        try:
            process = _start(worker_id, read_fd)
            assert process.stdout is not None
            assert process.stderr is not None
            pumps = [_pump(process.stdout, "stdout"), _pump(process.stderr, "stderr")]
        except BaseException:
            os.close(write_fd)
            raise
        finally:
            os.close(read_fd)
        try:
            await self._in_thread(_write_all, write_fd, self._payload, self._job)
            code = await self._in_thread(process.wait)
            await self._in_thread(_finish, pumps)
            return code
        except asyncio.CancelledError:
            process.terminate()
            await self._in_thread(_drain, process)
            raise
        finally:
            os.close(write_fd)


def _start(worker_id: str, read_fd: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "agentlightning_plugins.runner_process", worker_id, str(read_fd)],
        stdin=subprocess.DEVNULL,
        pass_fds=(read_fd,),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": _python_path()},
        start_new_session=True,  # a Ctrl-C reaches us, and we stop the runners in order
    )


def _pump(source: IO[str], name: Literal["stdout", "stderr"]) -> threading.Thread:
    """Passes on what a runner prints, line by line, so that it does not tear a live display of this process apart."""

    def pump() -> None:
        with source:
            for line in source:
                stream: IO[str] = getattr(sys, name)  # as it is now: a live display replaces it
                with contextlib.suppress(ValueError, OSError):  # closed, as at the end of this process
                    stream.write(line)
                    stream.flush()

    thread = threading.Thread(target=pump, daemon=True)
    thread.start()
    return thread


def _finish(pumps: list[threading.Thread]) -> None:
    for pump in pumps:
        pump.join(1.0)  # a process that the agent left behind may hold the pipe open


def _write_all(fd: int, *parts: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(os.dup(fd), "wb") as pipe:  # it died: wait() tells how
        for part in parts:
            pipe.write(len(part).to_bytes(8, "big") + part)


def _drain(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(_DRAIN_S)
    except subprocess.TimeoutExpired:
        logger.warning("a runner process (pid %s) did not drain within %.0f s and is killed", process.pid, _DRAIN_S)
        process.kill()
        process.wait()


def _python_path() -> str:
    here = str(Path(__file__).parent.parent)
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


def _port_from_environment() -> int | None:
    text = os.environ.get("AGL_SERVER_PORT")
    if text is None:
        return None
    if not text.isdigit() or int(text) > 65535:
        raise ConfigError(f"AGL_SERVER_PORT = {text!r}: a port number from 0 to 65535 is needed")
    return int(text)
