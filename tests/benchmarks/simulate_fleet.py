"""The load at which the queue of a fleet bends: ``python tests/benchmarks/simulate_fleet.py [--machines 10 100 1000]``.

A discrete-event simulation of claims, results, heartbeats and leases: work waits in line for servers, a core each, and
for cores of the database. The costs are measured by ``bench_servers.py`` and ``bench_fleet.py``.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

LEASE_S, BEAT_S = 60.0, 10.0
CLAIM_SHARE = 0.3  # of a rollout's cost; the rest is spans and the result


@dataclass(frozen=True)
class Fleet:
    """Runners that always have work, and the costs of each rollout (``beat_s``: of a runner in ``BEAT_S``)."""

    runners: int
    concurrency: int
    agent_s: float
    servers: int = 2
    server_s: float = 0.0022
    database_cores: int = 4
    database_s: float = 0.003
    beat_s: float = 0.005


class Outcome(NamedTuple):
    """The rate and loads of a fleet once it ran steadily; ``offered`` is its rate if nothing ever waited."""

    rate: float
    offered: float
    claim_s: float
    server_load: float
    database_load: float
    lost_leases: int

    def __str__(self) -> str:
        return (
            f"{self.rate:,.1f} rollouts/s of {self.offered:,.1f}, claims take up to {self.claim_s:.1f} s, load of "
            f"servers {self.server_load:.0%}, database {self.database_load:.0%}, {self.lost_leases} leases lost"
        )


class Cores:
    """Cores with one line of work in front of each; work goes to the shortest line."""

    def __init__(self, number: int) -> None:
        self.busy_s = 0.0
        self.free_at = [0.0] * number

    def work(self, now: float, cost_s: float) -> float:
        """Returns when work that arrives now is done."""
        ends_at = max(now, heapq.heappop(self.free_at)) + cost_s
        heapq.heappush(self.free_at, ends_at)
        self.busy_s += cost_s
        return ends_at


def simulate(fleet: Fleet, rollouts: int = 20_000) -> Outcome:
    """Runs a fleet until so many rollouts are done; the first quarter, in which all claim at once, does not count."""
    servers, database = Cores(fleet.servers), Cores(fleet.database_cores)
    events: list[tuple[float, int, Callable[[float], None]]] = []
    numbers = itertools.count()
    done, lost, slowest_s, began, now = 0, 0, 0.0, 0.0, 0.0
    slots = fleet.runners * fleet.concurrency

    def at(when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(events, (when, next(numbers), act))

    def serve(now: float, share: float) -> float:
        return database.work(servers.work(now, fleet.server_s * share), fleet.database_s * share)

    def claim(now: float) -> None:
        nonlocal slowest_s
        got = serve(now, CLAIM_SHARE)
        slowest_s = max(slowest_s, got - now)
        at(got + fleet.agent_s, finish)

    def finish(now: float) -> None:
        nonlocal done, began, slowest_s
        done += 1
        if done == rollouts // 4:
            began, servers.busy_s, database.busy_s, slowest_s = now, 0.0, 0.0, 0.0
        at(serve(now, 1 - CLAIM_SHARE), claim)

    def beat(now: float) -> None:
        nonlocal lost
        answered = servers.work(now, fleet.beat_s)
        lost += fleet.concurrency * (answered - now + BEAT_S > LEASE_S)
        at(max(answered, now + BEAT_S), beat)

    for number in range(slots):
        at(fleet.agent_s * number / slots, claim)
    for number in range(fleet.runners):
        at(BEAT_S * number / fleet.runners, beat)
    while done < rollouts:
        now, _, act = heapq.heappop(events)
        act(now)
    took_s = now - began
    loads = servers.busy_s / took_s / fleet.servers, database.busy_s / took_s / fleet.database_cores
    offered = slots / (fleet.agent_s + fleet.server_s + fleet.database_s)
    return Outcome((rollouts - rollouts // 4) / took_s, offered, slowest_s, *loads, lost)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Each machine has 4 runners of 8 rollouts of 15 s.")
    parser.add_argument("--machines", type=int, nargs="+", default=[10, 30, 100, 300, 1000])
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--server-ms", type=float, default=2.2)
    options = parser.parse_args()
    for machines in options.machines:
        fleet = Fleet(4 * machines, 8, 15.0, options.servers, options.server_ms / 1e3)
        print(f"{machines:>5} machines: {simulate(fleet, max(20_000, 128 * machines))}", flush=True)
