"""Tokens, passwords and files of real store processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError
from agentlightning.store.factory import create_store
from agentlightning_plugins.stores.http.client import LightningStoreClient
from agentlightning_plugins.stores.http.server.polling import Polls
from tests.security.store_process import running_store


def _fails(folder: Path, *arguments: str, token: str | None = None) -> str:
    """Runs a command that must fail, and returns its output."""
    environment = {name: value for name, value in os.environ.items() if name != "AGL_TOKEN"}
    if token is not None:
        environment["AGL_TOKEN"] = token
    command = [sys.executable, "-m", "agentlightning", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("token", ["secret-of-mine\r\n", "secret-of-mine ", "secret-\tof-mine"])
def test_the_error_about_a_token_with_invalid_characters_is_one_line_without_the_token(
    tmp_path: Path, token: str
) -> None:
    for command in (["store", "--port", "0", "--backend", "memory://"], ["rollouts", "list", "--store", "http://x"]):
        words = _fails(tmp_path, *command, token=token)
        assert words.count("\n") == 1, words
        assert "AGL_TOKEN" in words
        assert "of-mine" not in words


@pytest.mark.parametrize("damage", ["header", "pages", "end"])
def test_the_error_about_a_damaged_database_is_one_line(tmp_path: Path, damage: str) -> None:
    with running_store(tmp_path, backend="sqlite:///store.db") as store:
        for _ in range(20):
            assert store.post("/rollouts", {"input": "x" * 10_000}).status == 201
    path = tmp_path / "store.db"
    content = bytearray(path.read_bytes())
    if damage == "header":
        content[:100] = bytes(range(100, 200))
    elif damage == "pages":
        content[100:50_000] = b"\xa5" * 49_900
    path.write_bytes(content[: len(content) // 3] if damage == "end" else content)
    words = _fails(tmp_path, "store", "--port", "0", "--backend", "sqlite:///store.db")
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
