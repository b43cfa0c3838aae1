"""Opening stores by URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.errors import ConfigError, PluginError
from agentlightning.store import Retention
from agentlightning.store.factory import create_store
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore


async def test_a_url_opens_a_store_of_its_scheme() -> None:
    store = create_store("memory://")
    assert isinstance(store, InMemoryLightningStore)
    assert store.run_id == "default"
    assert create_store("memory://", run="mine").run_id == "mine"


async def test_each_memory_url_opens_a_new_store() -> None:
    one, two = create_store("memory://"), create_store("memory://")
    await one.enqueue_rollout("a")
    assert await two.dequeue_rollout() is None


def test_an_unknown_scheme_names_similar_and_known_schemes() -> None:
    with pytest.raises(PluginError, match=r"no store named 'memroy'. Did you mean 'memory'\? Installed: .*memory"):
        create_store("memroy://")


async def test_the_directory_of_a_run_opens_its_store(tmp_path: Path) -> None:
    first = create_store(f"sqlite:///{tmp_path}/store.db")
    rollout = await first.enqueue_rollout("task")
    await first.close()
    store = create_store(str(tmp_path))
    assert await store.get_rollout_by_id(rollout.rollout_id) == rollout
    await store.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("store.db", "sqlite:///store.db"),
        ("", "memory://"),
        ("://x", "is neither a URL nor a directory with a store.db"),
        ("memory://name", "no name or path"),
    ],
)
def test_an_invalid_store_url_is_refused_with_the_fix(
    url: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store.db").touch()  # an empty URL does not open this file
    with pytest.raises(ConfigError, match=says):
        create_store(url)


async def test_a_retention_policy_applies_to_local_stores_only() -> None:
    store = create_store("memory://", retention=Retention(max_rollouts=10))
    await store.close()
    with pytest.raises(ConfigError, match="owned by its server"):
        create_store("http://127.0.0.1:4747", retention=Retention(max_rollouts=10))


def test_a_local_store_takes_no_token() -> None:
    with pytest.raises(ConfigError, match="token"):
        create_store("memory://", token="secret")
