"""Freezing JSON, and values that are not JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import ConfigError
from agentlightning.frozen import MAX_DEPTH, FrozenDict, FrozenList, freeze, freeze_attributes, thaw, valid_text
from agentlightning.types import AttemptFailure, EnqueueRolloutRequest, Metrics, Span

pytestmark = pytest.mark.environment("main")  # needs torch

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars | text, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=12
)
anything = st.recursive(
    scalars
    | st.text(max_size=5)
    | st.floats()
    | st.integers()
    | st.binary(max_size=5)
    | st.dates()
    | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.frozensets(st.integers() | st.text(max_size=3), max_size=3)
        | st.dictionaries(st.none() | st.integers() | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(values)
def test_json_is_unchanged_by_freezing_and_thawing(value: Any) -> None:
    frozen = freeze(value)
    assert frozen == value
    assert json.dumps(frozen) == json.dumps(value)
    assert freeze(frozen) is frozen or type(frozen) not in (FrozenDict, FrozenList)
    assert thaw(frozen) == value
    assert freeze_attributes(value) == value


@given(anything)
def test_recorded_data_of_any_type_becomes_json(value: Any) -> None:
    softened = freeze_attributes({"value": value})
    assert json.loads(json.dumps(softened, allow_nan=False).encode()) == softened
    assert freeze(thaw(softened)) == softened
    with contextlib.suppress(ConfigError):
        assert freeze({"value": value}) == softened


class Color(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (torch.tensor(1.5), 1.5),
        (torch.tensor(3), 3),
        (torch.tensor(True), True),
        (Color.RED, "red"),
        (Level.HIGH, 3),
        ((1, (2,)), [1, [2]]),
    ],
)
def test_numbers_and_strings_of_other_types_become_builtins(value: Any, plain: Any) -> None:
    frozen = freeze({"value": value})["value"]
    assert frozen == plain
    assert type(frozen) is (FrozenList if isinstance(plain, list) else type(plain))


@dataclasses.dataclass
class Task:
    question: str


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [1, {"b": float("nan")}]}, r"input\.a\[1\]\.b = nan is not JSON.*None"),
        ({"a": {1: 2}}, r"input\.a has the key 1; the keys"),
        ({"a": {"\ud800": 2}}, r"input\.a has the key"),
        ([2**63], r"input\[0\] = 9223372036854775808 .*64 bits"),
        ({"s": {3}}, r"input\.s = \{3\} .*lists"),
        (b"x", "give text"),
        ("a\udc80", "not JSON"),
        (datetime.date(2026, 1, 2), "isoformat"),
        (np.zeros(3), r"tolist\(\)"),
        (np.float32("nan"), r"input = np\.float32\(nan\)"),
        (Task("?"), r"asdict"),
        (EnqueueRolloutRequest(input=1), "dicts"),
        (object(), r"str\(value\)"),
    ],
)
def test_the_error_about_a_value_that_is_not_json_names_its_path_and_a_fix(value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        freeze(value, "input")


def test_a_value_that_contains_itself_is_refused_but_can_be_recorded() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="contains itself"):
        freeze({"a": loop})
    json.dumps(freeze_attributes({"a": loop}))
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert thaw(freeze(deep)) == deep


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_a_span_with_an_object_whose_repr_fails_is_kept() -> None:
    span = Span.from_attributes(attributes={"a": Unspeakable()}, name="call \ud800")
    assert "Unspeakable object" in span.attributes["a"]
    assert span.name == "call \\ud800"


def test_an_error_with_an_undecodable_file_name_is_kept() -> None:
    failure = AttemptFailure.from_exception(FileNotFoundError("caf\udce9"))
    assert failure.message == "caf\\udce9"
    failure.model_dump_json()
    assert valid_text("fine ü") == "fine ü"


def test_a_metric_that_is_not_finite_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(step=1, time=0.0, values={"loss": float("nan"), "reward": np.float32(0.5)})
    assert metrics.values == {"reward": 0.5}
    assert "loss" in caplog.text
