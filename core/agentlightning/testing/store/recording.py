"""Resources, workers, runs, metrics and the JSON values that a store holds."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any, Final

from agentlightning.records import SpanEvent
from agentlightning.resources import LLM, PromptTemplate
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.actions import claim, dequeue, make_span, soon

NOT_JSON: Final[dict[str, Any]] = {
    "nan": float("nan"),
    "infinity": float("-inf"),
    "set": {1},
    "date": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    "bytes": b"\x00",
    "huge integer": 2**63,
    "lone surrogate": "\ud800",
    "key": {1: "a"},
    "object": object(),
}


class RecordingTests:
    """Tests of resources, workers, runs, metrics, immutable records and JSON values."""

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

    async def test_the_latest_resources_are_those_published_last_in_the_run(self, store: LightningStore) -> None:
        first = await store.add_resources({"prompt": "one"})
        second = await store.update_resources("named", {"prompt": "two"})
        await store.with_run("other").add_resources({"prompt": "theirs"})
        assert (second.resources_id, second.version) == ("named", 1)
        assert await store.get_latest_resources() == second
        bumped = await store.update_resources(first.resources_id, {"prompt": "three"})
        assert await store.get_latest_resources() == bumped
        assert [update.version for update in await store.query_resources()] == [1, 1, 2]
        assert [update.run_id for update in await store.with_run("other").query_resources()] == ["other"]

    async def test_concurrently_published_versions_are_kept(self, store: LightningStore) -> None:
        await soon(asyncio.gather(*(store.update_resources("shared", {"prompt": f"{n}"}) for n in range(10))))
        updates = await store.query_resources(resources_id="shared")
        assert [update.version for update in updates] == list(range(1, 11))
        texts = {update.resources["prompt"].format() for update in updates}  # type: ignore[attr-defined] # a prompt
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

    async def test_a_span_with_values_that_are_not_json_is_stored(self, store: LightningStore) -> None:
        claimed = await claim(store)
        span = make_span(claimed, "broken \udc80 name", **NOT_JSON, fine=[1, None, "grüße"])
        event = SpanEvent(name="e", attributes={"loss": float("nan")})
        late = make_span(claimed).model_copy(update={"attributes": {"loss": float("inf")}, "events": [event]})
        await store.add_many_spans([span, late])
        found = await store.query_spans(claimed.rollout_id)
        assert len(found) == 2
        first, second = found
        kept = dict(first.attributes)
        assert "object" in kept.pop("object")
        assert kept == {
            "nan": "NaN",
            "infinity": "-Infinity",
            "set": [1],
            "date": "2026-01-02T03:04:05+00:00",
            "bytes": "\x00",
            "huge integer": str(2**63),
            "lone surrogate": "\\ud800",
            "key": {"1": "a"},
            "fine": [1, None, "grüße"],
        }
        assert first.name == "broken \\udc80 name"
        assert second.attributes == {"loss": "Infinity"}
        assert second.events[0].attributes == {"loss": "NaN"}

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
