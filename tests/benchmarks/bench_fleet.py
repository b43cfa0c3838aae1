"""The costs of runners for a store, and the load at which they get a queue: `python tests/benchmarks/bench_fleet.py`.

`agl runner` processes run an agent that records spans and sleeps for ``--agent-s``, over one `agl store` and a new
PostgreSQL. The costs are those of real clients, with heartbeats, event streams and resources; ``bench_servers.py``
measures what a server can do for a client that sends prepared bytes. Then rollouts are enqueued at rising rates, of
which ``simulate_fleet.py``, given the measured costs, says up to which nothing waits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, Rollout
from agentlightning_plugins.stores.http.client import LightningStoreClient
from tests.benchmarks.bench_servers import cpu_of_database, cpu_s, start
from tests.benchmarks.simulate_fleet import BEAT_S, Fleet, simulate
from tests.postgresql import running_server

AGENT = """
import time
import agentlightning as agl

def agent(task):
    for number in range(task):
        agl.emit_message(f"step {{number}}")
    time.sleep({})
    return 1.0
"""
IDLE_S = 10.0


def count_connections(port: int) -> int:
    """Returns the number of connections to a port of this machine, counted at the server's end."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "01" for line in lines)


SPANS, MORE_SPANS = 10, 60


async def run(client: LightningStoreClient, number: int, spans: int) -> list[Rollout]:
    """Enqueues rollouts at once and waits for them."""
    queued = await client.enqueue_many_rollouts([EnqueueRolloutRequest(input=spans)] * number)
    done = await client.wait_for_rollouts([rollout.rollout_id for rollout in queued])
    assert all(rollout.status == "succeeded" for rollout in done)
    return done


async def offer(client: LightningStoreClient, rate: float, for_s: float) -> tuple[int, int]:
    """Enqueues rollouts at a rate; returns how many wait after half of the time, and at the end."""
    waiting: list[int] = []
    ids: list[str] = []
    begun = time.monotonic()
    while (elapsed := time.monotonic() - begun) < for_s:
        requests = [EnqueueRolloutRequest(input=SPANS)] * (int(rate * elapsed) - len(ids))
        ids += [rollout.rollout_id for rollout in await client.enqueue_many_rollouts(requests)] if requests else []
        await asyncio.sleep(0.1)
        if len(waiting) < 2 * elapsed / for_s:
            waiting.append((await client.query_rollouts(status_in=["queuing", "requeuing"], limit=0)).total)
    waiting.append((await client.query_rollouts(status_in=["queuing", "requeuing"], limit=0)).total)
    await client.wait_for_rollouts(ids)
    return waiting[1], waiting[-1]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runners", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=8, help="rollouts that a runner does at the same time")
    parser.add_argument("--rollouts", type=int, default=300)
    parser.add_argument("--agent-s", type=float, default=0.5)
    parser.add_argument("--offer-s", type=float, default=20.0, help="how long each rate is offered")
    parser.add_argument("--loads", type=float, nargs="*", default=[0.5, 0.75, 0.9, 1.1, 1.3])
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "agent.py").write_text(AGENT.format(options.agent_s))
        place = stack.enter_context(running_server())
        server = start("-m", "agentlightning", "store", "--port", "0", "--backend", place.url())
        assert server.stdout is not None
        stack.callback(server.communicate)
        stack.callback(server.terminate)
        url = server.stdout.readline().split()[-1]
        port = int(url.rpartition(":")[2])
        client = LightningStoreClient(url)
        await client.statistics()

        def used_ms() -> tuple[float, float]:
            """Returns the milliseconds of CPU of the server and of the database."""
            return cpu_s(server.pid) * 1e3, cpu_of_database(place) * 1e3

        def since(before: tuple[float, float], number: float) -> tuple[float, float]:
            server_ms, database_ms = used_ms()
            return (server_ms - before[0]) / number, (database_ms - before[1]) / number

        connections, before = count_connections(port), used_ms()
        await asyncio.sleep(IDLE_S)
        alone = since(before, IDLE_S)
        command = ["-m", "agentlightning", "runner", f"{folder}/agent.py:agent", "--store", url]
        for _ in range(options.runners):
            runner = start(*command, "--max-concurrency", str(options.concurrency))
            stack.callback(runner.communicate)
            stack.callback(runner.terminate)
        while len(await client.query_workers()) < options.runners:  # noqa: ASYNC110 # no event reports workers
            await asyncio.sleep(0.2)
        await run(client, options.runners * 8, SPANS)
        before = used_ms()
        await asyncio.sleep(IDLE_S)
        idle = [(each - own) / options.runners for each, own in zip(since(before, IDLE_S), alone, strict=True)]
        connections = (count_connections(port) - connections) // options.runners
        before, begun = used_ms(), time.monotonic()
        done = await run(client, options.rollouts, SPANS)
        rate = options.rollouts / (time.monotonic() - begun)
        rollout = since(before, options.rollouts)
        before = used_ms()
        await run(client, options.rollouts, MORE_SPANS)
        more = since(before, options.rollouts)
        span = [(each - few) / (MORE_SPANS - SPANS) for each, few in zip(more, rollout, strict=True)]
        print(f"{options.runners} runners: {rate:.1f} rollouts/s; {connections} connections a runner; ms of CPU")
        for part, *costs in zip(("server", "database"), rollout, span, idle, strict=True):
            print(f"  of the {part}: {costs[0]:.1f} a rollout, {costs[1]:.3f} a further span, {costs[2]:.2f} a second")
        attempts = [each.attempt for each in done if isinstance(each, AttemptedRollout)]
        agent_s = statistics.mean((each.end_time or 0.0) - each.start_time for each in attempts) - rollout[0] / 1e3
        fleet = Fleet(
            options.runners, options.concurrency, agent_s, servers=1, server_s=rollout[0] / 1e3,
            database_cores=1, database_s=rollout[1] / 1e3, beat_s=max(0.0, idle[0] / 1e3 * BEAT_S),
        )  # fmt: skip
        simulated = simulate(fleet, options.rollouts)
        print(f"simulated: {simulated}", flush=True)
        for load in options.loads:
            half, end = await offer(client, load * simulated.rate, options.offer_s)
            print(f"  {load:.0%} of that rate: {half} wait after half of the time, {end} at the end", flush=True)
        await client.close()


if __name__ == "__main__":
    asyncio.run(main())
