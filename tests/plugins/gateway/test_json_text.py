"""JSON of requests and answers: what orjson refuses, and what must not reach the recursive parser."""

from __future__ import annotations

import json
import math

import pytest

from agentlightning_plugins.gateway.dialects import wire


def test_nan_infinities_and_lone_surrogates_are_parsed() -> None:
    value = wire.parse_json(b'{"a": [NaN, -Infinity], "b": "\\ud800 [[["}')
    assert math.isnan(value["a"][0])
    assert (value["a"][1], value["b"]) == (-math.inf, "\ud800 [[[")


@pytest.mark.parametrize("start", [b"", b"[NaN,", b'{"a": "\\ud800", "b":'], ids=["plain", "nan", "surrogate"])
@pytest.mark.parametrize("bracket", [b"[", b'{"a":'], ids=["lists", "objects"])
def test_deep_json_is_refused_before_the_parser_recurses(
    monkeypatch: pytest.MonkeyPatch, start: bytes, bracket: bytes
) -> None:
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("it would collect garbage at the limit of recursion"))
    with pytest.raises(ValueError, match="nested too deeply"):
        wire.parse_json(start + bracket * 5000)


def test_brackets_in_strings_do_not_count() -> None:
    text = json.dumps({"a": '[{"\\' * 1000, "b": math.nan})
    assert wire.parse_json(text.encode())["a"] == '[{"\\' * 1000
