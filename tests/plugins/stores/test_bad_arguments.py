"""Every store refuses the same bad arguments with the same class of error, and a refused call changes nothing."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConfigError
from agentlightning.records import UNSET
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.stores.http.client import LightningStoreClient
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.plugins.stores.served import serve

# fmt: off
BAD_VALUES = [
    None, UNSET, True, -1, -(2**70), 1.5, math.nan, math.inf, "", "no such", "x" * 300, "\ud800", "..", "a/b?c#d%20",
    b"x", (1,), [], ["a", 1], {1, 2}, {}, {"a": 1}, {"a": math.nan}, {1: 2}, object(),
]
# fmt: on
GOOD_VALUES = {
    "rollout_id": "ro-known",
    "attempt_id": "latest",
    "resources_id": "rs-known",
    "readable_span": None,
    "status": "succeeded",
    "step": 1,
    "values": {"reward": 1.0},
    "resources": {"prompt": "Hi"},
    "version": 1,
}


def _calls() -> list[tuple[str, dict[str, Any]]]:
    """One call for each parameter of each method and each bad value, with good values for the required others."""
    calls = []
    for name, method in inspect.getmembers(LightningStore, inspect.iscoroutinefunction):
        parameters = list(inspect.signature(method).parameters.values())[1:]
        given = {each.name: GOOD_VALUES.get(each.name, "x") for each in parameters if each.default is each.empty}
        calls += [(name, {**given, each.name: value}) for each in parameters for value in BAD_VALUES]
    return [call for call in calls if call[1].get("timeout", 0) is not None and call[1].get("timeout") != math.inf]


async def _fill(store: LightningStore) -> None:
    await store.update_resources("rs-known", {"prompt": "Hi"})
    await store.enqueue_rollout("task", rollout_id="ro-known")
    await store.dequeue_rollout("worker")


async def _outcome(store: LightningStore, name: str, arguments: dict[str, Any]) -> str:
    if name == "wait_for_rollouts":
        arguments = {"timeout": 0, **arguments}
    try:
        await getattr(store, name)(**arguments)
    except Exception as error:  # the class is what the test compares
        return type(error).__name__
    return "accepted"


async def _state(store: LightningStore) -> Any:
    counts = await store.statistics()
    pages = [await store.query_rollouts(), await store.query_workers(), await store.query_resources()]
    pages += [await store.query_runs(), await store.query_metrics(), await store.query_spans("ro-known")]
    return {**counts, "uptime": 0}, [list(page) for page in pages]


async def _outcomes(store: LightningStore) -> dict[str, str]:
    """Makes all calls, and those that the store refused once more, which must change nothing."""
    await _fill(store)
    outcomes, refused = {}, []
    for name, arguments in _calls():
        outcomes[f"{name}({arguments!r:.400})"] = outcome = await _outcome(store, name, arguments)
        refused += [(name, arguments)] if outcome == "ConfigError" else []
    before = await _state(store)
    for name, arguments in refused:
        await _outcome(store, name, arguments)
    assert await _state(store) == before
    return outcomes


async def test_all_stores_raise_the_same_errors_for_bad_arguments(quick_path: Path) -> None:
    memory, sqlite = InMemoryLightningStore(), create_store(f"sqlite:///{quick_path}/store.sqlite")
    async with serve() as (server, _):
        client = LightningStoreClient(server.endpoint)
        try:
            expected, *others = [await _outcomes(store) for store in (memory, sqlite, client)]
        finally:
            await asyncio.gather(*[store.close() for store in (memory, sqlite, client)])
    assert len(expected) > 2000
    assert Counter(expected.values())["ConfigError"] > 1500
    for other in others:
        assert {call: (expected[call], other[call]) for call in expected if expected[call] != other[call]} == {}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.get_rollout_by_id(""), "rollout_id=''"),
        (lambda store: store.query_rollouts(status_in=["done"]), "status_in='done' is unknown"),
        (lambda store: store.query_rollouts(limit="3"), "limit='3'.*integer"),
        (lambda store: store.enqueue_rollout(1, config={"max_attempts": 0}), "config.max_attempts=0"),
        (lambda store: store.enqueue_rollout({"a": [math.nan]}), r"input.a\[0\] = nan is not JSON"),
        (lambda store: store.update_resources("rs", {"llm": {"api_key": "sk-1", "endpoint": 3}}), r"llm=.*'\*\*\*'"),
    ],
)
async def test_an_error_names_the_argument_and_its_value(call: Any, message: str) -> None:
    store = InMemoryLightningStore()
    with pytest.raises(ConfigError, match=message):
        await call(store)
    with pytest.raises(TypeError, match="surprise"):
        await store.query_rollouts(surprise=1)
    await store.close()
