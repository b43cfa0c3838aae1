"""Speed of a store: ``python tests/benchmarks/bench_store.py [--url memory://] [--flat]``.

One rollout is: enqueue, claim, 10 spans in one batch, finish, wait, read its spans; 16 runners do this concurrently.
The baseline, which no store can beat, makes the same records and keeps them in a dict and a deque, in the same process
and run. Then: the time from an enqueue until a blocked claim returns, from a finish until a wait returns, and from a
``set`` until ``wait`` of a bare asyncio.Event returns.
``--flat`` instead measures each operation with few and with many stored rollouts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Coroutine

from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Attempt, EnqueueRolloutRequest, Rollout, Span, new_attempt_id, new_rollout_id

RUNNERS = 16
SPANS = 10


def make_spans(rollout_id: str, attempt_id: str) -> list[Span]:
    return [
        Span.from_attributes(
            name="openai.chat.completion",
            attributes={"gen_ai.request.model": "tiny", "gen_ai.usage.output_tokens": 12, "index": index},
            rollout_id=rollout_id,
            attempt_id=attempt_id,
        )
        for index in range(SPANS)
    ]


async def run_one(store: LightningStore, task: int) -> None:
    queued = await store.enqueue_rollout({"question": task}, mode="train", metadata={"group": task // 8})
    claimed = await store.dequeue_rollout("runner", timeout=10)
    assert claimed is not None
    await store.add_many_spans(make_spans(claimed.rollout_id, claimed.attempt.attempt_id))
    await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
    (done,) = await store.wait_for_rollouts([queued.rollout_id], timeout=10)
    assert done.status == "succeeded"
    assert len(await store.query_spans(queued.rollout_id)) == SPANS


class Speed:
    """Rollouts per second of wall time, and of CPU time, which other work on the machine does not change."""

    def __init__(self, rollouts: int, wall_s: float, cpu_s: float) -> None:
        self.wall, self.cpu = rollouts / wall_s, rollouts / cpu_s

    def __str__(self) -> str:
        return f"{self.wall:,.0f} rollouts/s ({self.cpu:,.0f} per CPU second)"


async def measure(runner: Callable[[], Coroutine[None, None, None]], rollouts: int) -> Speed:
    gc.collect()  # so that this round does not pay for garbage of an earlier one
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(runner() for _ in range(RUNNERS)))
    return Speed(rollouts, time.perf_counter() - wall, time.process_time() - cpu)


async def measure_store(store: LightningStore, rollouts: int) -> Speed:
    tasks = iter(range(rollouts))

    async def runner() -> None:
        for task in tasks:
            await run_one(store, task)

    return await measure(runner, rollouts)


async def measure_baseline(rollouts: int) -> Speed:
    queue: deque[Rollout] = deque()
    finished: dict[str, Rollout] = {}
    spans: dict[str, list[Span]] = {}
    tasks = iter(range(rollouts))

    async def runner() -> None:
        for task in tasks:
            queue.append(
                Rollout(
                    rollout_id=new_rollout_id(),
                    input={"question": task},
                    mode="train",
                    start_time=time.time(),
                    metadata={"group": task // 8},
                )
            )
            await asyncio.sleep(0)
            rollout = queue.popleft()
            attempt = Attempt(
                rollout_id=rollout.rollout_id, attempt_id=new_attempt_id(), sequence_id=1, start_time=time.time()
            )
            spans[rollout.rollout_id] = make_spans(rollout.rollout_id, attempt.attempt_id)
            finished[rollout.rollout_id] = rollout.model_copy(update={"status": "succeeded"})
            assert len(spans[rollout.rollout_id]) == SPANS

    return await measure(runner, rollouts)


async def measure_wakeups(store: LightningStore, times: int = 200) -> dict[str, float]:
    """Returns median milliseconds from a cause until the call that waits for it returns."""
    clock = time.perf_counter
    took: dict[str, list[float]] = {"dequeue": [], "wait": [], "asyncio.Event": []}
    for task in range(times):
        claim = asyncio.create_task(store.dequeue_rollout("runner", timeout=10))
        await asyncio.sleep(0.002)
        began = clock()
        queued = await store.enqueue_rollout(task)
        claimed = await claim
        took["dequeue"].append(clock() - began)
        assert claimed is not None
        wait = asyncio.create_task(store.wait_for_rollouts([queued.rollout_id], timeout=10))
        await asyncio.sleep(0.002)
        began = clock()
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        assert len(await wait) == 1
        took["wait"].append(clock() - began)
        event = asyncio.Event()
        waiting = asyncio.create_task(event.wait())
        await asyncio.sleep(0.002)
        began = clock()
        event.set()
        await waiting
        took["asyncio.Event"].append(clock() - began)
    return {name: statistics.median(values) * 1e3 for name, values in took.items()}


async def measure_flatness(url: str, stored: int) -> dict[str, float]:
    """Returns microseconds of each operation (median of 300) with ``stored`` finished rollouts in the store."""
    store = create_store(url)
    for start in range(0, stored, 1000):
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(start, start + 1000)])
        for claimed in await store.dequeue_many_rollouts(limit=1000):
            await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
    took: dict[str, list[float]] = {"enqueue": [], "claim": [], "append": [], "finish": [], "wait": [], "page": []}
    clock = time.perf_counter
    for task in range(300):
        times = [clock()]
        queued = await store.enqueue_rollout(task)
        times.append(clock())
        claimed_one = await store.dequeue_rollout("runner")
        times.append(clock())
        assert claimed_one is not None
        spans = make_spans(claimed_one.rollout_id, claimed_one.attempt.attempt_id)
        before_append = clock()
        await store.add_many_spans(spans)
        took["append"].append(clock() - before_append)
        before_finish = clock()
        await store.update_attempt(claimed_one.rollout_id, claimed_one.attempt.attempt_id, status="succeeded")
        before_wait = clock()
        await store.wait_for_rollouts([queued.rollout_id], timeout=1)
        before_page = clock()
        await store.query_rollouts(status_in=["succeeded"], limit=10)
        took["page"].append(clock() - before_page)
        took["wait"].append(before_page - before_wait)
        took["finish"].append(before_wait - before_finish)
        took["enqueue"].append(times[1] - times[0])
        took["claim"].append(times[2] - times[1])
    await store.close()
    return {name: statistics.median(values) * 1e6 for name, values in took.items()}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="memory://")
    parser.add_argument("--rollouts", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flat", action="store_true")
    parser.add_argument("--stored", type=int, nargs=2, default=[1000, 1_000_000])
    arguments = parser.parse_args()
    if arguments.flat:
        few, many = [await measure_flatness(arguments.url, stored) for stored in arguments.stored]
        print(f"{'microseconds':14}{arguments.stored[0]:>12}{arguments.stored[1]:>12}{'ratio':>8}")
        for name in few:
            print(f"{name:14}{few[name]:12.1f}{many[name]:12.1f}{many[name] / few[name]:8.2f}")
        return
    for _ in range(arguments.rounds):
        baseline = await measure_baseline(arguments.rollouts)
        store = create_store(arguments.url)
        speed = await measure_store(store, arguments.rollouts)
        await store.close()
        print(f"{arguments.url}: {speed}; baseline {baseline}; {speed.cpu / baseline.cpu:.1%} of it")
    store = create_store(arguments.url)
    woken = await measure_wakeups(store)
    await store.close()
    print("woken after (ms, p50): " + ", ".join(f"{name} {value:.2f}" for name, value in woken.items()))


if __name__ == "__main__":
    asyncio.run(main())
