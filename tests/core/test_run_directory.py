"""The directory of a run: it belongs to one run and one process, and a run can be resumed from it."""

from __future__ import annotations

import errno
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.plugin.registry import PluginManager
from agentlightning.run.directory import open_directory, read_record
from tests.core.test_plugins import install


def test_a_resumed_run_keeps_its_key_and_seed_and_records_the_time(tmp_path: Path) -> None:
    with open_directory(tmp_path / "run", seed=7) as begun:
        key = begun["key"]
    with open_directory(tmp_path / "run", resume=True) as resumed:
        assert (resumed["key"], resumed["seed"]) == (key, 7)
    record = read_record(tmp_path / "run")
    assert len(record["resumed_at"]) == 1
    assert record["versions"]["pydantic"] == importlib.metadata.version("pydantic")


def test_a_run_records_the_plugins_of_others_that_it_uses_and_needs_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, "acme", "components = offer(('algorithm', 'tuned', 'acme_plugin:Tuned'))")
    install(tmp_path, "idle", "components = offer(('algorithm', 'idle', 'idle_plugin:Tuned'))")
    install(tmp_path, "watcher", "@hookimpl\ndef observe(event): ...")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        manager = PluginManager()
        patch.setattr("agentlightning.run.directory.get_manager", lambda: manager)
        manager.create("algorithm", "tuned")
        with open_directory(tmp_path / "run") as record:
            assert record["plugins"] == {"acme": "1.0", "watcher": "1.0"}
        metadata = tmp_path / "acme-1.0.dist-info" / "METADATA"
        metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
        with open_directory(tmp_path / "run", resume=True):
            assert "began with acme 1.0, and 1.1 is installed" in caplog.text
    with (
        pytest.raises(agl.ConfigError, match=r"uses plugins of acme==1\.0; install it: pip install 'acme==1\.0'"),
        open_directory(tmp_path / "run", resume=True),
    ):
        pass


def test_a_directory_belongs_to_one_run(tmp_path: Path) -> None:
    with open_directory(tmp_path / "run"):
        pass
    with pytest.raises(agl.ConfigError, match="holds a run already"), open_directory(tmp_path / "run"):
        pass


def test_a_directory_belongs_to_one_process_until_the_process_ends(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib\n"
            "from agentlightning.run.directory import open_directory\n"
            "with open_directory(pathlib.Path(sys.argv[1])):\n"
            "    print('held', flush=True)\n"
            "    sys.stdin.read()\n",
            str(tmp_path / "run"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with (
        pytest.raises(agl.ConfigError, match=rf"another process \(pid {holder.pid}\) works in"),
        open_directory(tmp_path / "run", resume=True),
    ):
        pass
    holder.kill()
    holder.communicate()
    with open_directory(tmp_path / "run", resume=True):
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_damaged_run_record_is_refused_and_left_unchanged(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(agl.ConfigError, match="not the record of a run"), open_directory(tmp_path, resume=True):
        pass
    assert (tmp_path / "run.json").read_text() == content


def test_a_missing_run_and_a_file_instead_of_a_directory_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(agl.ConfigError, match=r"no run to resume: .*run\.json is missing"),
        open_directory(tmp_path / "new", resume=True),
    ):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(agl.ConfigError, match="cannot be the directory of a run: File exists"),
        open_directory(tmp_path / "file"),
    ):
        pass


def test_rollout_ids_depend_only_on_the_key_of_the_run_and_the_place_in_it() -> None:
    first, again, other = agl.RunContext(key="a"), agl.RunContext(key="a"), agl.RunContext(key="b")
    assert first.rollout_id("train", 3, 1) == again.rollout_id("train", 3, 1)
    assert (
        len({context.rollout_id(*place) for context in (first, other) for place in [("a", 1), ("a", 11), ("b", 1)]})
        == 6
    )
    assert agl.RunContext().key != agl.RunContext().key


def test_the_error_about_a_file_system_without_locks_names_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with (
        pytest.raises(agl.ConfigError, match=r"cannot be locked: Function not implemented; choose a directory"),
        open_directory(tmp_path / "run"),
    ):
        pass
