"""Several store servers over one database: a suspended one does not delay the others; a second adds throughput."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import time
from pathlib import Path

import pytest

from agentlightning_plugins.stores.http.client import LightningStoreClient
from tests.benchmarks.bench_servers import GROUPS, measure, serving
from tests.benchmarks.bench_store import make_spans
from tests.postgresql import running_server

pytestmark = pytest.mark.environment("main")  # about processes, not about versions of libraries

WINDOW_S = 0.4


async def test_a_suspended_server_delays_calls_to_other_servers_by_less_than_100_ms(database: str) -> None:
    with serving(database, 2, 0.0) as servers:
        clients = [LightningStoreClient(f"http://127.0.0.1:{port}") for _, port in servers]
        calls: list[tuple[float, float]] = []
        """Start and end times of the calls to the second server."""
        stopping = False

        async def work(client: LightningStoreClient, name: str) -> None:
            while not stopping:
                times = [time.monotonic()]
                await client.enqueue_rollout(name)
                times.append(time.monotonic())
                claimed = await client.dequeue_rollout(name)
                times.append(time.monotonic())
                if claimed is not None:
                    ids = claimed.rollout_id, claimed.attempt.attempt_id
                    await client.add_many_spans(make_spans(*ids))
                    times.append(time.monotonic())
                    await client.update_attempt(*ids, status="succeeded")
                    times.append(time.monotonic())
                if client is clients[1]:
                    calls.extend(itertools.pairwise(times))

        working = [asyncio.create_task(work(client, f"w{n}")) for client in clients for n in range(4)]
        await asyncio.sleep(WINDOW_S)
        windows: list[tuple[float, float]] = []
        for number in range(16):  # the first server is suspended in every other window
            if number % 2:
                servers[0][0].send_signal(signal.SIGSTOP)
            windows.append((time.monotonic(), time.monotonic() + WINDOW_S))
            await asyncio.sleep(WINDOW_S)
            servers[0][0].send_signal(signal.SIGCONT)
        stopping = True
        await asyncio.gather(*working)
        for client in clients:
            await client.close()
    longest = [max((b - a for a, b in calls if a < end and b > begun), default=9.0) for begun, end in windows]
    print([round(seconds * 1e3) for seconds in longest], "ms, the first server running and suspended in turn")
    assert len(calls) > 100
    assert statistics.median(longest[1::2]) - statistics.median(longest[::2]) < 0.1
    assert max(longest[1::2]) < 5  # a lock would have been held until the end of each pause


@pytest.mark.soak
async def test_two_servers_have_more_throughput_than_one_and_rarely_wait_for_locks(tmp_path: Path) -> None:
    share = 0.25 if os.access(GROUPS, os.W_OK) else 0.0  # without root: the load and the database share the cores
    ratios = []
    with running_server(Path("/tmp")) as place:
        for _ in range(3):
            one, _ = await measure(place, 1, share, 5.0)
            two, locks = await measure(place, 2, share, 5.0)
            assert locks < 0.05
            ratios.append(two / one)
    assert statistics.median(ratios) >= (1.3 if share else 0.9), ratios
