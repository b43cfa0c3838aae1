"""Open rollouts of a run that is resumed."""

from __future__ import annotations

import agentlightning as agl
from agentlightning_algorithms.verl.rollout.controller import cancel_open


async def test_rollouts_left_open_before_a_resume_are_cancelled() -> None:
    store = agl.InMemoryLightningStore()
    await store.enqueue_many_rollouts([agl.EnqueueRolloutRequest(input=n) for n in range(3)])
    done, running = [await store.dequeue_rollout("worker") for _ in range(2)]
    assert done is not None
    assert running is not None
    await store.update_attempt(done.rollout_id, done.attempt.attempt_id, status="succeeded")
    await cancel_open(store)
    assert sorted(r.status for r in await store.query_rollouts()) == ["cancelled", "cancelled", "succeeded"]
    await store.close()
