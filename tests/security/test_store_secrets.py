"""Tokens, passwords and files of real store processes."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError
from agentlightning.store.factory import create_store
from agentlightning_plugins.shared import garbage_collection
from agentlightning_plugins.stores.http.client import LightningStoreClient
from agentlightning_plugins.stores.http.server.polling import Polls
from tests.plugins.commands.agl_here import run_here
from tests.security.store_process import running_store


def _fails(folder: Path, *arguments: str) -> str:
    """Runs a command that must fail, and returns its output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage_collection, "relax_collector", lambda: None)  # for processes that do nothing else
        said = run_here(folder, *arguments)
    assert said.code == 2, said
    return said.stdout + said.stderr


@pytest.mark.parametrize("token", ["secret-of-mine\r\n", "secret-of-mine ", "secret-\tof-mine"])
def test_the_error_about_a_token_with_invalid_characters_is_one_line_without_the_token(
    tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_TOKEN", token)
    for command in (["store", "--port", "0", "--backend", "memory://"], ["rollouts", "list", "--store", "http://x"]):
        words = _fails(tmp_path, *command)
        assert words.count("\n") == 1, words
        assert "AGL_TOKEN" in words
        assert "of-mine" not in words


@pytest.mark.parametrize("damage", ["header", "pages", "end"])
async def test_the_error_about_a_damaged_database_is_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "store.db"
    store = create_store(f"sqlite:///{path}")
    for _ in range(20):
        await store.enqueue_rollout("x" * 10_000)
    await store.close()
    content = bytearray(path.read_bytes())
    if damage == "header":
        content[:100] = bytes(range(100, 200))
    elif damage == "pages":
        content[100:50_000] = b"\xa5" * 49_900
    path.write_bytes(content[: len(content) // 3] if damage == "end" else content)
    words = await asyncio.to_thread(_fails, tmp_path, "store", "--port", "0", "--backend", "sqlite:///store.db")
    assert words.startswith("agl: ")
    assert words.count("\n") == 1, words
    assert "store.db" in words


def test_the_files_of_a_database_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with running_store(tmp_path, backend=f"sqlite:///{folder}/store.db") as store:
        store.claim()
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"store.db": 0o600, "store.db-wal": 0o600, "store.db-shm": 0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "the folder is new"


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hunter2@127.0.0.1:1",
        "http://me:hunter2@[",
        "memory://me:hunter2@x",
        "sqlite://me:hunter2@host/store.db",
        "me:hunter2@host:5432",
        "postgresql://me:hunter2@127.0.0.1:1/x?nonsense=%zz",
        "postgresql://127.0.0.1:1/x?user=me&password=hunter2&connect_timeout=x",
    ],
)
def test_an_error_about_a_store_url_does_not_show_the_password(url: str) -> None:
    with pytest.raises(Exception, match=".") as caught:
        create_store(url)
    assert "hunter2" not in str(caught.value)


def test_a_client_refuses_a_token_with_characters_that_are_invalid_in_a_header() -> None:
    for token in ("a\r\nb", "a ", " a", "a\x7f"):
        with pytest.raises(ConfigError, match="token"):
            LightningStoreClient("http://127.0.0.1:1", token)


async def test_the_number_of_remembered_released_requests_is_bounded() -> None:
    polls = Polls()
    for number in range(10_000):
        await polls.release(str(number))
    assert len(polls._claims) <= 4096
