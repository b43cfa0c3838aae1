"""Store servers that share a database: ``python tests/benchmarks/bench_servers.py [--servers 1 2 4] [--share 0.25]``.

Each ``agl store`` is a process over the same new PostgreSQL server, with fsync on. Processes that only send prepared
bytes run rollouts: enqueue, claim, 10 spans, finish, wait, read the spans. ``--share`` limits each store server to a
share of a core (by a control group, which needs root), so that on a small machine the rest is left to the database and
the load, as with one machine per store server; 0 sets no limit. Each line shows what the servers' connections waited
for in samples of ``pg_stat_activity``, and how much of a core each part used.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.bench_store import SPANS, make_spans
from tests.postgresql import PostgresServer, running_server

LOADS = 2
RUNNERS = 24
"""Concurrent rollouts of each process that makes load."""
WARM_UP_S = 1.5
SAMPLE_S = 0.01
GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000
STATES = """SELECT coalesce(wait_event_type || ':' || wait_event, 'running') FROM pg_stat_activity
WHERE application_name = 'lightning' AND state = 'active'"""


class Runner:
    """Runs rollouts over one connection with as little work as possible."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address)

    async def send(self, path: str, body: bytes) -> Any:
        head = f"POST /v1/agl{path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
        self._writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        content = await self._reader.readexactly(length)
        assert answer.startswith(b"HTTP/1.1 2"), content
        return content

    async def run_one(self, task: int, spans: bytes) -> None:
        queued = orjson.loads(
            await self.send(
                "/queues/rollouts/enqueue",
                b'{"rollouts":[{"input":{"question":%d},"mode":"train","metadata":{"group":%d}}]}' % (task, task // 8),
            )
        )
        asked = await self.send("/queues/rollouts/dequeue", b'{"worker_id":"runner-%d","timeout":30}' % id(self))
        (claimed,) = orjson.loads(asked)
        rollout_id, attempt_id = claimed["rollout_id"], claimed["attempt"]["attempt_id"]
        of_attempt = spans.replace(b"ro-", rollout_id.encode()).replace(b"at-", attempt_id.encode())
        await self.send("/spans/batch", of_attempt)
        await self.send(f"/rollouts/{rollout_id}/attempts/{attempt_id}", b'{"status":"succeeded"}')
        waited = b'{"rollout_ids":["%s"],"timeout":30}' % queued[0]["rollout_id"].encode()
        assert b'"succeeded"' in await self.send("/waits/rollouts", waited)
        await self.send("/spans/search", b'{"rollout_id":"%s"}' % rollout_id.encode())


async def make_load(ports: Sequence[int], seconds: float) -> None:
    """Runs rollouts for some time and prints the seconds of each as JSON."""
    spans = orjson.dumps({"spans": [span.model_dump(mode="json") for span in make_spans("ro-", "at-")]})
    assert spans.count(b'"at-"') == SPANS
    runners = [Runner("127.0.0.1", ports[number % len(ports)]) for number in range(RUNNERS)]
    await asyncio.gather(*(runner.open() for runner in runners))
    took: list[float] = []

    async def work(runner: Runner, end: float) -> None:
        while (begun := time.monotonic()) < end:
            await runner.run_one(len(took), spans)
            took.append(time.monotonic() - begun)

    for is_counted in (False, True):  # not counted: new connections to PostgreSQL plan each statement once
        took.clear()
        end = time.monotonic() + (seconds if is_counted else WARM_UP_S)
        await asyncio.gather(*(work(runner, end) for runner in runners))
        if not is_counted:
            print(flush=True)
            sys.stdin.readline()
    print(orjson.dumps(took).decode())


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextlib.contextmanager
def serving(database: str, servers: int, share: float) -> Iterator[list[tuple[subprocess.Popen[str], int]]]:
    """Runs store servers of one database and yields their processes and ports."""
    found: list[tuple[subprocess.Popen[str], int]] = []
    groups: list[Path] = []
    try:
        for number in range(servers):
            process = start("-m", "agentlightning", "store", "--port", "0", "--backend", database)
            assert process.stdout is not None
            found.append((process, int(process.stdout.readline().rpartition(":")[2])))
            if share:
                groups.append(GROUPS / f"agl-bench-{os.getpid()}-{number}")
                groups[-1].mkdir()
                (groups[-1] / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (groups[-1] / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * share)))
                (groups[-1] / "cgroup.procs").write_text(str(process.pid))
        yield found
    finally:
        for process, _ in found:
            process.terminate()
            process.communicate()
        for group in groups:
            group.rmdir()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def cpu_of_database(place: PostgresServer) -> float:
    """Returns the CPU seconds of PostgreSQL's processes."""
    assert place._process is not None
    pid = place._process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(cpu_s(int(child)) for child in children if Path(f"/proc/{child}").exists())


