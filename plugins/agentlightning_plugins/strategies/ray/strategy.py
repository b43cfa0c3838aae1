"""Strategy ``ray``: runners are Ray actors, on one machine or many; rollouts of a lost node run again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Final

from agentlightning.errors import ConfigError
from agentlightning.execution import AlgorithmJob, ExecutionStrategy, RunnerJob
from agentlightning.plugin.settings import require_least
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.shared.processes.job_process import JobTarget, load_job, run_runner
from agentlightning_plugins.shared.processes.pickling import dump_job
from agentlightning_plugins.shared.processes.ray_start import start_patiently
from agentlightning_plugins.shared.processes.stopping import run_with_agents, until_second_interrupt, until_sigterm
from agentlightning_plugins.shared.processes.supervisor import Ending, Supervisor, run_both, served

_QUIET: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",  # print every line of an agent immediately
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default, without its warning
}
for _name, _value in _QUIET.items():
    os.environ.setdefault(_name, _value)

import ray  # noqa: E402 # it reads the environment when it is imported
from ray.exceptions import RayActorError, RayError, RuntimeEnvSetupError  # noqa: E402 # as above

logger = logging.getLogger("agentlightning")

_DRAIN_S: Final = 20.0
_KNOCK_S: Final = 10.0
_LOST_S: Final = 5.0
"""Time limit for the calls of a killed actor to fail."""
_PATIENCE_S: Final = 20.0
"""Waiting time after which an unscheduled actor is reported."""
_RESOURCES: Final = ("num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "label_selector")


_FOLDERS: Final = ("working_dir", "py_modules")
"""The entries of a ``runtime_env`` that may be folders on this machine."""


class RayExecutionStrategy(ExecutionStrategy):
    """Runs each runner as a Ray actor with its own environment and resources.

    The algorithm and the store stay in this process. A runner that dies, or whose node is lost, is replaced on another
    node, and its rollouts run again.
    """

    def __init__(
        self,
        n_runners: int = 1,
        address: str | None = None,
        resources_per_runner: Mapping[str, Any] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
    ) -> None:
        """Selects the cluster and the resources of each runner.

        Args:
            n_runners: number of actors.
            address: address of a running cluster, such as ``auto`` or ``host:6379``; default is RAY_ADDRESS, else a
                new cluster on this machine for the duration of the run. A program that has called ``ray.init`` keeps
                its cluster.
            resources_per_runner: ``num_cpus`` (default 1), ``num_gpus``, ``memory``, ``resources``,
                ``accelerator_type``, ``label_selector`` as Ray's actors take them.
            runtime_env: as in Ray, ``{"env_vars": {...}, "working_dir": ..., "pip": [...]}``. Nodes receive only the
                environment variables and files that are listed here. ``working_dir`` and ``py_modules`` may be local
                folders; in a program that has called ``ray.init``, that call has to name them.
            server_host: address at which this process serves the store to runners; default is 127.0.0.1 for a cluster
                started here, else this node's address in the cluster. Runners need a token: AGL_TOKEN, or a random one.
            server_port: default is a free one.

        Raises:
            ConfigError: a value that is not allowed.
        """
        require_least(1, n_runners=n_runners)
        wanted = dict(resources_per_runner or {})
        if unknown := sorted(set(wanted).difference(_RESOURCES)):
            raise ConfigError(f"resources_per_runner has {', '.join(unknown)}; it can have {', '.join(_RESOURCES)}")
        self.n_runners = n_runners
        self.address = address or os.environ.get("RAY_ADDRESS")
        self.resources_per_runner = {"num_cpus": 1, **wanted}
        self.runtime_env = dict(runtime_env or {})
        # Ray sends local folders to the nodes for a whole program only, not for single actors.
        self.folders = {name: self.runtime_env.pop(name) for name in _FOLDERS if _is_local(self.runtime_env.get(name))}
        self.server_host = server_host
        self.server_port = server_port or 0
        if self.address is not None and "://" in self.address and server_host is None:
            raise ConfigError(
                f"address = {self.address!r}: with the Ray client, this process is not a node of the cluster; set "
                "server_host to the address at which the nodes reach it"
            )

    def execute(self, algorithm: AlgorithmJob, runner: RunnerJob, store: LightningStore) -> None:
        """See ``ExecutionStrategy``. SIGTERM shuts down like Ctrl-C, then raises SystemExit(143)."""
        with self._connected() as host:
            asyncio.run(until_sigterm(self._execute(algorithm, runner, store, host)))

    async def _execute(self, algorithm: AlgorithmJob, runner: RunnerJob, store: LightningStore, host: str) -> None:
        async with served(store, host, self.server_port, is_private=True) as target:
            actors = RunnerActors(runner, target, self.resources_per_runner, self.runtime_env)
            await run_both(algorithm, store, Supervisor(actors, store, self.n_runners))

    @contextlib.contextmanager
    def _connected(self) -> Iterator[str]:
        """Joins or starts the cluster; yields the address on which to serve the store."""
        if ray.is_initialized():
            if self.folders:
                raise ConfigError(
                    f"runtime_env has local folders, which Ray sends only for a whole program; give them to ray.init("
                    f"runtime_env={self.folders}) in this program, or remove that call"
                )
            yield self.server_host or ray.util.get_node_ip_address()
            return
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "runtime_env": self.folders or None}
        if self.address in (None, "local"):
            # Enough CPUs for all runners, regardless of the number of cores, as with the other strategies.
            num_cpus = max(os.cpu_count() or 1, math.ceil(self.n_runners * self.resources_per_runner["num_cpus"]))
            start_patiently(lambda: ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet))
        else:
            try:
                _knock(self.address)
                ray.init(address=self.address, **quiet)
            except (OSError, RuntimeError, ValueError) as error:
                reason = str(error).partition("\n")[0]
                raise ConfigError(f"address = {self.address!r}: no Ray cluster was reached there: {reason}") from error
        try:
            is_ours = self.address in (None, "local")
            yield self.server_host or ("127.0.0.1" if is_ours else ray.util.get_node_ip_address())
        finally:
            ray.shutdown()


class RunnerActor:
    """The Ray actor: one runner, with its own event loop in a thread."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def run(self, worker_id: str, target: JobTarget, pickled_job: bytes) -> Ending:
        """Runs the job until it is done or ``stop`` is called."""
        try:
            job = load_job(pickled_job, target)
        except Exception as error:  # isolation point: importing the user's modules may raise anything
            return Ending("unloadable", f"{type(error).__name__}: {error}")
        try:
            return Ending("done" if run_with_agents(run_runner(job, target, worker_id, self._stop)) else "worn out")
        except Exception as error:  # isolation point: a failing runner is reported and replaced
            traceback.print_exc()
            return Ending("died", f"{type(error).__name__}: {error}")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def stop(self) -> None:
        """Stops the runner after the rollouts in flight."""
        self._stop.set()

    def is_ready(self) -> bool:
        """Returns once the actor is scheduled."""
        return True


