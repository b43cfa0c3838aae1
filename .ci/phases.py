"""Runs everything that must hold, or some parts of it: `python .ci/phases.py lint verl`.

The tests of `main` run beside the other environments, and `serial`, which measures time, runs alone at the end. With
--soak the tests run that take minutes; with --busy everything runs on one core that two endless loops share.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from environments import ENVIRONMENTS, REPO, uv

RESULTS = REPO / ".venvs" / "results"
SOURCES = "core plugins integrations algorithms examples".split()
# Two lanes side by side; the last one follows alone. A failed part stops neither.
LANES = [["main"], ["lint", "verl", "oldest", "vllm", "newest", "frameworks", "docs"]]
ALONE = ["serial"]
LIMIT_S = 75 * 60
"""A run that takes longer hangs."""
FAILURES = ("failure", "error")
"""Elements of a test that failed in a JUnit file."""
SOAK = ["main", "verl", "verl-vllm", "vllm"]


class Run:
    """One run of several parts: what failed, and how long each phase took."""

    def __init__(self, *, soak: bool) -> None:
        self.soak = soak
        self.failed: list[str] = []
        self.seconds: dict[str, float] = {}
        self._output = threading.Lock()
        self._running: dict[str, Path] = {}  # the phases, with the files of their output
        self._processes: list[subprocess.Popen[bytes]] = []

    def lane(self, parts: list[str]) -> None:
        for part in parts:
            environment = part if part in ENVIRONMENTS else "main"
            if self._phase(f"install {environment}", self._install(environment)):
                self._phase(part, self._commands(part))

    def _install(self, environment: str) -> list[list[str]]:
        return [[sys.executable, str(REPO / ".ci" / "environments.py"), environment]]

    def _commands(self, part: str) -> list[list[str]]:
        environment = REPO / ".venvs" / (part if part in ENVIRONMENTS else "main") / "bin"
        if part == "lint":
            ruff, mypy = str(environment / "ruff"), str(environment / "mypy")
            return [
                [ruff, "check", "--quiet", "."],
                [ruff, "format", "--check", "--quiet", "."],
                [mypy, "--no-error-summary", *SOURCES],
                [str(environment / "python"), "-m", "tests.new_plugins"],
            ]
        select = "soak" if self.soak else "serial and not soak" if part == "serial" else "not serial and not soak"
        pytest = [str(environment / "python"), "-m", "pytest", "-m", select, "-o", f"cache_dir=.pytest_cache/{part}"]
        pytest += [f"--environment={environment.parent.name}", f"--junitxml={RESULTS / part}.xml"]
        if self.soak:
            pytest += ["-o", "faulthandler_timeout=10800"]
        elif part == "serial":  # collecting the others would take longer than these tests do
            files = [path for path in (REPO / "tests").rglob("test_*.py") if "pytest.mark.serial" in path.read_text()]
            pytest += map(str, sorted(files))
        elif part == "main":
            pytest += ["-n", "4", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0"]
        return [[*pytest, *shlex.split(os.environ.get("PYTEST_ARGS", ""))]]

    def _phase(self, name: str, commands: list[list[str]]) -> bool:
        """Runs commands, prints their output once they have ended, and returns whether all succeeded.

        Until then a file in .venvs/results has the output.
        """
        started = time.monotonic()
        path = RESULTS / f"{name.replace(' ', '-')}.log"
        self._running[name] = path
        with path.open("wb") as log:
            done = [self._run(name, command, log) for command in commands]
        del self._running[name]
        self.seconds[name] = time.monotonic() - started
        with self._output:
            print(f"== {name}: {'passed' if all(done) else 'FAILED'} in {self.seconds[name]:.0f} s", flush=True)
            sys.stdout.buffer.write(path.read_bytes())
            sys.stdout.flush()
        self.failed += [] if all(done) else [name]
        return all(done)

    def _run(self, name: str, command: list[str], log: BinaryIO) -> bool:
        """Runs a command, prints how far its tests are, and returns whether it succeeded.

        The command writes into the file itself: a pipe would stay open as long as any process that a test left behind.
        """
        tenth = 0
        process = subprocess.Popen(command, cwd=REPO, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self._processes.append(process)
        running = True
        while running:
            running = process.poll() is None
            shares = re.findall(rb"\[ *(\d+)%\]$", Path(log.name).read_bytes(), re.MULTILINE)
            if shares and int(shares[-1]) // 10 > tenth:
                tenth = int(shares[-1]) // 10
                with self._output:
                    print(f"{name}: {tenth}0 % of the tests", flush=True)
            time.sleep(0.2 if running else 0)
        self._processes.remove(process)
        kill(process)
        return process.returncode == 0

    def stop(self, *_: object) -> None:
        """Ends at a signal: kills what runs, and prints the end of its output and where its tests were."""
        with self._output:  # no phase prints that it failed, or begins the next one
            running = dict(self._running)
            for process in list(self._processes):
                kill(process, signal.SIGABRT)  # pytest writes the stacks of all threads
            time.sleep(2)
            for process in list(self._processes):
                kill(process)
            for name, path in running.items():
                text = path.read_text(errors="replace")
                print(f"== {name}: stopped\n" + "\n".join(text.splitlines()[-100:]))
                for place in re.findall(r'^  File ".*?(/tests/.*)$', text, re.MULTILINE)[-20:]:
                    print(f"{name} was stopped in {place}", flush=True)
            os._exit(1)

    def stop_after(self, seconds: float) -> None:
        time.sleep(seconds)
        self.stop()

    def summary(self) -> str:
        """Returns a few lines: the slowest tests, the time of each phase, what failed."""
        tests = [
            (float(case.get("time", 0)), f"{path.stem}: {case.get('classname')}::{case.get('name')}"[:150], case)
            for path in RESULTS.glob("*.xml")
            for case in ElementTree.parse(path).iter("testcase")  # noqa: S314 our own pytest wrote it
        ]
        tests.sort(key=lambda test: -test[0])
        lines = ["The slowest tests:"] if tests else []
        lines += [f"{seconds:6.0f} s  {name}" for seconds, name, _ in tests[:10]]
        lines += [", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.seconds.items())]
        for _, name, case in tests:
            lines += [
                f"FAILED {name}: {found.get('message', '').partition(chr(10))[0][:200]}"
                for found in case
                if found.tag in FAILURES
            ]
        return "\n".join([*lines, *([f"FAILED: {', '.join(self.failed)}"] if self.failed else [])])


def kill(process: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
    """Sends a signal to what is left of a command and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def busy_on_one_core() -> list[subprocess.Popen[bytes]]:
    """Pins this process and its children to one core, where two endless loops run too, and returns the loops."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    return [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = [part for lane in [*LANES, ALONE] for part in lane]
    parser.add_argument("parts", nargs="*", choices=[[], *parts], help="default: all")
    parser.add_argument("--soak", action="store_true", help="run the tests that take minutes")
    parser.add_argument("--busy", action="store_true", help="run on one core, beside two busy loops")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, each process compiles all modules again
    os.environ.pop("PYTHONHASHSEED", None)  # workers compare the names of tests with a seed each
    wanted = options.parts or (SOAK if options.soak else parts)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for old in RESULTS.glob("*.xml"):
        old.unlink()
    started = time.monotonic()
    loops = busy_on_one_core() if options.busy else []
    run = Run(soak=options.soak)
    signal.signal(signal.SIGTERM, run.stop)
    signal.signal(signal.SIGINT, run.stop)
    if not (options.soak or options.busy):
        threading.Thread(target=run.stop_after, args=[LIMIT_S], daemon=True).start()
    try:
        uv()  # installed once, before the lanes need it
        lanes = [parts] if options.soak else LANES
        with ThreadPoolExecutor() as threads:
            list(threads.map(run.lane, [[part for part in lane if part in wanted] for lane in lanes]))
        run.lane([part for part in ALONE if part in wanted])
    finally:
        for loop in loops:
            loop.kill()
    print(run.summary())
    print(f"{'FAILED' if run.failed else 'passed'} in {(time.monotonic() - started) / 60:.1f} minutes")
    return bool(run.failed)


if __name__ == "__main__":
    sys.exit(main())
