"""A runner in a process of its own: ``python -m agentlightning_plugins.runner_process WORKER_ID PIPE_FD``.

The strategy ``cs`` starts it. The job comes through an inherited pipe; the same pipe tells, by its end, that the
parent is
gone: then this process drains and ends too.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import threading
from typing import Any, BinaryIO

_ORPHAN_GRACE_S = 20.0


def main() -> int:
    """Runs the job until it is done, SIGTERM comes, or the parent is gone."""
    worker_id, pipe_fd = sys.argv[1], int(sys.argv[2])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    pipe = os.fdopen(pipe_fd, "rb")
    target = pickle.loads(_read_part(pipe))  # noqa: S301 # written by our own parent into an inherited pipe
    sys.path[:] = [*target["sys_path"], *(path for path in sys.path if path not in target["sys_path"])]
    job = pickle.loads(_read_part(pipe))  # noqa: S301 # as above
    threading.Thread(target=_watch_parent, args=(pipe, stop), daemon=True).start()
    return asyncio.run(_run(job, target, worker_id, stop))


async def _run(job: Any, target: dict[str, Any], worker_id: str, stop: threading.Event) -> int:
    from agentlightning_plugins.client_server import RECYCLE_EXIT_CODE
    from agentlightning_plugins.store_client import LightningStoreClient

    store = LightningStoreClient(target["url"], token=target["token"], run_id=target["run_id"])
    try:
        finished = await job(store, worker_id, stop)
    finally:
        await store.close()
    return RECYCLE_EXIT_CODE if finished is False else 0


def _read_part(pipe: BinaryIO) -> bytes:
    size = int.from_bytes(pipe.read(8), "big")
    return pipe.read(size)


def _watch_parent(pipe: BinaryIO, stop: threading.Event) -> None:
    pipe.read()
    stop.set()
    threading.Event().wait(_ORPHAN_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # agents' abandoned threads must not keep the process
