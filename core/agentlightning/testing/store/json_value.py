"""What may be stored: JSON. What is asked for is refused where it is given, what is observed is never lost."""

from __future__ import annotations

import datetime
from typing import Any, Final

import pytest

from agentlightning.errors import ConfigError
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.step import claim, make_span, read
from agentlightning.types import SpanEvent

NO_JSON: Final[dict[str, Any]] = {
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


class JsonValueTests:
    """Sentences about values that JSON cannot hold."""

    @pytest.mark.parametrize("value", NO_JSON.values(), ids=NO_JSON)
    async def test_what_is_not_json_is_refused_where_it_is_given(self, store: LightningStore, value: Any) -> None:
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

    async def test_a_span_is_not_lost_for_a_value_that_is_not_json(self, store: LightningStore) -> None:
        claimed = await claim(store)
        span = make_span(claimed, "broken \udc80 name", **NO_JSON, fine=[1, None, "grüße"])
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

    async def test_a_metric_that_is_no_number_is_left_out(self, store: LightningStore) -> None:
        metrics = await store.add_metrics(1, {"loss": float("nan"), "reward": 0.5, "norm": float("inf")})
        assert metrics.values == {"reward": 0.5}
        assert [item.values for item in await store.query_metrics()] == [{"reward": 0.5}]

    async def test_every_json_value_comes_back_as_it_went_in(self, store: LightningStore) -> None:
        value: dict[str, Any] = {
            "text": 'grüße "quoted" \\ \n\t\u2028 😀 ',
            "numbers": [0, -1, 2**63 - 1, -(2**63), 0.1, 1e-300, 1.7976931348623157e308, 1.0],
            "nothing": [None, True, False, [], {}, "", [[[]]]],
            "": {"a.b": 1, "$c": [2], "grüße": 3},
        }
        await store.enqueue_rollout(value, metadata=value)
        claimed = await store.dequeue_rollout()
        assert claimed is not None
        assert (claimed.input, claimed.metadata) == (value, value)
        assert [type(number) for number in claimed.input["numbers"]] == [int] * 4 + [float] * 4
        await store.add_span(make_span(claimed, **value))
        assert (await store.query_spans(claimed.rollout_id))[0].attributes == value
