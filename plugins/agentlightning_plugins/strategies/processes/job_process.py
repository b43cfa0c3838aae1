"""One half of a run in its own process: ``python -m agentlightning_plugins.strategies.processes.job_process``.

The strategy ``cs`` starts it. The job comes through an inherited pipe; the same pipe tells, by its end, that the
parent is gone: then this process drains and ends too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

from agentlightning.logging import setup_logging
from agentlightning_plugins.garbage_collection import relax_collector

if TYPE_CHECKING:
    from agentlightning.execution import AlgorithmJob, RunnerJob

RECYCLE_EXIT_CODE: Final = 75
"""A runner process ends with this to be replaced at once: it had too many threads that would not stop."""
UNLOADABLE_EXIT_CODE: Final = 78
"""The job cannot be loaded here, and would not be in a second process."""
_ORPHAN_GRACE_S: Final = 20.0


def main() -> int:
    """Runs the job until it is done, SIGTERM comes, or the parent is gone."""
    role, name, pipe_fd = sys.argv[1], sys.argv[2], int(sys.argv[3])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    pipe = os.fdopen(pipe_fd, "rb")
    target = JobTarget(*json.loads(_read_part(pipe)))
    try:
        job = load_job(_read_part(pipe), target)
    except Exception as error:  # isolation point: importing the user's modules may raise anything
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 # the parent quotes this line
        return UNLOADABLE_EXIT_CODE
    threading.Thread(target=_watch_parent, args=(pipe, stop), daemon=True).start()
    relax_collector()
    if role == "algorithm":
        return asyncio.run(_run_algorithm(job, target, stop))
    return 0 if asyncio.run(run_runner(job, target, name, stop)) else RECYCLE_EXIT_CODE


class JobTarget(NamedTuple):
    """What a job needs to know of the process that it comes from."""

    sys_path: list[str]
    url: str
    """Of the store."""
    token: str | None
    run_id: str
    log_level: int | None
    """None where nobody has set up our log."""

    @classmethod
    def of_this_process(cls, url: str, token: str | None, run_id: str) -> JobTarget:
        """What jobs need to know of this one."""
        logger = logging.getLogger("agentlightning")
        log_level = logger.level if logger.handlers else None
        return cls([path or str(Path.cwd()) for path in sys.path], url, token, run_id, log_level)


def load_job(pickled: bytes, target: JobTarget) -> Any:
    """Loads a job that our own parent has pickled, and logs as the parent does.

    Raises:
        Exception: whatever importing the user's modules raises.
    """
    sys.path[:] = [*target.sys_path, *(path for path in sys.path if path not in target.sys_path)]
    if target.log_level is not None:
        setup_logging(target.log_level)
    return pickle.loads(pickled)  # noqa: S301 # it comes through an inherited pipe, or Ray's own channel


async def run_runner(job: RunnerJob, target: JobTarget, worker_id: str, stop: threading.Event) -> bool:
    """Runs a runner's job against the store that it is for. False: a fresh process should take over."""
    from agentlightning.store.factory import create_store

    store = create_store(target.url, run=target.run_id, token=target.token)
    try:
        return await job(store, worker_id, stop) is not False
    finally:
        await store.close()


async def _run_algorithm(job: AlgorithmJob, target: JobTarget, stop: threading.Event) -> int:
    from agentlightning.store.factory import create_store

    store = create_store(target.url, run=target.run_id, token=target.token)
    work = asyncio.ensure_future(job(store))
    loop = asyncio.get_running_loop()

    def cancel_when_told() -> None:
        stop.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(work.cancel)

    threading.Thread(target=cancel_when_told, daemon=True).start()
    try:
        await work
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    finally:
        await store.close()
    return 0


def _read_part(pipe: BinaryIO) -> bytes:
    size = int.from_bytes(pipe.read(8), "big")
    return pipe.read(size)


def _watch_parent(pipe: BinaryIO, stop: threading.Event) -> None:
    pipe.read()
    stop.set()
    threading.Event().wait(_ORPHAN_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    except Exception:  # isolation point: whatever ends the job is this process's last word
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # agents' abandoned threads must not keep the process
