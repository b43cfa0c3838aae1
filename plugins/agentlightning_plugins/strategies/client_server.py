"""Strategy ``cs``: serves the store, runs each runner in its own process, and replaces runners that die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import Literal, cast

from agentlightning.errors import ConfigError
from agentlightning.execution import AlgorithmJob, ExecutionStrategy, RunnerJob
from agentlightning.execution.strategy import Role
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.plugin.settings import require_least
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.shared.processes.child_process import ChildProcesses, RunnerProcesses
from agentlightning_plugins.shared.processes.job_process import JobTarget
from agentlightning_plugins.shared.processes.stopping import run_with_agents, until_sigterm
from agentlightning_plugins.shared.processes.supervisor import Supervisor, run_both, served


class ClientServerExecutionStrategy(ExecutionStrategy):
    """Runs runners as processes: agents use several cores, and a crash ends one runner, not the run."""

    def __init__(
        self,
        role: Role | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
        n_runners: int = 1,
        main_process: Literal["algorithm", "runner"] = "algorithm",
        managed_store: bool | None = None,
    ) -> None:
        """Sets the role of this process. Arguments that are None are read from the environment.

        Args:
            role: ``both``, or the half that runs here if machines share a run; AGL_CURRENT_ROLE, default both.
            server_host: address on which the store is served; AGL_SERVER_HOST, default 127.0.0.1. Any other than
                loopback needs a token: AGL_TOKEN or AGL_TOKEN_FILE.
            server_port: port of the served store; AGL_SERVER_PORT, default a free one if ``both`` serves it, else 4747.
            n_runners: number of runner processes.
            main_process: ``runner`` runs the only runner in this process, where debuggers work, and the algorithm in a
                child process.
            managed_store: whether to serve the store, rather than use one that is already served at that address;
                AGL_MANAGED_STORE, default true. A trainer with an ``http://`` store always uses that store.

        Raises:
            ConfigError: a value that is not allowed.
        """
        name = "role" if role else "AGL_CURRENT_ROLE"
        role = cast(Role, role or os.environ.get("AGL_CURRENT_ROLE") or "both")
        if role not in ("both", "algorithm", "runner"):
            raise ConfigError(f"{name} = {role!r}; roles: both, algorithm, runner")
        require_least(1, n_runners=n_runners)
        if main_process not in ("algorithm", "runner"):
            raise ConfigError(f"main_process = {main_process!r}; one of: algorithm, runner")
        if main_process == "runner" and (role != "both" or n_runners != 1):
            raise ConfigError("main_process='runner' is for debugging: it needs role 'both' and 1 runner")
        self.main_process = main_process
        self.role: Role = role
        self.n_runners = n_runners
        self.server_host = server_host or os.environ.get("AGL_SERVER_HOST") or "127.0.0.1"
        self.managed_store = _read_flag("AGL_MANAGED_STORE", default=True) if managed_store is None else managed_store
        port = server_port if server_port is not None else _port_from_environment()
        is_own = role == "both" and self.managed_store
        self.server_port = port if port is not None else (0 if is_own else 4747)

    def execute(self, algorithm: AlgorithmJob, runner: RunnerJob, store: LightningStore) -> None:
        """See ``ExecutionStrategy``. SIGTERM shuts down like Ctrl-C, then raises SystemExit(143)."""
        run = run_with_agents if self.main_process == "runner" else asyncio.run
        run(until_sigterm(self._execute(algorithm, runner, store)))

    async def _execute(self, algorithm: AlgorithmJob, runner: RunnerJob, store: LightningStore) -> None:
        from agentlightning.store import LightningStoreClient

        is_server = self.managed_store and self.role != "runner"
        async with contextlib.AsyncExitStack() as stack:
            if is_server or isinstance(store, LightningStoreClient):
                target = await stack.enter_async_context(
                    served(
                        store,
                        self.server_host,
                        self.server_port,
                        is_private=self.role == "both",
                        share_environment=True,
                    )
                )
            else:
                url = f"http://{self.server_host}:{self.server_port}"
                store = LightningStoreClient(url, run_id=store.run_id)
                stack.push_async_callback(store.close)
                target = JobTarget.of_this_process(url, store.given_token, store.run_id)
            if self.role == "algorithm":
                await algorithm(store)
            elif self.main_process == "runner":
                await _run_runner_here(algorithm, runner, store, target)
            else:
                supervisor = Supervisor(RunnerProcesses(runner, target), store, self.n_runners)
                await (supervisor.run() if self.role == "runner" else run_both(algorithm, store, supervisor))


async def _run_runner_here(
    algorithm: AlgorithmJob, runner: RunnerJob, store: LightningStore, target: JobTarget
) -> None:
    stop = threading.Event()
    processes = ChildProcesses("algorithm", algorithm, target)
    other = asyncio.create_task(processes.run("algorithm"))
    other.add_done_callback(lambda _: stop.set())
    try:
        await runner(store, f"runner-{os.getpid()}", stop)
        code, last_line = await other
    finally:
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
    if code != 0:
        raise RuntimeError(f"the algorithm's process ended with exit code {code}: {last_line}; see its output above")


def _port_from_environment() -> int | None:
    text = os.environ.get("AGL_SERVER_PORT")
    if not text:
        return None
    if not text.isdigit() or int(text) > 65535:
        raise ConfigError(f"AGL_SERVER_PORT = {text!r}: a port number from 0 to 65535 is needed")
    return int(text)


def _read_flag(variable: str, default: bool) -> bool:
    """Reads a boolean from an environment variable; an unset or empty one means ``default``."""
    text = os.environ.get(variable, "").strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text and text not in ("0", "false", "no", "off"):
        raise ConfigError(f"{variable} = {text!r}: one of 1, true, yes, on, or 0, false, no, off is needed")
    return default and not text


@hookimpl
def components() -> list[Component]:
    return [Component("strategy", "cs", f"{__name__}:ClientServerExecutionStrategy", summary="runners are processes")]
