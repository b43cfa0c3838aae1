"""The scripts of .ci, and the choice of the nearest tests of a file."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import environments
import phases
from agentlightning_plugins.shared.presets.preset import load_preset
from tests import conftest, selection
from tests.source import REPO
from tests.waiting import blocking_until

PYPROJECT = """
[project]
name = "small"
version = "1"
dependencies = ["pluggy>=1.5"]
[project.optional-dependencies]
demo = ["torch>=2.6"]
[dependency-groups]
test = ["pytest>=8"]
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A small project in a folder of its own, and what is run to install it."""
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "constraints").mkdir()
    for name in ("small", "large"):
        (tmp_path / "constraints" / f"{name}.txt").write_text("pluggy==1.6.0\n")
    made: list[str] = []
    monkeypatch.setattr(environments, "REPO", tmp_path)
    monkeypatch.setattr(environments, "uv", lambda: "uv")
    small, large = environments.Environment(groups="test"), environments.Environment("demo", torch=True)
    monkeypatch.setattr(environments, "ENVIRONMENTS", {"small": small, "large": large})

    def run(self: environments.Installer, *command: object) -> None:
        made.append(" ".join(map(str, command[1:])))

    monkeypatch.setattr(environments.Installer, "_run", run)
    return made


def test_an_environment_gets_its_requirements_and_is_then_up_to_date(calls: list[str], tmp_path: Path) -> None:
    environments.install("small")
    assert re.fullmatch(f"venv .* {tmp_path}/.venvs/small", calls[0])
    assert calls[1].endswith(
        f"--constraint {tmp_path}/constraints/small.txt --no-binary claude-agent-sdk pluggy>=1.5 pytest>=8"
    )
    assert calls[2].endswith("--no-deps --editable .")
    environments.install("small")
    assert len(calls) == 3


def test_a_new_entry_point_only_links_the_checkout_again(calls: list[str], tmp_path: Path) -> None:
    environments.install("small")
    calls.clear()
    (tmp_path / "pyproject.toml").write_text(PYPROJECT + '[project.entry-points.agentlightning]\na = "b"\n')
    environments.install("small")
    assert [call.partition(" --no-deps")[2] for call in calls] == [" --editable ."]


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints/small.txt"])
def test_other_requirements_make_the_environment_again(calls: list[str], tmp_path: Path, file: str) -> None:
    environments.install("small")
    leftover = tmp_path / ".venvs" / "small" / "leftover"
    leftover.touch()
    text = (tmp_path / file).read_text()
    (tmp_path / file).write_text(text.replace("pytest>=8", "pytest>=9").replace("1.6.0", "1.5.0"))
    environments.install("small")
    assert len(calls) == 6
    assert not leftover.exists()


def test_requirements_of_another_environment_change_nothing(
    calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments.install("small")
    (tmp_path / "constraints" / "large.txt").write_text("pluggy==1.5.0\n")
    monkeypatch.setattr(environments, "TORCH", "torch==2.12.0")
    environments.install("small")
    assert len(calls) == 3


def test_packages_are_added_to_an_environment_that_somebody_made_by_hand(calls: list[str], tmp_path: Path) -> None:
    theirs = tmp_path / ".venvs" / "small" / "theirs"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    environments.install("small")
    assert theirs.exists()
    assert len(calls) == 3


def test_agents_of_npm_are_installed_once_and_an_error_names_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    monkeypatch.setenv("PATH", str(npm.parent))
    monkeypatch.setattr(environments, "REPO", tmp_path)
    with pytest.raises(SystemExit, match="npm is missing"):
        environments.install_agents("npm")
    npm.write_text(f"#!/bin/sh\necho $1 $7 >> {tmp_path}/log\n[ $1 = config ] && echo https://registry.example\n")
    npm.chmod(0o755)
    release = load_preset("claude-code").tested
    with pytest.raises(SystemExit, match=rf"claude-code@{release} .* from https://registry.example"):
        environments.install_agents("npm")
    npm.write_text(npm.read_text() + "true\n")
    for _ in range(2):
        environments.install_agents("npm")
    assert (tmp_path / "log").read_text().split("\n")[:-1] == [
        f"install @anthropic-ai/claude-code@{release}", "config", f"install @anthropic-ai/claude-code@{release}"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dry_run", "gpu", "wanted", "backend"),
    [
        ("+ torch==2.13.0", False, "torch==2.13.0", True),
        ("+ torch==2.13.0+cpu", False, "torch==2.13.0", False),
        ("+ torch==2.13.0", True, "torch==2.13.0", False),
        ("+ torch==2.13.0", False, "torch==2.13.0 --index-url https://builds.example", False),
    ],
)
def test_a_machine_without_a_gpu_gets_the_cpu_build_of_torch(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, dry_run: str, gpu: bool, wanted: str, backend: bool
) -> None:
    shown = subprocess.CompletedProcess([], 0, stdout="", stderr=dry_run)
    monkeypatch.setattr(environments.subprocess, "run", lambda *_, **__: shown)
    monkeypatch.setattr(environments.platform, "system", lambda: "Linux")
    monkeypatch.setattr(environments, "has_gpu", lambda: gpu)
    monkeypatch.setattr(environments, "TORCH", wanted)
    environments.install("large")
    (call,) = [call for call in calls if call.endswith(wanted)]
    assert ("--torch-backend cpu" in call) == backend


def test_uv_gets_the_settings_of_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From a file of pip and from its environment variables, which come after the file."""
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://mirror.example/simple\nextra-index-url =\n  https://a.example\n  https://b.example\n"
        "cert = /file.pem\n[install]\nconstraint = /pins.txt\n"
    )
    for name in ("PIP_CERT", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_CERT", "/variable.pem")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels /more")
    environments.pip_settings.cache_clear()
    variables = environments.uv_variables()
    environments.pip_settings.cache_clear()
    assert variables["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert variables["UV_INDEX"].startswith("https://a.example https://b.example")
    assert variables["UV_CONSTRAINT"].endswith("/pins.txt")
    assert (variables["SSL_CERT_FILE"], variables["UV_FIND_LINKS"]) == ("/variable.pem", "/wheels,/more")
    assert variables["UV_INDEX_STRATEGY"] == "unsafe-best-match"


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Programs that run instead of the parts."""
    programs: dict[str, str] = {}
    monkeypatch.setattr(phases, "RESULTS", tmp_path)
    monkeypatch.setattr(phases, "uv", lambda: "uv")
    monkeypatch.setattr(phases.Run, "_install", lambda self, environment: [[sys.executable, "-c", "pass"]])
    monkeypatch.setattr(phases.Run, "_commands", lambda self, part: [[sys.executable, "-c", programs[part]]])
    monkeypatch.setattr(phases.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(phases.Run, "stop_after", lambda self, seconds: None)
    return programs


def test_a_failed_phase_is_named_and_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, programs: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # tests start many processes, which would all compile
    programs |= {"lint": "raise SystemExit('seen')", "verl": "print('.. [ 57%]')", "serial": "pass"}
    programs["main"] = "import sys; assert not sys.dont_write_bytecode"

    def run(*arguments: str) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", ["phases.py", *arguments])
        code = phases.main()
        return code, capfd.readouterr().out

    code, output = run(*programs)
    assert code == 1
    for text in ("== lint: FAILED", "seen", "verl: 50 % of the tests", "== verl: passed", "== serial: passed"):
        assert text in output
    assert "FAILED: lint" in output.splitlines()[-2]
    programs["lint"] = "pass"
    assert run("lint", "main")[0] == 0


def test_workers_begin_with_the_modules_whose_tests_take_longest() -> None:
    def test(module: str, mark: str = "") -> Any:
        return SimpleNamespace(path=module, get_closest_marker=lambda name: mark if mark == name else None)

    items = [test("a"), test("b"), test("b", "slow"), test("c"), test("c"), test("d", "slow"), test("d", "slow")]
    for config, expected in ((SimpleNamespace(), "abbccdd"), (SimpleNamespace(workerinput={}), "ddbbcca")):
        conftest.pytest_collection_modifyitems(config, items)
        assert "".join(item.path for item in items) == expected


def test_a_phase_ends_with_its_program_and_ends_what_the_program_left_behind(programs: dict[str, str]) -> None:
    programs["lint"] = "import subprocess; print(subprocess.Popen(['sleep', '900']).pid)"
    run = phases.Run(soak=False)
    run.lane(["lint"])
    assert run.failed == []
    left = Path("/proc", (phases.RESULTS / "lint.log").read_text().strip(), "stat")
    blocking_until(lambda: not left.exists() or left.read_text().split(")")[1].split()[0] == "Z")


def test_a_run_that_is_stopped_prints_what_its_phases_have_written(
    monkeypatch: pytest.MonkeyPatch, programs: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    programs["main"] = """if True:
        import faulthandler, time
        faulthandler.enable()
        source = "def test_x():\\n print('hangs', flush=True); time.sleep(900)"
        exec(compile(source, "/there/tests/test_a.py", "exec"))
        test_x()
    """
    codes: list[int] = []
    monkeypatch.setattr(phases.os, "_exit", codes.append)
    run = phases.Run(soak=False)
    thread = threading.Thread(target=run.lane, args=[["main"]])
    thread.start()
    blocking_until(lambda: (log := phases.RESULTS / "main.log").exists() and "hangs" in log.read_text())
    run.stop()
    thread.join()
    assert codes == [1]
    output = capfd.readouterr().out
    assert "== main: stopped\nhangs" in output
    assert 'main was stopped in /tests/test_a.py", line 2 in test_x\n' in output


def test_the_summary_names_the_slowest_tests_and_those_that_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(phases, "RESULTS", tmp_path)
    cases = "".join(f'<testcase classname="tests.a" name="test_{n}" time="{n}"/>' for n in range(20))
    cases += '<testcase classname="tests.a" name="test_bad" time="0"><failure message="assert 0"/></testcase>'
    (tmp_path / "main.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    lines = phases.Run(soak=False).summary().splitlines()
    assert [line.rpartition("_")[2] for line in lines[1:11]] == [str(n) for n in range(19, 9, -1)]
    assert lines[-1] == "FAILED main: tests.a::test_bad: assert 0"


def test_the_nearest_tests_of_a_module_import_it_and_mirror_its_folder() -> None:
    assert selection.tests_of("tests/test_rules.py") == {"tests/test_rules.py"}
    near = selection.tests_of("plugins/agentlightning_plugins/stores/memory/store.py")
    assert "tests/plugins/stores/test_memory.py" in near
    assert all(name.startswith("tests/core/") for name in selection.tests_of("core/agentlightning/runner.py"))
    assert "tests/plugins/gateway/test_gateway.py" in selection.tests_of("tests/plugins/gateway/gateway_setup.py")
    assert selection.tests_of("README.md") == {"tests/test_docs.py"}
    for page in ("docs/tutorials/first-prompt.ipynb", "docs/how-to/budgets.md"):
        assert selection.tests_of(page) == {"tests/test_docs.py", "tests/test_tutorials.py"}
    for name in selection.nearest(["algorithms/agentlightning_algorithms/shared/advantage.py"]):
        assert (REPO / name).exists()
