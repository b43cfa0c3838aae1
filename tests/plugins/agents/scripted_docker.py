"""A program with the arguments of ``docker``, whose containers are processes: ``python scripted_docker.py STATE ...``.

As with a daemon, a container outlives the program that started it, passes only its variables on, and ends with its
first process. Its arguments are recorded in STATE/calls. The only image is called ``tools``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

STATE = Path(sys.argv[1])
MARK = "SCRIPTED_CONTAINER"
ALONE = """
import fcntl, os, socket, struct, sys
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH22x", b"lo", 0x41))
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Starts the loopback device, then a command."""


def main() -> None:
    command, *arguments = sys.argv[2:]
    with (STATE / "calls").open("a") as file:
        file.write(json.dumps([command, *arguments]) + "\n")
    if command == "image":
        print("sha256:0" if arguments[-1] == "tools" else f"No such image: {arguments[-1]}", file=sys.stderr)
        sys.exit(int(arguments[-1] != "tools"))
    if command == "rm":
        remove(arguments[-1])
    if command == "run":
        place = next(place for place, argument in enumerate(arguments) if not argument.startswith("--"))
        sys.exit(run(arguments[:place], arguments[place + 1 :]))


def run(options: list[str], command: list[str]) -> int:
    values = [option.removeprefix("--").partition("=")[::2] for option in options]
    chosen = dict(values)
    if chosen["network"] == "broken":
        print("docker: Error response from daemon: network broken not found.", file=sys.stderr)
        return 125
    variables = [value.partition("=") for name, value in values if name == "env"]
    env = {name: value if equals else os.environ[name] for name, equals, value in variables}
    mounts = dict(reversed(value.split(":")[:2]) for name, value in values if name == "volume")
    command = [mounts.get(part, part) for part in command]
    if chosen["network"] == "none":
        user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
        command = ["unshare", *user, "--net", sys.executable, "-I", "-S", "-c", ALONE, *command]
    name = chosen["name"]
    (STATE / "containers").mkdir(exist_ok=True)
    (STATE / "containers" / name).touch()
    try:
        child = subprocess.Popen(
            command,
            env={"PATH": os.environ["PATH"], **env, MARK: name},
            cwd=chosen.get("workdir"),
            start_new_session=True,
        )
    except OSError as error:
        remove(name)
        print(f"docker: Error response from daemon: {error}", file=sys.stderr)
        return 127
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    code = child.wait()
    remove(name)
    return 128 - code if code < 0 else code


def remove(name: str) -> None:
    variable = f"{MARK}={name}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)
    (STATE / "containers" / name).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