class RunnerActors:
    """Runners as Ray actors."""

    def __init__(
        self, job: RunnerJob, target: JobTarget, resources: dict[str, Any], runtime_env: dict[str, Any]
    ) -> None:
        self._target = target
        self._job = ray.put(dump_job(job))  # stored once for all runners
        self._resources = resources
        # The supervisor restarts actors, not Ray, because each start needs a new worker id.
        self._actor: Any = ray.remote(RunnerActor).options(
            **resources,
            runtime_env=runtime_env or None,
            max_restarts=0,
            max_concurrency=3,  # one for each method
            scheduling_strategy="SPREAD",  # so that a lost node takes few runners with it
        )

    async def run(self, worker_id: str) -> Ending:
        """See ``Runners``."""
        actor = self._actor.remote()
        ready = _awaitable(actor.is_ready.remote())
        ending = _awaitable(actor.run.remote(worker_id, self._target, self._job))
        patience = asyncio.create_task(self._watch_start(worker_id, ready))
        try:
            await asyncio.wait([ending])
            return Ending(*ending.result())
        except asyncio.CancelledError:
            if ready.done():
                actor.stop.remote()
                waited = await until_second_interrupt(asyncio.wait([ending], timeout=_DRAIN_S))
                if waited is not None and not ending.done():
                    logger.warning("%s did not drain within %.0f s and is killed", worker_id, _DRAIN_S)
            raise
        except RuntimeEnvSetupError as error:
            return Ending("unloadable", f"its runtime_env cannot be set up: {_in_short(error)}")
        except RayError as error:
            return Ending("died", _in_short(error))
        finally:
            patience.cancel()
            ray.kill(actor)
            await asyncio.wait([ending, ready, patience], timeout=_LOST_S)

    async def _watch_start(self, worker_id: str, ready: asyncio.Future[Any]) -> None:
        if not (await asyncio.wait([ready], timeout=_PATIENCE_S))[0]:
            free = {name: count for name, count in ray.available_resources().items() if ":" not in name}
            logger.warning("%s waits to be scheduled: it needs %s; free: %s", worker_id, self._resources, free)


def _is_local(value: object) -> bool:
    """Whether an entry of a ``runtime_env`` names folders of this machine, and not URLs."""
    paths = value if isinstance(value, list) else [value]
    return any(not isinstance(path, str) or "://" not in path for path in paths if path is not None)


def _knock(address: str | None) -> None:
    """Raises OSError immediately if the address does not accept connections; Ray would retry for minutes."""
    host, _, port = (address or "").rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()


def _awaitable(reference: Any) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.wrap_future(reference.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks it as retrieved
    return future


def _in_short(error: RayError) -> str:
    """Returns the informative line of Ray's multi-line error messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines and isinstance(error, RayActorError) else " ".join(lines)[:500]
