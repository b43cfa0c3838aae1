"""Queries: filters, order, pages."""

from __future__ import annotations

import pytest

from agentlightning.errors import ConfigError
from agentlightning.records import AttemptedRollout, EnqueueRolloutRequest, Rollout
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.actions import claim, dequeue, finish, latest_attempt


class FindingTests:
    """Tests of queries and getters."""

    async def test_getters_return_none_for_unknown_ids(self, store: LightningStore) -> None:
        assert await store.get_rollout_by_id("ro-unknown") is None
        assert await store.get_latest_attempt("ro-unknown") is None
        assert await store.get_resources_by_id("rs-unknown") is None
        assert await store.get_latest_resources() is None
        assert await store.get_worker_by_id("worker-unknown") is None
        assert list(await store.query_attempts("ro-unknown")) == []
        assert list(await store.query_spans("ro-unknown")) == []

    async def test_rollouts_come_with_their_latest_attempt(self, store: LightningStore) -> None:
        tried = await claim(store)
        await finish(store, tried, "failed")
        tried = await store.start_attempt(tried.rollout_id)
        queued = await store.enqueue_rollout("untried")
        first, second = await store.query_rollouts()
        assert isinstance(first, AttemptedRollout)
        assert first == tried
        assert second == queued
        assert await store.get_rollout_by_id(tried.rollout_id) == tried
        assert type(await store.get_rollout_by_id(queued.rollout_id)) is Rollout

    async def test_pages_cover_everything_once(self, store: LightningStore) -> None:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(10)])
        seen: list[int] = []
        for offset in range(0, 12, 4):
            page = await store.query_rollouts(limit=4, offset=offset)
            assert (page.limit, page.offset, page.total) == (4, offset, 10)
            seen += [rollout.input for rollout in page]
        assert seen == list(range(10))
        assert [rollout.input for rollout in await store.query_rollouts(offset=8)] == [8, 9]
        nothing = await store.query_rollouts(limit=0)
        assert (list(nothing), nothing.total) == ([], 10)

    async def test_a_cursor_continues_where_the_page_ended(self, store: LightningStore) -> None:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(10)])
        page = await store.query_rollouts(limit=5)
        assert page.cursor is not None
        await store.enqueue_rollout("a newcomer")
        rest = await store.query_rollouts(limit=5, cursor=page.cursor)
        assert [rollout.input for rollout in [*page, *rest]] == list(range(10))
        assert rest.cursor is None
        with pytest.raises(ConfigError):
            await store.query_rollouts(limit=5, cursor="made up")
        with pytest.raises(ConfigError):
            await store.query_rollouts(limit=5, cursor=page.cursor, sort_by="status")

    async def test_rollouts_are_found_by_status_and_id(self, store: LightningStore) -> None:
        ids = ["run-a-1", "run-a-2", "run-b-1"]
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=id_, rollout_id=id_) for id_ in ids])
        await dequeue(store)

        async def found(**tests: object) -> list[str]:
            return [rollout.rollout_id for rollout in await store.query_rollouts(**tests)]  # type: ignore[arg-type] # names of filters

        assert await found(status_in=["queuing"]) == ["run-a-2", "run-b-1"]
        assert await found(status_in=["preparing", "running"]) == ["run-a-1"]
        assert await found(status_in=[]) == []
        assert await found(rollout_id_in=["run-b-1", "run-a-1", "ro-unknown"]) == ["run-a-1", "run-b-1"]
        assert await found(rollout_id_contains="-a-") == ["run-a-1", "run-a-2"]
        assert await found(rollout_id_contains="-a-", status_in=["queuing"]) == ["run-a-2"]
        assert await found(rollout_id_in=["run-b-1"], status_in=["preparing"], filter_logic="or") == [
            "run-a-1",
            "run-b-1",
        ]

    async def test_rollouts_are_found_by_metadata_and_time(self, store: LightningStore) -> None:
        for number in range(6):
            metadata = {"task_id": f"t{number}", "group": f"g{number // 3}", "step": number % 2, "note": None}
            await store.enqueue_rollout(number, metadata=metadata)
        await store.enqueue_rollout("without")

        async def found(**metadata: object) -> list[object]:
            return [rollout.input for rollout in await store.query_rollouts(metadata=metadata)]

        assert await found(group="g1") == [3, 4, 5]
        assert await found(step=1) == [1, 3, 5]
        assert await found(group="g0", step=1) == [1]
        assert await found(task_id="t4") == [4]
        assert await found(group="unknown") == []
        assert await found(group="g0", note=None) == [0, 1, 2]
        assert await found(task_id=None) == ["without"]
        third = (await store.query_rollouts(metadata={"task_id": "t2"}))[0]
        late = await store.query_rollouts(start_after=third.start_time)
        early = await store.query_rollouts(start_before=third.start_time)
        assert all(rollout.start_time >= third.start_time for rollout in late)
        assert all(rollout.start_time <= third.start_time for rollout in early)
        assert third in list(late)
        assert third in list(early)

    async def test_rollouts_are_sorted_by_any_field(self, store: LightningStore) -> None:
        for task, mode in (("b", "val"), ("c", None), ("a", "train")):
            await store.enqueue_rollout(task, mode=mode)  # type: ignore[arg-type] # a tuple's str
        ended = await dequeue(store)
        await finish(store, ended)

        async def order(field: str, **options: object) -> list[str]:
            return [rollout.input for rollout in await store.query_rollouts(sort_by=field, **options)]  # type: ignore[arg-type] # names of options

        assert await order("input") == ["a", "b", "c"]
        assert await order("input", sort_order="desc", limit=2) == ["c", "b"]
        assert await order("mode") == ["c", "a", "b"]
        assert await order("end_time") == ["c", "a", "b"]
        assert await order("start_time") == ["b", "c", "a"]
        for field in Rollout.model_fields:
            assert len(await order(field)) == 3

    async def test_attempts_are_sorted_and_paged(self, store: LightningStore) -> None:
        claimed = await claim(store)
        for _ in range(4):
            await store.update_attempt(claimed.rollout_id, "latest", status="failed")
            await store.start_attempt(claimed.rollout_id)
        page = await store.query_attempts(claimed.rollout_id, sort_order="desc", limit=2, offset=1)
        assert [attempt.sequence_id for attempt in page] == [4, 3]
        assert page.total == 5
        latest = await latest_attempt(store, claimed)
        assert latest.sequence_id == 5

    async def test_invalid_query_arguments_are_refused(self, store: LightningStore) -> None:
        await store.enqueue_rollout("a")
        with pytest.raises(ConfigError, match="start_time"):
            await store.query_rollouts(sort_by="start_tim")
        with pytest.raises(ConfigError, match="sequence_id"):
            await store.query_attempts("ro-unknown", sort_by="sequence")
        with pytest.raises(ConfigError, match="name"):
            await store.query_spans("ro-unknown", sort_by="nam")
        with pytest.raises(ConfigError):
            await store.query_rollouts(limit=-2)
        with pytest.raises(ConfigError):
            await store.query_rollouts(offset=-1)
        for too_large in (2**63, 10**30):
            with pytest.raises(ConfigError, match="limit"):
                await store.query_spans("ro-unknown", limit=too_large)
            with pytest.raises(ConfigError, match="offset"):
                await store.query_workers(offset=too_large)
            with pytest.raises(ConfigError, match="limit"):
                await store.dequeue_many_rollouts(limit=too_large)
            with pytest.raises(ConfigError, match="version"):
                await store.get_resources_by_id("rs-unknown", too_large)
            with pytest.raises(ConfigError, match="metadata"):
                await store.query_rollouts(metadata={"step": too_large})
            with pytest.raises(ConfigError, match="cursor"):
                await store.query_rollouts(cursor=f"{too_large}.1.1", limit=1)
        with pytest.raises(ConfigError):
            await store.query_rollouts(sort_order="up")  # type: ignore[arg-type] # intended
        with pytest.raises(ConfigError):
            await store.query_rollouts(filter_logic="xor")  # type: ignore[arg-type] # intended
        with pytest.raises(ConfigError, match="queuing"):
            await store.query_rollouts(status_in=["queueing"])  # type: ignore[list-item] # intended
