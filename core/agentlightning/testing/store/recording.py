"""Resources, workers, runs, metrics and the JSON values that a store holds."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any, Final

import pytest

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.records import UNSET, RolloutConfig, SpanEvent
from agentlightning.resources import LLM, PromptTemplate
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.actions import claim, dequeue, finish, get_worker, make_span, read, soon

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

    async def test_an_invalid_run_id_is_refused(self, store: LightningStore) -> None:
        for run_id in ("", "\u00e9", "a b", "a/b", "a\n", "x" * 201):
            with pytest.raises(ConfigError, match="run_id"):
                store.with_run(run_id)
            with pytest.raises(ConfigError, match="run_id"):
                await store.create_run("name", run_id=run_id)

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

    async def test_an_earlier_version_can_be_published_again(self, store: LightningStore) -> None:
        first = await store.update_resources("tuned", {"prompt": "one"})
        await store.update_resources("tuned", {"prompt": "two"})
        await store.add_resources({"prompt": "another"})
        back = await store.rollback("tuned", 1)
        assert (back.version, back.resources) == (3, first.resources)
        assert await store.get_latest_resources() == back
        assert await store.get_resources_by_id("tuned", 1) == first
        for resources_id, version in (("tuned", 9), ("rs-unknown", 1)):
            with pytest.raises(NotFoundError, match=resources_id):
                await store.rollback(resources_id, version)
        assert len(await store.query_resources(resources_id="tuned")) == 3

    async def test_a_rollout_can_be_pinned_to_one_version_of_resources(self, store: LightningStore) -> None:
        first = await store.update_resources("tuned", {"prompt": "one"})
        second = await store.update_resources("tuned", {"prompt": "two"})
        assert (first.version_id, second.version_id) == ("tuned@1", "tuned@2")
        assert await store.get_resources_by_id("tuned@1") == first
        assert await store.get_resources_by_id("tuned@2", 2) == second
        assert await store.get_resources_by_id("tuned@3") is None
        pinned = await store.enqueue_rollout("a", resources_id="tuned@1")
        begun = await store.start_rollout("b", resources_id="tuned@2")
        assert [(await read(store, r.rollout_id)).resources_id for r in (pinned, begun)] == ["tuned@1", "tuned@2"]
        moved = await store.update_rollout(pinned.rollout_id, resources_id="tuned@2")
        assert moved.resources_id == "tuned@2"
        for unknown in ("tuned@3", "other@1", "tuned@0", "tuned@x"):
            with pytest.raises(NotFoundError, match=unknown):
                await store.enqueue_rollout("c", resources_id=unknown)
            with pytest.raises(NotFoundError, match=unknown):
                await store.update_rollout(pinned.rollout_id, resources_id=unknown)
        with pytest.raises(ConfigError, match="tuned@2"):
            await store.update_resources("tuned@2", {"prompt": "three"})
        assert len(await store.query_resources()) == 2

    async def test_any_version_can_be_made_the_latest(self, store: LightningStore) -> None:
        stable = await store.update_resources("stable", {"prompt": "one"})
        better = await store.update_resources("better", {"prompt": "two"})
        assert await store.promote("better") == better
        assert len(await store.query_resources()) == 2
        back = await store.promote("stable", 1)
        assert (back.version_id, back.resources) == ("stable@2", stable.resources)
        assert await store.get_latest_resources() == back
        again = await store.promote("better@1")
        assert (again.version_id, again.resources) == ("better@2", better.resources)
        other = store.with_run("other")
        copied = await other.promote("better@1")
        assert (copied.run_id, copied.version, copied.resources) == ("other", 1, better.resources)
        assert await other.get_latest_resources() == copied
        assert await store.get_latest_resources() == again
        for unknown in ("stable@9", "rs-unknown"):
            with pytest.raises(NotFoundError, match=unknown):
                await store.promote(unknown)

    async def test_concurrently_published_versions_are_kept(self, store: LightningStore) -> None:
        await soon(asyncio.gather(*(store.update_resources("shared", {"prompt": f"{n}"}) for n in range(10))))
        updates = await store.query_resources(resources_id="shared")
        assert [update.version for update in updates] == list(range(1, 11))
        texts = {update.resources["prompt"].format() for update in updates}  # type: ignore[attr-defined] # a prompt
        assert texts == {str(n) for n in range(10)}

    async def test_a_value_that_is_not_a_resource_is_refused(self, store: LightningStore) -> None:
        with pytest.raises(ConfigError, match="prompt"):
            await store.add_resources({"prompt": 3})  # type: ignore[dict-item] # intended
        assert await store.get_latest_resources() is None

    async def test_unset_and_none_differ(self, store: LightningStore) -> None:
        await store.add_resources({"prompt": "one"})
        config = RolloutConfig(max_attempts=2)
        queued = await store.enqueue_rollout("a", mode="train", config=config, metadata={"step": 1})
        kept = await store.update_rollout(queued.rollout_id, mode=UNSET, input="b")
        assert kept.model_dump() == {**queued.model_dump(), "input": "b"}
        cleared = await store.update_rollout(queued.rollout_id, mode=None, resources_id=None, metadata=None, input=None)
        assert (cleared.input, cleared.mode, cleared.resources_id, cleared.metadata) == (None, None, None, None)
        assert (cleared.config, cleared.status) == (config, "queuing")
        assert await read(store, queued.rollout_id) == cleared

    async def test_an_attempt_keeps_fields_that_are_not_given(self, store: LightningStore) -> None:
        claimed = await claim(store)
        await store.update_attempt(claimed.rollout_id, "latest", metadata={"a": 1}, worker_id="worker-1")
        attempt = await store.update_attempt(
            claimed.rollout_id, "latest", spans_dropped=2, reward=0.5, last_heartbeat_time=5.0
        )
        assert (attempt.metadata, attempt.worker_id, attempt.spans_dropped) == ({"a": 1}, "worker-1", 2)
        assert attempt.reward == 0.5
        assert (attempt.last_heartbeat_time, attempt.status) == (5.0, "preparing")
        cleared = await store.update_attempt(claimed.rollout_id, "latest", metadata=None)
        assert (cleared.metadata, cleared.spans_dropped) == (None, 2)

    async def test_changing_an_argument_later_changes_no_record(self, store: LightningStore) -> None:
        task: dict[str, Any] = {"messages": ["hello"]}
        metadata: dict[str, Any] = {"tags": ["a"]}
        rollout = await store.enqueue_rollout(task, metadata=metadata)
        task["messages"].append("changed")
        metadata["tags"].append("changed")
        claimed = await dequeue(store)
        attributes: dict[str, Any] = {"list": [1]}
        span = make_span(claimed, **attributes)
        await store.add_span(span)
        attributes["list"].append(2)
        resources: dict[str, Any] = {"prompt": "one"}
        await store.add_resources(resources)
        resources["prompt"] = "changed"
        stored = await read(store, rollout.rollout_id)
        assert (stored.input, stored.metadata) == ({"messages": ["hello"]}, {"tags": ["a"]})
        assert (await store.query_spans(rollout.rollout_id))[0].attributes["list"] == [1]
        latest = await store.get_latest_resources()
        assert latest is not None
        assert latest.resources["prompt"] == PromptTemplate("one")

    async def test_returned_records_are_immutable(self, store: LightningStore) -> None:
        rollout = await store.enqueue_rollout({"messages": ["hello"]}, metadata={"group": "g"})
        update = await store.add_resources({"prompt": "one"})
        with pytest.raises(TypeError):
            rollout.input["messages"].append("changed")
        with pytest.raises(TypeError):
            rollout.metadata["group"] = "changed"  # type: ignore[index] # it is given
        with pytest.raises(TypeError):
            update.resources["prompt"] = PromptTemplate("changed")
        with pytest.raises(ValueError, match="frozen"):
            rollout.status = "failed"  # type: ignore[misc] # intended

    async def test_a_worker_is_busy_while_it_has_an_attempt(self, store: LightningStore) -> None:
        await store.enqueue_rollout("a")
        await store.enqueue_rollout("b")
        one = await store.dequeue_rollout("worker-1")
        two = await store.dequeue_rollout("worker-1")
        assert one is not None
        assert two is not None
        busy = await get_worker(store, "worker-1")
        assert (busy.status, busy.current_attempt_id) == ("busy", two.attempt.attempt_id)
        assert busy.last_dequeue_time is not None
        await finish(store, two)
        still_busy = await get_worker(store, "worker-1")
        assert (still_busy.status, still_busy.current_rollout_id) == ("busy", one.rollout_id)
        await finish(store, one, "failed")
        idle = await get_worker(store, "worker-1")
        assert (idle.status, idle.current_rollout_id, idle.current_attempt_id) == ("idle", None, None)
        assert idle.last_idle_time is not None

    async def test_a_heartbeat_keeps_fields_that_are_not_given(self, store: LightningStore) -> None:
        first = await store.update_worker("worker-1", {"cpu": [0.5]})
        second = await store.update_worker("worker-1")
        assert second.heartbeat_stats == {"cpu": [0.5]}
        assert first.last_heartbeat_time is not None
        assert second.last_heartbeat_time is not None
        assert second.last_heartbeat_time >= first.last_heartbeat_time
        assert (await store.update_worker("worker-1", None)).heartbeat_stats is None
        await store.update_worker("worker-2")
        assert [worker.worker_id for worker in await store.query_workers(sort_by="worker_id")] == [
            "worker-1",
            "worker-2",
        ]
        assert len(await store.query_workers(status_in=["busy"])) == 0
        assert [worker.worker_id for worker in await store.query_workers(worker_id_contains="-2")] == ["worker-2"]

    async def test_creating_a_run_again_returns_the_stored_run(self, store: LightningStore) -> None:
        run = await store.create_run("try", config={"lr": 0.1}, metadata={"note": "x"})
        assert (run.run_id, run.name, run.status, run.config) == (store.run_id, "try", "running", {"lr": 0.1})
        assert await store.create_run("again") == run
        other = await store.create_run("other", run_id="run-2")
        assert list(await store.query_runs()) == [run, other]
        assert await store.get_run_by_id("run-2") == other
        assert await store.get_run_by_id("run-unknown") is None
        assert (await store.query_runs(limit=1)).total == 2
        ended = await store.update_run("run-2", "succeeded")
        assert (ended.status, ended.name) == ("succeeded", "other")

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

    @pytest.mark.parametrize("value", NOT_JSON.values(), ids=NOT_JSON)
    async def test_values_that_are_not_json_are_refused(self, store: LightningStore, value: Any) -> None:
        given = {"part": [value]}
        with pytest.raises(ConfigError, match=r"input\.part\[0\]"):
            await store.enqueue_rollout(given)
        with pytest.raises(ConfigError, match=r"input\.part\[0\]"):
            await store.start_rollout(given)
        with pytest.raises(ConfigError, match=r"metadata\.part\[0\]"):
            await store.enqueue_rollout("a", metadata=given)
        with pytest.raises(ConfigError, match=r"heartbeat_stats\.part\[0\]"):
            await store.update_worker("worker-1", given)
        with pytest.raises(ConfigError, match=r"config\.part\[0\]"):
            await store.create_run("a", config=given)
        assert list(await store.query_rollouts()) == []
        assert list(await store.query_workers()) == []
        assert list(await store.query_runs()) == []
        claimed = await claim(store)
        with pytest.raises(ConfigError, match=r"input\.part\[0\]"):
            await store.update_rollout(claimed.rollout_id, input=given, mode="test")
        with pytest.raises(ConfigError, match=r"metadata\.part\[0\]"):
            await store.update_rollout(claimed.rollout_id, metadata=given, mode="test")
        with pytest.raises(ConfigError, match=r"metadata\.part\[0\]"):
            await store.update_attempt(claimed.rollout_id, "latest", status="running", metadata=given)
        assert await read(store, claimed.rollout_id) == claimed

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

    async def test_a_metric_that_is_not_finite_is_left_out(self, store: LightningStore) -> None:
        metrics = await store.add_metrics(1, {"loss": float("nan"), "reward": 0.5, "norm": float("inf")})
        assert metrics.values == {"reward": 0.5}
        assert [item.values for item in await store.query_metrics()] == [{"reward": 0.5}]

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
