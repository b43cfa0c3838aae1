"""Several store server processes over one PostgreSQL database: together they are one store."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from agentlightning.types import EnqueueRolloutRequest, Span
from agentlightning_plugins.stores.http.client import LightningStoreClient
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.environment("main")  # about processes, not about versions of libraries


@contextlib.contextmanager
def serve(database: str, count: int) -> Iterator[list[tuple[subprocess.Popen[str], str]]]:
    """Server processes over one database, each with its URL."""
    command = [sys.executable, "-m", "agentlightning", "store", "--port", "0", "--backend", database]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        served = []
        for process in processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert re.search(r"postgresql://(?!\w+:)", line), "the password is shown"
            served.append((process, line.split()[-1]))
        yield served
    finally:
        for process in processes:
            process.kill()
            process.communicate()


async def work(client: LightningStoreClient, worker_id: str, done: list[str]) -> None:
    while claimed := await client.dequeue_rollout(worker_id):
        rollout_id, attempt_id = claimed.rollout_id, claimed.attempt.attempt_id
        span = Span.from_attributes(attributes={"by": worker_id}, rollout_id=rollout_id, attempt_id=attempt_id)
        await client.add_span(span)
        await client.update_attempt(rollout_id, attempt_id, "succeeded")
        done.append(rollout_id)


@pytest.mark.slow
async def test_several_servers_over_one_database_act_as_one_store(database: str) -> None:
    with serve(database, 2) as ((first_process, first_url), (second_process, second_url)):
        first, second = LightningStoreClient(first_url), LightningStoreClient(second_url)

        events = second.subscribe(["rollout_finished"])
        finished = asyncio.ensure_future(anext(events))
        while not finished.done():  # events arrive once the subscription is open
            before = await first.start_rollout("before")
            await first.update_attempt(before.rollout_id, before.attempt.attempt_id, "succeeded")
            await asyncio.wait([finished], timeout=0.1)
        asking = asyncio.create_task(second.dequeue_rollout("waiting", timeout=10 * LIMIT_S))
        await asyncio.sleep(0.1)
        queued = await first.enqueue_rollout("wakes the other server's worker")
        claimed = await asyncio.wait_for(asking, LIMIT_S)
        assert claimed is not None
        assert claimed.rollout_id == queued.rollout_id
        waiting = asyncio.create_task(first.wait_for_rollouts([queued.rollout_id]))
        await asyncio.sleep(0.1)
        await second.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, "succeeded")
        assert [rollout.status for rollout in await asyncio.wait_for(waiting, LIMIT_S)] == ["succeeded"]
        async with asyncio.timeout(LIMIT_S):
            while (await anext(events)).rollout_id != queued.rollout_id:
                pass
        await events.aclose()

        done: list[str] = []
        tasks = [EnqueueRolloutRequest(input=number) for number in range(100)]
        rollouts = await first.enqueue_many_rollouts(tasks)
        clients = (first, second)
        await asyncio.gather(*(work(clients[number % 2], f"worker-{number}", done) for number in range(8)))
        assert sorted(done) == sorted(rollout.rollout_id for rollout in rollouts)
        spans = await first.query_spans(None)
        assert len(spans) == 100
        assert {span.attributes["by"] for span in spans} > {"worker-0"}

        first_process.send_signal(signal.SIGKILL)  # the second server keeps serving
        await asyncio.to_thread(first_process.wait)
        late = await second.enqueue_rollout("late")
        await work(second, "survivor", done)
        assert done[-1] == late.rollout_id
        await first.close()
        await second.close()
        second_process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(second_process.wait, LIMIT_S) == 0
