"""Speed of a served store: ``python tests/benchmarks/bench_store_server.py``.

``agl store`` serves memory in a separate process; 16 clients in this process run rollouts as in ``bench_store.py``.
The baseline is a bare aiohttp server in a separate process that decodes the same bodies and answers the same bytes to
the same client. Both are measured in turn, so that a noisy machine disturbs both. CPU is the time of the server's
process per rollout: its ratio is the cost of the store, independent of the client.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.stores.http.client import LightningStoreClient
from tests.benchmarks.bench_store import RUNNERS, SPANS, make_spans, run_one


class Server:
    """A server process, and the CPU time that it has used."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.url = process.stdout.readline().split()[-1]
        self._stat = Path(f"/proc/{process.pid}/stat")

    def cpu_s(self) -> float:
        fields = self._stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serve(*command: str) -> Iterator[Server]:
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        yield Server(process)
    finally:
        process.terminate()
        process.communicate()


async def serve_bare(answers: list[bytes]) -> None:
    """Answers each kind of request of a rollout with a recorded answer of the store."""
    kinds = ["enqueue", "dequeue", "batch", "attempts", "waits", "search"]

    async def handle(request: web.Request) -> web.Response:
        orjson.loads(await request.read())
        kind = next(number for number, kind in enumerate(kinds) if kind in request.path)
        return web.Response(body=answers[kind], headers={"content-type": "application/json"})

    application = web.Application(client_max_size=2**26)
    application.router.add_route("POST", "/{path:.*}", handle)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def recorded() -> AsyncIterator[list[bytes]]:
    """Yields a list that collects the answers to all requests of the block."""
    answers: list[bytes] = []
    send = aiohttp.ClientSession.request

    @contextlib.asynccontextmanager
    async def record(self: aiohttp.ClientSession, method: str, url: Any, **options: Any) -> AsyncIterator[Any]:
        async with send(self, method, url, **options) as response:
            answers.append(await response.read())
            yield response

    aiohttp.ClientSession.request = record
    try:
        yield answers
    finally:
        aiohttp.ClientSession.request = send


Rollout = Callable[[LightningStore, int], Awaitable[None]]


async def run_many(store: LightningStore, rollout: Rollout, rollouts: int) -> None:
    tasks = iter(range(rollouts))

    async def runner() -> None:
        for task in tasks:
            await rollout(store, task)

    await asyncio.gather(*(runner() for _ in range(RUNNERS)))


async def run_bare(store: LightningStore, task: int) -> None:
    """Makes the calls of ``run_one`` to a server whose answers are always those of one recorded rollout."""
    await store.enqueue_rollout({"question": task}, mode="train", metadata={"group": task // 8})
    claimed = await store.dequeue_rollout("runner", timeout=10)
    assert claimed is not None
    await store.add_many_spans(make_spans(claimed.rollout_id, claimed.attempt.attempt_id))
    await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
    (done,) = await store.wait_for_rollouts([claimed.rollout_id], timeout=10)
    assert done.status == "succeeded"
    assert len(await store.query_spans(claimed.rollout_id)) == SPANS


async def measure_wake_ups(store: LightningStore) -> tuple[list[float], list[float]]:
    """Returns milliseconds from an enqueue until a blocked dequeue returns, and from a finish until a wait returns."""
    dequeues, waits = [], []
    for number in range(200):
        asking = asyncio.create_task(store.dequeue_rollout("runner", timeout=10))
        await asyncio.sleep(0.01)
        began = time.perf_counter()
        await store.enqueue_rollout(number)
        claimed = await asking
        dequeues.append((time.perf_counter() - began) * 1e3)
        assert claimed is not None
        waiting = asyncio.create_task(store.wait_for_rollouts([claimed.rollout_id], timeout=10))
        await asyncio.sleep(0.01)
        began = time.perf_counter()
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        await waiting
        waits.append((time.perf_counter() - began) * 1e3)
    return dequeues, waits


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="memory://")
    parser.add_argument("--bare", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        await serve_bare([base64.b64decode(text) for text in arguments.bare])
        return
    with serve("-m", "agentlightning", "store", "--port", "0", "--backend", arguments.backend) as served:
        store = LightningStoreClient(served.url)
        async with recorded() as answers:
            await run_one(store, 0)
        with serve(__file__, "--bare", *[base64.b64encode(answer).decode() for answer in answers]) as bare:
            bare_store = LightningStoreClient(bare.url)
            kinds = ((served, store, run_one), (bare, bare_store, run_bare))
            for _ in range(arguments.rounds):
                speeds, costs = [], []
                for server, client, rollout in kinds:
                    wall, cpu = time.perf_counter(), server.cpu_s()
                    await run_many(client, rollout, arguments.rollouts)
                    speeds.append(arguments.rollouts / (time.perf_counter() - wall))
                    costs.append((server.cpu_s() - cpu) / arguments.rollouts * 1e3)
                print(
                    f"store {speeds[0]:,.0f} rollouts/s, bare {speeds[1]:,.0f}: {speeds[1] / speeds[0]:.2f} times; "
                    f"server's CPU {costs[0]:.2f} ms a rollout, bare {costs[1]:.2f}: {costs[0] / costs[1]:.2f} times"
                )
            await bare_store.close()
        dequeues, waits = await measure_wake_ups(store)
        for name, times in (("enqueue to dequeue", dequeues), ("finish to wait", waits)):
            p50, p95 = statistics.median(times), statistics.quantiles(times, n=20)[-1]
            print(f"{name}: p50 {p50:.2f} ms, p95 {p95:.2f} ms")
        await store.close()


if __name__ == "__main__":
    asyncio.run(main())
