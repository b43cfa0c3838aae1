"""The folder store passes the conformance kit of stores, and tests of what is specific to folders."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from lightning_acme.store import FolderStore

import agentlightning as agl
from agentlightning.testing.store import DurableStoreConformance


class TestFolderStore(DurableStoreConformance):
    @pytest.fixture
    async def opened(self) -> AsyncIterator[list[FolderStore]]:
        stores: list[FolderStore] = []
        yield stores
        await stores[-1].close()

    @pytest.fixture
    async def store(self, tmp_path: Path, opened: list[FolderStore]) -> FolderStore:
        opened.append(FolderStore(tmp_path / "folder"))
        return opened[-1]

    @pytest.fixture
    def reopen(self, tmp_path: Path, opened: list[FolderStore]) -> Callable[[], Awaitable[FolderStore]]:
        async def reopen() -> FolderStore:
            await opened[-1].close()
            opened.append(FolderStore(tmp_path / "folder"))
            return opened[-1]

        return reopen


async def test_a_url_opens_a_folder_and_a_second_owner_is_refused(tmp_path: Path) -> None:
    store = agl.create_store(f"folder://{tmp_path}/folder")
    rollout = await store.enqueue_rollout({"question": 1})
    with pytest.raises(agl.ConfigError, match="open in another process"):
        FolderStore(tmp_path / "folder")
    await store.close()
    again = agl.create_store(f"folder://{tmp_path}/folder")
    found = await again.get_rollout_by_id(rollout.rollout_id)
    assert found is not None
    assert found.input == {"question": 1}
    await again.close()


async def test_a_line_that_a_crash_cut_off_is_removed(tmp_path: Path) -> None:
    found = []
    for question in range(3):
        store = FolderStore(tmp_path / "folder")
        await store.enqueue_rollout(question)
        found = [rollout.input for rollout in (await store.query_rollouts()).items]
        await store.close()
        with (tmp_path / "folder" / "journal.jsonl").open("a") as journal:
            journal.write('[{"put": "Roll')
    assert found == [0, 1, 2]
