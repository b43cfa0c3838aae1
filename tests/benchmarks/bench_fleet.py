"""The costs of runners for a store: ``python tests/benchmarks/bench_fleet.py [--runners 3] [--rollouts 300]``.

`agl runner` processes run an agent that records 10 spans and sleeps for ``--agent-s``, over one `agl store` in a file.
The costs are those of real clients, with heartbeats, event streams and resources; ``bench_servers.py`` measures what a
server can do for a client that sends prepared bytes. The last line is the same fleet in ``simulate_fleet.py``.
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

from agentlightning.types import EnqueueRolloutRequest
from agentlightning_plugins.stores.http.client import LightningStoreClient
from tests.benchmarks.bench_servers import cpu_s, start
from tests.benchmarks.simulate_fleet import Fleet, simulate

AGENT = """
import time
import agentlightning as agl

def agent(task):
    for number in range(10):
        agl.emit_message(f"step {{number}}")
    time.sleep({})
    return 1.0
"""
IDLE_S = 10.0


def count_connections(port: int) -> int:
    """Returns the number of connections to a port of this machine, counted at the server's end."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "01" for line in lines)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runners", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=8, help="rollouts that a runner does at the same time")
    parser.add_argument("--rollouts", type=int, default=300)
    parser.add_argument("--agent-s", type=float, default=0.5)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "agent.py").write_text(AGENT.format(options.agent_s))
        file = folder / "store.db"
        server = start("-m", "agentlightning", "store", "--port", "0", "--backend", f"sqlite:///{file}")
        assert server.stdout is not None
        stack.callback(server.communicate)
        stack.callback(server.terminate)
        url = server.stdout.readline().split()[-1]
        port = int(url.rpartition(":")[2])
        client = LightningStoreClient(url)
        await client.statistics()
        before, cpu = count_connections(port), cpu_s(server.pid)
        await asyncio.sleep(IDLE_S)
        alone = (cpu_s(server.pid) - cpu) / IDLE_S
        command = ["-m", "agentlightning", "runner", f"{folder}/agent.py:agent", "--store", url]
        for _ in range(options.runners):
            runner = start(*command, "--max-concurrency", str(options.concurrency))
            stack.callback(runner.communicate)
            stack.callback(runner.terminate)
        while len(await client.query_workers()) < options.runners:  # noqa: ASYNC110 # no event reports workers
            await asyncio.sleep(0.2)
        warm = await client.enqueue_many_rollouts([EnqueueRolloutRequest(input=0)] * options.runners * 8)
        await client.wait_for_rollouts([rollout.rollout_id for rollout in warm])
        cpu = cpu_s(server.pid)
        await asyncio.sleep(IDLE_S)
        idle = ((cpu_s(server.pid) - cpu) / IDLE_S - alone) / options.runners
        connections = (count_connections(port) - before) / options.runners
        cpu, begun = cpu_s(server.pid), time.monotonic()
        queued = await client.enqueue_many_rollouts([EnqueueRolloutRequest(input=0)] * options.rollouts)
        done = await client.wait_for_rollouts([rollout.rollout_id for rollout in queued])
        took_s = time.monotonic() - begun
        used = (cpu_s(server.pid) - cpu) / options.rollouts
        assert all(rollout.status == "succeeded" for rollout in done)
        await client.close()
    rate = options.rollouts / took_s
    agent_s = statistics.mean(rollout.attempt.end_time - rollout.attempt.start_time for rollout in done) - used
    print(
        f"{options.runners} runners: {rate:.1f} rollouts/s; CPU of the server {used * 1e3:.1f} ms a rollout and "
        f"{idle * 1e3:.2f} ms a second for each idle runner; {connections:.1f} connections a runner"
    )
    fleet = Fleet(options.runners, options.concurrency, agent_s, servers=1, server_s=used, beat_s=max(0.0, idle * 10))
    print(f"simulated: {simulate(fleet, options.rollouts)}")


if __name__ == "__main__":
    asyncio.run(main())
