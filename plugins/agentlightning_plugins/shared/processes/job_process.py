"""One half of a run in its own process: ``python -m agentlightning_plugins.shared.processes.job_process``.

The strategy ``cs`` starts this module. The job and the environment arrive through an inherited pipe. When the pipe
closes, the parent has died: this process finishes its rollouts and exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, NamedTuple

from agentlightning.run.thread import until_set
from agentlightning_plugins.shared.garbage_collection import relax_collector
from agentlightning_plugins.shared.log_setup import JsonFormatter, setup_server_log
from agentlightning_plugins.shared.processes.stopping import run_with_agents

if TYPE_CHECKING:
    from agentlightning.execution import AlgorithmJob, RunnerJob
    from agentlightning.store.protocol import LightningStore

RECYCLE_EXIT_CODE: Final = 75
"""Exit code of a runner process that must be replaced, because too many of its threads do not stop."""
UNLOADABLE_EXIT_CODE: Final = 78
"""Exit code of a process that cannot load its job; a second process could not either."""
_ORPHAN_GRACE_S: Final = 20.0


def main() -> int:
    """Runs the job until it is done, SIGTERM arrives, or the parent dies."""
    relax_collector()  # the user's imports are quicker
    role, name, pipe_fd = sys.argv[1], sys.argv[2], int(sys.argv[3])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: None)  # an agent's own: no user's Ctrl-C reaches this process
    pipe = os.fdopen(pipe_fd, "rb")
    target = JobTarget(*json.loads(_read_part(pipe)))
    for variable, value in json.loads(_read_part(pipe)).items():
        os.environ.setdefault(variable, value)
    try:
        job = load_job(_read_part(pipe), target)
    except Exception as error:  # isolation point: importing the user's modules may raise anything
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 # the parent reports this line
        return UNLOADABLE_EXIT_CODE
    threading.Thread(target=_watch_parent, args=(pipe, stop), daemon=True).start()
    relax_collector()
    if role == "algorithm":
        return asyncio.run(_run_algorithm(job, target, stop))
    return 0 if run_with_agents(run_runner(job, target, name, stop)) else RECYCLE_EXIT_CODE


class JobTarget(NamedTuple):
    """The settings that a job process takes over from its parent."""

    sys_path: list[str]
    url: str
    """URL of the store."""
    token: str | None
    run_id: str
    log_level: int | None
    """Level of Lightning's logger; None if logging is not set up."""
    log_style: Literal["text", "json"] = "text"

    @classmethod
    def of_this_process(cls, url: str, token: str | None, run_id: str) -> JobTarget:
        """Collects the settings of this process."""
        logger = logging.getLogger("agentlightning")
        log_level = logger.level if logger.handlers else None
        is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in logger.handlers)
        path = [path or str(Path.cwd()) for path in sys.path]
        return cls(path, url, token, run_id, log_level, "json" if is_json else "text")


def load_job(pickled: bytes, target: JobTarget) -> Any:
    """Unpickles a job from the parent process, and sets up logging as in the parent; importing may raise anything."""
    sys.path[:] = [*target.sys_path, *(path for path in sys.path if path not in target.sys_path)]
    if target.log_level is not None:
        setup_server_log(target.log_level, target.log_style)
    from agentlightning_plugins.shared.processes import pickling

    return pickling.load_job(pickled)


async def run_runner(job: RunnerJob, target: JobTarget, worker_id: str, stop: threading.Event) -> bool:
    """Runs a runner's job on its store. Returns False when a new process should take over."""
    async with _opened(target) as store:
        return await job(store, worker_id, stop) is not False


async def _run_algorithm(job: AlgorithmJob, target: JobTarget, stop: threading.Event) -> int:
    async with _opened(target) as store:
        await until_set(job(store), stop)
    return 128 + signal.SIGTERM if stop.is_set() else 0


@contextlib.asynccontextmanager
async def _opened(target: JobTarget) -> AsyncIterator[LightningStore]:
    from agentlightning.store.factory import create_store

    store = create_store(target.url, run=target.run_id, token=target.token)
    try:
        yield store
    finally:
        await store.close()


def _read_part(pipe: BinaryIO) -> bytes:
    return pipe.read(int.from_bytes(pipe.read(8), "big"))


def _watch_parent(pipe: BinaryIO, stop: threading.Event) -> None:
    pipe.read()
    stop.set()
    threading.Event().wait(_ORPHAN_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    except Exception:  # isolation point: print the traceback of any failure, then exit
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # abandoned threads of agents must not keep the process alive