async def count_commits(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        found = await connection.fetchval("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
        return int(found)
    finally:
        await connection.close()


async def sample(url: str, seen: collections.Counter[str]) -> None:
    """Counts the states of the servers' connections until it is cancelled."""
    connection = await asyncpg.connect(url)
    try:
        while True:
            seen.update(state for (state,) in await connection.fetch(STATES))
            await asyncio.sleep(SAMPLE_S)
    finally:
        connection.terminate()


async def measure(place: PostgresServer, servers: int, share: float, seconds: float) -> tuple[float, float]:
    """Prints and returns rollouts/s and the share of samples that waited for a lock."""
    name = place.lend_database()
    url, seen = place.url(name), collections.Counter[str]()
    with serving(url, servers, share) as served:
        ports = [str(port) for _, port in served]
        loads = [start(__file__, "--load", str(seconds), "--servers", *ports) for _ in range(LOADS)]
        await asyncio.gather(*(asyncio.to_thread(load.stdout.readline) for load in loads if load.stdout))
        sampling = asyncio.create_task(sample(url, seen))
        before = sum(cpu_s(process.pid) for process, _ in served)
        database_before, commits_before, begun = cpu_of_database(place), await count_commits(url), time.monotonic()
        for load in loads:
            assert load.stdin is not None
            load.stdin.write("\n")
            load.stdin.flush()
        texts = await asyncio.gather(*(asyncio.to_thread(load.communicate) for load in loads))
        took_s = time.monotonic() - begun
        used = sum(cpu_s(process.pid) for process, _ in served) - before
        database_used = cpu_of_database(place) - database_before
        commits = await count_commits(url) - commits_before
        sampling.cancel()
        await asyncio.wait({sampling})
    place.take_back(name)
    took = sorted(second for text, _ in texts for second in orjson.loads(text))
    speed, total = len(took) / took_s, max(1, seen.total())
    locks = sum(count for state, count in seen.items() if state.startswith("Lock:")) / total
    waits = ", ".join(f"{state} {count / total:.1%}" for state, count in seen.most_common(6))
    p50, p99 = statistics.median(took), took[len(took) * 99 // 100]
    print(
        f"{servers} servers: {speed:,.0f} rollouts/s, {p50 * 1e3:.0f} ms each (99 %: {p99 * 1e3:.0f} ms); "
        f"CPU of a server {used / servers / took_s:.0%}, {used / len(took) * 1e3:.2f} ms a rollout, of the database "
        f"{database_used / len(took) * 1e3:.2f} ms in {commits / len(took):.1f} transactions; "
        f"lock waits {locks:.1%} of {total} samples ({waits})",
        flush=True,
    )
    return speed, locks


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.25 if os.access(GROUPS, os.W_OK) else 0.0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder of the database")
    parser.add_argument("--load", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        await make_load(arguments.servers, arguments.load)
        return
    with running_server(arguments.folder) as place:
        for _ in range(arguments.rounds):
            (first, _), *others = [
                await measure(place, servers, arguments.share, arguments.seconds) for servers in arguments.servers
            ]
            ratios = [f"{speed / first:.2f}" for speed, _ in others]
            print(f"times the speed of {arguments.servers[0]}: {', '.join(ratios)} (share {arguments.share or 'all'})")


if __name__ == "__main__":
    asyncio.run(main())
