"""Runs a command within limits, as the first process of its sandbox: ``python guard.py SETTINGS COMMAND...``.

``SETTINGS`` is the JSON of ``sandbox.Limits`` and a few paths. This is a script of its own with few imports, because it
starts once for each attempt. The exit code is the command's, or 128+n if signal n ended it. If the command exceeds a
limit, the file ``settings["reason"]`` says which.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from typing import Any

_INTERVAL_S = 0.25
_PROC = "/proc" if sys.platform == "linux" else ""


def main() -> None:
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    is_alone = os.getpid() == 1  # in a process namespace
    if settings["has_own_network"]:
        _start_loopback()
    if settings["port"]:
        _forward(settings["port"], settings["socket"])
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, settings["open_files"])
    _limit(resource.RLIMIT_FSIZE, settings["disk_mb"] * 2**20)
    if is_alone and os.getuid() != 0:  # outside a namespace, all processes of the user count
        _limit(resource.RLIMIT_NPROC, settings["processes"])
    try:
        child = os.posix_spawnp(command[0], command, os.environ)
    except OSError as error:
        sys.exit(f"{command[0]!r} cannot be started: {error}")
    threading.Thread(target=_watch, args=(settings, is_alone), daemon=True).start()
    while True:  # the first process of a namespace inherits orphans
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)


def _limit(kind: int, value: int) -> None:
    """Sets a limit, or the highest one that is allowed."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _watch(settings: dict[str, Any], is_alone: bool) -> None:
    """Ends everything once the processes, their memory or their files are more than allowed."""
    most = {
        "processes": settings["processes"],
        "MiB of memory": settings["memory_mb"],
        "MiB of files": settings["disk_mb"],
    }
    next_look = 0.0
    used: dict[str, float] = {}
    while True:
        if is_alone and _PROC:
            used["processes"], used["MiB of memory"] = _measure_processes()
        if time.monotonic() >= next_look:
            started = time.monotonic()
            used["MiB of files"] = sum(map(measure_folder, settings["folders"])) / 2**20
            next_look = time.monotonic() + max(1.0, 20 * (time.monotonic() - started))
        for what, value in used.items():
            if most[what] is not None and value > most[what]:
                with open(settings["reason"], "w") as file:  # noqa: PTH123 no pathlib: slow to import
                    file.write(f"more than {most[what]} {what}")
                os.kill(-1, signal.SIGKILL) if is_alone else os.killpg(0, signal.SIGKILL)
                os._exit(1)
        time.sleep(_INTERVAL_S)


def _measure_processes() -> tuple[int, float]:
    """Returns the number of processes in this namespace, and the MiB of their resident memory."""
    pages, count = 0, 0
    for name in filter(str.isdigit, os.listdir(_PROC)):  # noqa: PTH208 as above
        try:
            with open(f"{_PROC}/{name}/statm") as file:  # noqa: PTH123 as above
                pages += int(file.read().split()[1])
            count += 1
        except (OSError, IndexError):  # it has ended
            continue
    return count - 1, pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure_folder(path: str) -> int:
    """Returns the bytes of the files below a folder, as they are allocated."""
    total = 0
    waiting = [path]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:  # it was removed, or made unreadable
            continue
    return total


def _start_loopback() -> None:
    """Starts the loopback device of this network namespace."""
    import fcntl
    import struct

    with socket.socket() as any_socket:
        up_and_running = struct.pack("16sH22x", b"lo", 0x1 | 0x40)
        fcntl.ioctl(any_socket, 0x8914, up_and_running)  # SIOCSIFFLAGS


def _forward(port: int, path: str) -> None:
    """Passes connections to a port of the loopback device on to a Unix socket."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", port))
    listener.listen(128)

    def accept() -> None:
        while True:
            near, far = listener.accept()[0], socket.socket(socket.AF_UNIX)
            try:
                far.connect(path)
            except OSError:
                near.close()
                continue
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(source, target), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


if __name__ == "__main__":
    main()
