"""Stored records: numbering, idempotence, filters, order, pages, versions, JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.resources import LLM, PromptTemplate
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.primitives import soon
from agentlightning.types import EnqueueRolloutRequest, Rollout, Span, SpanEvent, TraceStatus
from tests.plugins.stores.actions import claim, dequeue, finish, latest_attempt, make_span


class ReadingTests:
    """Tests of stored records and of queries."""

    async def test_a_span_comes_back_unchanged(self, store: LightningStore) -> None:
        claimed = await claim(store)
        span = make_span(claimed, name="call", text='grüße, "quoted"\n', number=1.5, nested={"list": [1, None, True]})
        span = span.model_copy(
            update={
                "sequence_id": 7,
                "parent_id": "00000000000000ff",
                "status": TraceStatus(status_code="ERROR", description="no"),
                "events": [SpanEvent(name="exception", attributes={"type": "E"}, timestamp=2.5)],
                "start_time": 1.25,
                "end_time": 2.75,
            }
        )
        assert await store.add_span(span) == span
        assert list(await store.query_spans(claimed.rollout_id)) == [span]

    async def test_spans_without_a_number_get_the_next_ones(self, store: LightningStore) -> None:
        claimed = await claim(store)
        spans = [make_span(claimed, f"step {number}") for number in range(3)]
        assert [span.sequence_id for span in await store.add_many_spans(spans)] == [1, 2, 3]
        assert await store.get_next_span_sequence_id(claimed.rollout_id, claimed.attempt.attempt_id) == 4
        far = await store.add_span(make_span(claimed).model_copy(update={"sequence_id": 10}))
        next_ = await store.add_span(make_span(claimed))
        assert far is not None
        assert next_ is not None
        assert (far.sequence_id, next_.sequence_id) == (10, 11)

    async def test_span_numbers_strictly_increase_for_each_attempt(self, store: LightningStore) -> None:
        one, two = await claim(store), await claim(store)
        pairs = [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in (one, two)]
        assert list(await store.get_many_span_sequence_ids([pairs[0], pairs[1], pairs[0]])) == [1, 1, 2]
        taken = await asyncio.gather(*(store.get_next_span_sequence_id(*pairs[0]) for _ in range(40)))
        assert sorted(taken) == list(range(3, 43))
        assert list(await store.get_many_span_sequence_ids([(pairs[1][0], "latest"), pairs[1]])) == [2, 3]
        with pytest.raises(NotFoundError, match="at-unknown"):
            await store.get_next_span_sequence_id(one.rollout_id, "at-unknown")
        with pytest.raises(NotFoundError, match="ro-unknown"):
            await store.get_next_span_sequence_id("ro-unknown", "latest")

    async def test_a_span_that_is_stored_is_not_stored_again(self, store: LightningStore) -> None:
        claimed = await claim(store)
        span, other = make_span(claimed), make_span(claimed)
        stored = await store.add_span(span)
        assert await store.add_span(span) is None
        assert [item.span_id for item in await store.add_many_spans([span, other, other])] == [other.span_id]
        assert list(await store.add_many_spans([])) == []
        spans = await store.query_spans(claimed.rollout_id)
        assert spans[0] == stored
        assert [item.span_id for item in spans] == [span.span_id, other.span_id]

    async def test_many_spans_are_stored_all_or_none(self, store: LightningStore) -> None:
        claimed = await claim(store)
        stray = make_span(claimed).model_copy(update={"attempt_id": "at-unknown"})
        with pytest.raises(NotFoundError, match="at-unknown"):
            await store.add_many_spans([make_span(claimed), stray])
        lost = make_span(claimed).model_copy(update={"rollout_id": "ro-unknown"})
        with pytest.raises(NotFoundError, match="ro-unknown"):
            await store.add_span(lost)
        assert list(await store.query_spans(claimed.rollout_id)) == []

    async def test_concurrently_written_spans_are_all_stored_with_their_attempts(self, store: LightningStore) -> None:
        claims = [await claim(store) for _ in range(8)]
        spans = [make_span(claims[number % 8], owner=claims[number % 8].rollout_id) for number in range(160)]
        await soon(asyncio.gather(*(store.add_span(span) for span in spans)))
        for claimed in claims:
            found = await store.query_spans(claimed.rollout_id, claimed.attempt.attempt_id)
            assert sorted(span.sequence_id for span in found) == list(range(1, 21))
            assert {span.attributes["owner"] for span in found} == {claimed.rollout_id}

    async def test_spans_of_different_attempts_are_kept_separate(self, store: LightningStore) -> None:
        first = await claim(store)
        await store.add_span(make_span(first, "first"))
        await finish(store, first, "failed")
        second = await store.start_attempt(first.rollout_id)
        await store.add_span(make_span(second, "second"))

        async def names(attempt_id: str | None) -> list[str]:
            return [span.name for span in await store.query_spans(first.rollout_id, attempt_id)]

        assert await names(first.attempt.attempt_id) == ["first"]
        assert await names(second.attempt.attempt_id) == await names("latest") == ["second"]
        assert sorted(await names(None)) == ["first", "second"]
        assert await names("at-unknown") == []
        assert list(await store.query_spans("ro-unknown", "latest")) == []

    async def test_spans_are_found_by_their_fields(self, store: LightningStore) -> None:
        claimed = await claim(store)
        root = make_span(claimed, "agent.run").model_copy(update={"trace_id": "a" * 32})
        child = make_span(claimed, "openai.chat").model_copy(update={"trace_id": "a" * 32, "parent_id": root.span_id})
        other = make_span(claimed, "openai.embed").model_copy(update={"trace_id": "b" * 32})
        await store.add_many_spans([root, child, other])

        async def found(**tests: str) -> list[str]:
            return [span.name for span in await store.query_spans(claimed.rollout_id, **tests)]

        assert await found(name="openai.chat") == ["openai.chat"]
        assert await found(name_contains="openai.") == ["openai.chat", "openai.embed"]
        assert await found(name_contains="OPENAI") == []
        assert await found(trace_id="b" * 32) == ["openai.embed"]
        assert await found(trace_id_contains="aaa") == ["agent.run", "openai.chat"]
        assert await found(span_id=root.span_id) == ["agent.run"]
        assert await found(parent_id=root.span_id) == ["openai.chat"]
        assert await found(parent_id_contains=root.span_id[4:]) == ["openai.chat"]
        assert await found(name_contains="openai", trace_id="a" * 32) == ["openai.chat"]
        assert await found(name="agent.run", trace_id="b" * 32, filter_logic="or") == ["agent.run", "openai.embed"]
        assert await found(sort_by="name", sort_order="desc") == ["openai.embed", "openai.chat", "agent.run"]

    async def test_spans_of_a_whole_run_are_read_page_by_page(self, store: LightningStore) -> None:
        claims = [await claim(store) for _ in range(3)]
        elsewhere = await claim(store.with_run("other"))
        await store.add_span(make_span(elsewhere, "elsewhere"))
        for number in range(10):
            await store.add_span(make_span(claims[number % 3], f"step {number}"))
        spans: list[Span] = []
        cursor: str | None = None
        while True:
            page = await store.query_spans(None, limit=4, cursor=cursor)
            assert page.total == 10
            spans += page
            cursor = page.cursor
            if cursor is None:
                break
        assert [span.name for span in spans] == [f"step {number}" for number in range(10)]
        assert [span.name for span in await store.query_spans(None, run_id="other")] == ["elsewhere"]
        two = [claims[2].rollout_id, claims[0].rollout_id, elsewhere.rollout_id, "ro-unknown"]
        names = [span.name for span in await store.query_spans(None, rollout_id_in=two)]
        assert names == [f"step {number}" for number in (0, 2, 3, 5, 6, 8, 9)]
        assert [span.name for span in await store.query_spans(None, rollout_id_in=two, name="step 5")] == ["step 5"]
        assert list(await store.query_spans(None, rollout_id_in=[])) == []

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

    async def test_polling_returns_every_new_span_once(self, store: LightningStore) -> None:
        first, second = await store.start_rollout(1), await store.start_rollout(2)
        other = await store.with_run("another").start_rollout(3)
        nothing = await store.poll_new_spans()
        assert (list(nothing), nothing.cursor is None) == ([], False)
        seen: list[str] = []
        cursor = nothing.cursor
        for number in range(6):
            for rollout in (second, first, other):
                await store.add_span(make_span(rollout, f"{rollout.input}-{number}"))
            while page := await store.poll_new_spans(cursor, limit=1 + number % 2):
                seen += [span.name for span in page]
                cursor = page.cursor
        assert seen == [f"{task}-{number}" for number in range(6) for task in (2, 1)]
        with pytest.raises(ConfigError, match="limit"):
            await store.poll_new_spans(limit=0)
        with pytest.raises(ConfigError, match="cursor"):
            await store.poll_new_spans("made up")

    async def test_the_optimized_resources_are_the_latest_or_before_them_the_candidate(
        self, store: LightningStore
    ) -> None:
        assert await store.get_optimized_resources() is None
        candidate = await store.with_run(f"{store.run_id}.live").update_resources("rs-candidate", {"prompt": "new"})
        assert await store.get_optimized_resources() == candidate
        promoted = await store.promote("rs-candidate")
        assert await store.get_optimized_resources() == promoted == await store.get_latest_resources()

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
            return [rollout.rollout_id for rollout in await store.query_rollouts(**tests)]

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
            await store.enqueue_rollout(task, mode=mode)
        ended = await dequeue(store)
        await finish(store, ended)

        async def order(field: str, **options: object) -> list[str]:
            return [rollout.input for rollout in await store.query_rollouts(sort_by=field, **options)]

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

    async def test_every_version_of_resources_stays_readable(self, store: LightningStore) -> None:
        first = await store.add_resources({"prompt": "one", "llm": LLM(endpoint="http://localhost/v1", model="m")})
        second = await store.update_resources(first.resources_id, {"prompt": PromptTemplate("two")})
        assert (first.version, second.version, second.resources_id) == (1, 2, first.resources_id)
        assert first.resources["prompt"] == PromptTemplate("one", "f-string")
        assert second.create_time == first.create_time <= second.update_time
        assert await store.get_resources_by_id(first.resources_id, 1) == first
        assert await store.get_resources_by_id(first.resources_id) == second
        assert await store.get_resources_by_id(first.resources_id, 3) is None
        assert list(await store.query_resources(resources_id=first.resources_id)) == [first, second]

    async def test_concurrently_published_versions_are_kept(self, store: LightningStore) -> None:
        await soon(asyncio.gather(*(store.update_resources("shared", {"prompt": f"{n}"}) for n in range(10))))
        updates = await store.query_resources(resources_id="shared")
        assert [update.version for update in updates] == list(range(1, 11))
        texts = {update.resources["prompt"].format() for update in updates}
        assert texts == {str(n) for n in range(10)}

    async def test_metrics_of_a_step_add_up(self, store: LightningStore) -> None:
        await store.add_metrics(2, {"reward": 0.5})
        await store.add_metrics(1, {"reward": 0.25, "loss": 1.0})
        merged = await store.add_metrics(1, {"loss": 0.5, "entropy": 2.0})
        assert merged.values == {"reward": 0.25, "loss": 0.5, "entropy": 2.0}
        await store.with_run("other").add_metrics(1, {"reward": 9.0})
        metrics = await store.query_metrics()
        assert [(item.step, item.values["reward"]) for item in metrics] == [(1, 0.25), (2, 0.5)]
        assert [item.step for item in await store.query_metrics(limit=1, offset=1)] == [2]

    async def test_statistics_count_what_is_stored(self, store: LightningStore) -> None:
        claimed = await claim(store)
        await store.add_many_spans([make_span(claimed) for _ in range(3)])
        await store.add_resources({"prompt": "one"})
        await store.update_worker("worker-1")
        statistics = await store.statistics()
        counts = {name: statistics[name] for name in ("rollouts", "attempts", "spans", "resources", "workers")}
        assert counts == {"rollouts": 1, "attempts": 1, "spans": 3, "resources": 1, "workers": 1}
        assert statistics["uptime"] >= 0

    async def test_json_values_come_back_unchanged(self, store: LightningStore) -> None:
        value: dict[str, Any] = {
            "text": 'grüße "quoted" \\ \n\t\u2028 😀 ',
            "numbers": [0, -1, 2**63 - 1, -(2**63), 0.1, 1e-300, 1.7976931348623157e308, 1.0],
            "nothing": [None, True, False, [], {}, "", [[[]]]],
            "": {"a.b": 1, "$c": [2], "grüße": 3},
        }
        await store.enqueue_rollout(value, metadata=value)
        claimed = await dequeue(store)
        assert (claimed.input, claimed.metadata) == (value, value)
        assert [type(number) for number in claimed.input["numbers"]] == [int] * 4 + [float] * 4
        await store.add_span(make_span(claimed, **value))
        assert (await store.query_spans(claimed.rollout_id))[0].attributes == value
