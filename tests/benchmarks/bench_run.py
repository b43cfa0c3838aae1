"""Speed of whole rollouts: `cs` compared with a bare loop of the same store calls, and async agents in one runner.

    python tests/benchmarks/bench_run.py [--rollouts 2000]

- `cs`: 4 runner processes, an agent that makes 6 spans and calls no model, store `memory://` served over HTTP.
  The baseline is 4 processes of the same interpreter that only make the store calls of a runner (claim, 7 spans in one
  batch, end).
- async: one runner (`shm`) with 64 concurrent agents that sleep 100 ms, so at most 640 rollouts/s.
- start-up: from `fit` to the end of the first rollout; first result: from an enqueue to its end, when all runners wait.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import agentlightning as agl
from agentlightning.types import EnqueueRolloutRequest, Span

N_RUNNERS = 4
N_SPANS = 6


def six_spans(task: Any) -> float:
    for number in range(N_SPANS - 1):  # the reward is the sixth
        agl.emit_annotation({"number": number})
    return 1.0


async def sleeping(task: Any) -> float:
    await asyncio.sleep(0.1)
    return 1.0


def measured(seconds: dict[str, float], n_rollouts: int, *, settle_s: float) -> Any:
    """Returns an algorithm that waits for its runners, then measures the time of single rollouts and of many."""

    @agl.algo
    async def algorithm(store: agl.LightningStore) -> None:
        first = await store.enqueue_rollout("first")
        await store.wait_for_rollouts([first.rollout_id])
        seconds["start_up"] = time.monotonic() - seconds["began"]
        await asyncio.sleep(settle_s)  # until every runner waits for work
        singles = []
        for _ in range(5):
            began = time.monotonic()
            one = await store.enqueue_rollout("one")
            await store.wait_for_rollouts([one.rollout_id])
            singles.append(time.monotonic() - began)
        seconds["first_result"] = statistics.median(singles)
        began = time.monotonic()
        requests = [EnqueueRolloutRequest(input=number) for number in range(n_rollouts)]
        queued = await store.enqueue_many_rollouts(requests)
        await store.wait_for_rollouts([rollout.rollout_id for rollout in queued])
        seconds["all"] = time.monotonic() - began

    return algorithm


def run(agent: Callable[[Any], Any], strategy: str, n_rollouts: int, **settings: Any) -> dict[str, float]:
    seconds = {"began": time.monotonic()}
    algorithm = measured(seconds, n_rollouts, settle_s=2.0 if strategy == "cs" else 0.1)
    agl.Trainer(algorithm=algorithm, strategy=strategy, trackers=[], **settings).fit(agent)
    return seconds


def bare_worker(url: str, token: str) -> None:
    async def main() -> None:
        store = agl.LightningStoreClient(url, token=token)
        await asyncio.gather(*(loop(store) for _ in range(4)))  # 16 concurrent rollouts, like a runner
        await store.close()

    async def loop(store: agl.LightningStore) -> None:
        name = multiprocessing.current_process().name
        while claimed := await store.dequeue_many_rollouts(limit=4, worker_id=name, timeout=0.5):
            await asyncio.gather(*(one(store, rollout) for rollout in claimed))

    async def one(store: agl.LightningStore, rollout: Any) -> None:
        attempt_id = rollout.attempt.attempt_id
        spans = [
            Span.from_attributes(
                attributes={"number": number}, name="s", rollout_id=rollout.rollout_id, attempt_id=attempt_id
            )
            for number in range(N_SPANS + 1)
        ]
        await store.add_many_spans(spans)
        await store.update_attempt(rollout.rollout_id, attempt_id, status="succeeded")

    asyncio.run(main())


async def bare(n_rollouts: int) -> float:
    """Returns rollouts per second of processes that only call the store."""
    context = multiprocessing.get_context("spawn")
    store = agl.create_store("memory://")
    async with agl.LightningStoreServer(store, port=0, token="bench") as server:
        requests = [EnqueueRolloutRequest(input=number) for number in range(n_rollouts + 200)]
        queued = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
        workers = [context.Process(target=bare_worker, args=(server.endpoint, "bench")) for _ in range(N_RUNNERS)]
        for worker in workers:
            worker.start()
        await store.wait_for_rollouts(queued[:200])  # all processes are up
        left = (await store.query_rollouts(status_in=["queuing", "preparing", "running"])).items
        began = time.monotonic()
        await store.wait_for_rollouts(queued)
        seconds = time.monotonic() - began
        for worker in workers:
            worker.join()
        await store.close()
    return len(left) / seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    ours, baseline, start_up, first = [], [], [], []
    for _ in range(given.rounds):
        seconds = run(six_spans, "cs", given.rollouts, n_runners=N_RUNNERS)
        ours.append(given.rollouts / seconds["all"])
        start_up.append(seconds["start_up"])
        first.append(seconds["first_result"])
        baseline.append(asyncio.run(bare(given.rollouts)))
    rate, bare_rate = statistics.median(ours), statistics.median(baseline)
    share = rate / bare_rate
    print(f"cs, {N_RUNNERS} runners, 6 spans: {rate:.0f} rollouts/s = {share:.2f} of a bare loop's {bare_rate:.0f}/s")
    print(f"start-up to the first result: {statistics.median(start_up):.2f} s")
    print(f"a result once started: {statistics.median(first) * 1e3:.1f} ms after its enqueue")
    sleepy = [
        given.rollouts / run(sleeping, "shm", given.rollouts, max_concurrency=64, tracer="otel")["all"]
        for _ in range(given.rounds)
    ]
    rate = statistics.median(sleepy)
    print(f"one runner, 64 agents that sleep 100 ms: {rate:.0f} rollouts/s = {rate / 640:.2f} of what sleeping allows")


if __name__ == "__main__":
    main()
