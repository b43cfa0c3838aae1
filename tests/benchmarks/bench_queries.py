"""How the documented queries grow: ``python tests/benchmarks/bench_queries.py [ROLLOUTS ...] [--only WORD]``.

Fills SQLite and PostgreSQL with 10,000 and then 100,000 rollouts of 10 spans each, and prints the CPU time of each
query at both sizes, in milliseconds of this process and of the database server, and how it grows. CPU time is what a
query takes on an idle machine with a warm cache, and says the same on a busy one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.many_rollouts import FIRST_TIME, fill_postgresql, fill_sqlite
from tests.postgresql import PostgresServer, running_server

SPANS: Final = 10
LIMIT_MS: Final = 300
NAME: Final = "openai.chat.completion"
Ask = Callable[[LightningStore, str], Awaitable[Any]]

QUERIES: Final[Mapping[str, Ask]] = {
    "a rollout by id": lambda s, i: s.get_rollout_by_id(i),
    "the spans of a rollout": lambda s, i: s.query_spans(i),
    "statistics": lambda s, i: s.statistics(),
    "rollouts: first page": lambda s, i: s.query_rollouts(limit=100),
    "rollouts: by status": lambda s, i: s.query_rollouts(status_in=["failed", "running"], limit=100),
    "rollouts: part of the id": lambda s, i: s.query_rollouts(rollout_id_contains=i[6:10], limit=100),
    "rollouts: since a time": lambda s, i: s.query_rollouts(start_after=FIRST_TIME + 50, limit=100),
    "rollouts: by task": lambda s, i: s.query_rollouts(metadata={"task_id": 8}, limit=100),
    "rollouts: any metadata, text": lambda s, i: s.query_rollouts(metadata={"group": "17-0", "fold": "a"}, limit=100),
    "rollouts: metadata that none has": lambda s, i: s.query_rollouts(metadata={"fold": "a"}, limit=100),
    "rollouts: metadata, a number": lambda s, i: s.query_rollouts(metadata={"shard": 77}, limit=100),
    "rollouts: newest first": lambda s, i: s.query_rollouts(sort_by="start_time", sort_order="desc", limit=100),
    "rollouts: sorted by end": lambda s, i: s.query_rollouts(sort_by="end_time", limit=100),
    "rollouts: sorted by mode": lambda s, i: s.query_rollouts(sort_by="mode", limit=100),
    "rollouts: sorted by status": lambda s, i: s.query_rollouts(sort_by="status", limit=100),
    "rollouts: sorted by resources": lambda s, i: s.query_rollouts(sort_by="resources_id", limit=100),
    "spans: by trace": lambda s, i: s.query_spans(None, trace_id=i),
    "spans: by trace, a page": lambda s, i: s.query_spans(None, trace_id=i, limit=100),
    "spans: by name, a page": lambda s, i: s.query_spans(None, name=NAME, limit=100),
    "spans: a name that none has": lambda s, i: s.query_spans(None, name="missing", limit=100),
    "spans: part of the name": lambda s, i: s.query_spans(None, name_contains="chat", limit=100),
    "spans: since a time": lambda s, i: s.query_spans(None, start_after=FIRST_TIME + 50, limit=100),
    "spans: by span id": lambda s, i: s.query_spans(None, span_id=f"{i}-3", limit=100),
    "spans: by parent": lambda s, i: s.query_spans(None, parent_id=i, limit=100),
}


def cpu_s(server: PostgresServer) -> float:
    """Returns the CPU time of this process and of the database server."""
    used, pid = time.process_time(), server.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


async def measure(store: LightningStore, server: PostgresServer, only: str) -> dict[str, float]:
    """Returns the milliseconds of each query."""
    middle = (await store.query_rollouts(limit=1, offset=5_000))[0].rollout_id
    found = {}
    for name, ask in QUERIES.items():
        if only in name:
            await ask(store, middle)  # fills caches
            began, times = cpu_s(server), 0
            while times < 3 or (cpu_s(server) - began < 0.2 and times < 200):  # the clock of PostgreSQL ticks at 10 ms
                await ask(store, middle)
                times += 1
            found[name] = (cpu_s(server) - began) / times * 1e3
    return found


@asynccontextmanager
async def filled(kind: str, number: int) -> AsyncIterator[tuple[LightningStore, PostgresServer]]:
    """Opens a store of finished rollouts."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, running_server() as server:  # safe: a random name
        url = f"sqlite:///{folder}/store.db" if kind == "sqlite" else server.url(server.lend_database())
        await create_store(url).close()
        if kind == "sqlite":
            await asyncio.to_thread(fill_sqlite, Path(folder, "store.db"), number, spans=SPANS)
        else:
            await fill_postgresql(url, number, spans=SPANS)
        store = create_store(url)
        try:
            yield store, server
        finally:
            await store.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rollouts", nargs="*", type=int, default=[10_000, 100_000])
    parser.add_argument("--only", default="", help="only queries with this word in their name")
    arguments = parser.parse_args()
    for kind in ("sqlite", "postgresql"):
        columns = []
        for number in arguments.rollouts:
            async with filled(kind, number) as (store, server):
                columns.append(await measure(store, server, arguments.only))
        print(f"{kind:34}" + "".join(f"{number:>11,}" for number in arguments.rollouts) + "     growth")
        for name, last in columns[-1].items():
            values = "".join(f"{column[name]:11.1f}" for column in columns)
            slow = "  above the goal" if last > LIMIT_MS else ""
            print(f"{name:34}{values}{last / columns[0][name]:11.1f}{slow}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
