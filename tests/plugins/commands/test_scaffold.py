"""`agl new`: the files that it writes work and pass their own test."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.errors import install_command
from agentlightning.plugin.hookspecs import INTERFACE
from agentlightning_plugins.commands.new import PLUGIN_KINDS
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
from tests.algorithms import prompt_lab
from tests.algorithms.tiny_model import save_tiny_model
from tests.new_plugins import write_plugins
from tests.plugins.commands.agl_here import run_here
from tests.source import REPO
from tests.waiting import LIMIT_S


def run(folder: Path, *command: str, code: int = 0, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **environment},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_new_agent_trains_without_changes(tmp_path: Path) -> None:
    assert run_here(tmp_path, "new", "agent", "word-adder").code == 0
    said = run_here(tmp_path / "word-adder", "train", "config.yaml", "strategy=shm", module="agent")
    assert (said.code, "run succeeded" in said.stdout + said.stderr) == (0, True)
    assert "@" not in (tmp_path / "word-adder" / "config.yaml").read_text()
    doctor = run_here(tmp_path / "word-adder", "doctor", "config.yaml", module="agent")
    assert (doctor.code, "BROKEN" in doctor.stdout) == (0, False), doctor.stdout


async def test_a_new_agent_for_grpo_has_a_valid_configuration_and_calls_the_model_of_the_run(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    assert run_here(tmp_path, "new", "agent", "word-adder", "--grpo").code == 0
    folder, model = tmp_path / "word-adder", f"algorithm.model={tmp_path / 'model'}"
    dry = run_here(folder, "train", "config.yaml", model, "--dry-run", module="agent")
    assert dry.code == 0, dry.stdout + dry.stderr
    async with ScriptedOpenAI() as server:
        llm = f"resources={{llm: {{resource_type: llm, endpoint: {server.endpoint}, model: m}}}}"
        settings = ("algorithm=baseline", llm, "strategy=shm")
        said = await asyncio.to_thread(run_here, folder, "train", "config.yaml", *settings, module="agent")
        assert said.code == 0, said.stderr
        assert {request.body["model"] for request in server.requests if request.body} == {"m"}


CODEX = """#!/bin/sh
if [ "$1" = --version ]; then echo 0.171.0; exit; fi
url=$(sed -n 's/^base_url = "\\(.*\\)"/\\1/p' "$HOME/.codex/config.toml")
body='{"model": "scripted", "input": "hello"}'
curl --fail-with-body -sS "$url/responses" -H "Authorization: Bearer $OPENAI_API_KEY" --json "$body" || exit 1
sed -i 's/numbers.1:./numbers/' program.py
"""


async def test_a_new_coding_agent_is_measured_by_the_checks_of_its_tasks_with_a_server_of_chat_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "codex"
    program.parent.mkdir()
    program.write_text(CODEX)
    program.chmod(0o755)
    run_there = functools.partial(asyncio.to_thread, run_here, tmp_path / "fixer")
    said = run_here(tmp_path, "new", "agent", "fixer", "--preset", "codex").stdout
    assert "npm install -g @openai/codex" in said
    async with ScriptedOpenAI() as server:
        for name, value in {"BASE_URL": server.endpoint, "API_KEY": "none", "MODEL": "scripted"}.items():
            monkeypatch.setenv(f"OPENAI_{name}", value)
        doctor = await run_there("doctor", "config.yaml")
        assert "PATH has no program 'codex'. Install it with: npm install" in doctor.stdout + doctor.stderr
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        doctor = await run_there("doctor", "config.yaml")
        assert f"it runs {program} 0.171.0, tried with 0.171.0; its first request has about 28 kB" in doctor.stdout
        assert f"{server.endpoint} answers; model scripted" in doctor.stdout
        done = await run_there("train", "config.yaml")
        assert done.code == 0, done.stderr
        assert "reward 0.3333" in done.stdout + done.stderr
        assert {request.path for request in server.requests if request.body} == {"/v1/chat/completions"}
    for arguments, message in (
        (["--preset", "codx"], "Did you mean 'codex'"),
        (["--preset", "pi", "--apo"], "one of them"),
    ):
        refused = run_here(tmp_path, "new", "agent", "other", *arguments)
        assert (refused.code, message in refused.stderr) == (2, True)


@pytest.mark.soak
def test_a_new_agent_for_grpo_trains_and_leaves_a_model(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    assert run_here(tmp_path, "new", "agent", "word-adder", "--grpo").code == 0
    said = run_here(
        tmp_path / "word-adder", "train", "config.yaml", "strategy=shm", f"algorithm.model={tmp_path / 'model'}",
        "algorithm.steps=1", "algorithm.rollouts_per_task=2", "algorithm.sampling.max_tokens=4", module="agent",
    )  # fmt: skip
    assert said.code == 0, said.stderr
    assert (tmp_path / "word-adder/runs/word-adder/best/model.safetensors").is_file()


def test_a_new_agent_for_apo_trains_and_finds_a_better_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: RecordedRequest) -> Answer:
        asked = request.body["messages"][0]["content"]
        if request.body["model"] == "small":  # the agent
            return Answer(str(sum(map(int, re.findall(r"\d+", asked)))) if "Add" in asked else "no idea")
        return Answer("<prompt>\nAdd the numbers. {question}\n</prompt>")  # critic and editor

    assert run_here(tmp_path, "new", "agent", "word-adder", "--apo").code == 0
    folder = tmp_path / "word-adder"
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    missing = run_here(folder, "train", "config.yaml", "--dry-run", module="agent")
    assert (missing.code, "the environment variable OPENAI_BASE_URL is not set" in missing.stderr) == (2, True)
    with prompt_lab.Server(answer) as server:
        for name, value in (("API_KEY", "any"), ("BASE_URL", server.endpoint), ("MODEL", "small")):
            monkeypatch.setenv(f"OPENAI_{name}", value)
        monkeypatch.setenv("AGL_CRITIC_MODEL", "large")
        said = run_here(
            folder,
            "train",
            "config.yaml",
            "strategy=shm",
            "algorithm.beam_rounds=1",
            "algorithm.beam_width=1",
            "algorithm.branch_factor=1",
            module="agent",
        )
    assert said.code == 0, said.stderr
    assert (folder / "runs/word-adder/prompts/prompt.txt").read_text().strip() == "Add the numbers. {question}"


def test_a_new_plugin_can_be_installed(tmp_path: Path) -> None:
    said = run_here(tmp_path, "new", "plugin", "metrics-file").stdout
    assert "    cd metrics-file\n    pip install -e '.[test]'\n    agl plugins\n    pytest\n" in said
    folder = tmp_path / "metrics-file"
    install = ("install", "--quiet", "--no-build-isolation", "--no-deps", "--target", str(tmp_path / "site"), ".")
    run(folder, "pip", *install)
    assert (tmp_path / "site" / "metrics_file" / "py.typed").is_file()
    (points,) = (tmp_path / "site").glob("*.dist-info/entry_points.txt")
    assert points.read_text() == "[agentlightning]\nmetrics-file = metrics_file.plugin\n"


@pytest.mark.soak
def test_a_new_plugin_of_every_kind_loads_and_passes_ruff_and_its_own_tests(tmp_path: Path) -> None:
    """`make lint` checks their types."""
    packages = write_plugins(tmp_path)
    for package in packages:
        texts = [file.read_text(encoding="utf-8") for file in package.rglob("*") if file.is_file()]
        assert [found for text in texts for found in re.findall("@[A-Z_]+@", text)] == []
        assert {"AGENTS.md", ".github"} <= {file.name for file in package.iterdir()}
    assert {package.name for package in packages} == {f"my-{kind.replace('_', '-')}" for kind in PLUGIN_KINDS}
    site = {"PYTHONPATH": str(tmp_path / "site")}
    plugins = {
        each["plugin"]: each for each in json.loads(run(tmp_path, "agentlightning", "plugins", "--json", **site))
    }
    assert {plugins[package.name]["error"] for package in packages} == {""}
    assert {plugins[package.name]["interface"] for package in packages} == {INTERFACE}
    run(tmp_path, "ruff", "check", "--no-cache", ".")
    run(tmp_path, "ruff", "format", "--no-cache", "--check", ".")
    config = ("-c", str(packages[0] / "pyproject.toml"), "--rootdir", str(tmp_path))
    run(
        tmp_path, "pytest", "-p", "no:cacheprovider", *config, *(str(package / "tests") for package in packages), **site
    )


def test_a_plugin_of_an_unknown_kind_is_refused_with_all_kinds(tmp_path: Path) -> None:
    refused = run_here(tmp_path, "new", "plugin", "mine", "--kind", "traker")
    assert refused.code == 2
    assert "--kind 'traker'" in refused.stderr
    assert "Did you mean 'tracker'?" in refused.stderr
    assert ", ".join(PLUGIN_KINDS) in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "command"),
    [
        ("--apo", f"{install_command('apo')} openai\n"),
        ("--grpo", f"{install_command('grpo')} openai\n"),
        ("--verl", "pip install -c constraints/verl.txt '.[verl]'    # in a checkout of Lightning\n"),
    ],
)
def test_agl_new_agent_prints_what_to_install_and_where(tmp_path: Path, option: str, command: str) -> None:
    """This environment has Lightning already; verl needs a separate one, which must get Lightning from a checkout."""
    said = run_here(tmp_path, "new", "agent", "word-adder", option).stdout
    assert command in said
    assert ("OPENAI_MODEL=..." in said) == (option == "--apo")
    assert ("Next, in a separate environment" in said) == (option == "--verl")


@pytest.mark.parametrize("name", ["Upper", "1st", "a b", "../up", "a--b", ""])
def test_an_invalid_name_is_refused(tmp_path: Path, name: str) -> None:
    refused = run_here(tmp_path, "new", "agent", name)
    assert (refused.code, "a name consists of lower-case letters" in refused.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["class", "json"])
def test_a_name_that_is_reserved_by_python_is_refused(tmp_path: Path, name: str) -> None:
    refused = run_here(tmp_path, "new", "plugin", name)
    assert (refused.code, f"choose another, as in my-{name}" in refused.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "name"), [("tracker", "console"), ("store", "sqlite"), ("command", "train")])
def test_a_plugin_with_the_name_of_something_installed_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    refused = run_here(tmp_path, "new", "plugin", name, "--kind", kind)
    assert (refused.code, f"there is a {kind} of this name already" in refused.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_no_template_or_default_names_the_address_of_a_provider() -> None:
    address = re.compile(
        r"(api|gateway)\.(openai|anthropic|mistral|together|groq|deepseek)\b|openrouter\.ai|azure\.com"
    )
    roots = [REPO / name for name in ("core", "plugins", "integrations", "algorithms", "examples", "deploy")]
    files = [
        file for root in roots for file in root.rglob("*") if file.suffix in (".py", ".in", ".yaml", ".md", ".mjs")
    ]
    named = {str(file.relative_to(REPO)) for file in files if address.search(file.read_text(encoding="utf-8"))}
    backends = "plugins/agentlightning_plugins/gateway/backends"
    # The gateway knows the providers that a user names: `model: openai/...`, or an endpoint with the provider's host.
    assert named == {f"{backends}/provider.py", f"{backends}/model_table.py"}


def test_a_folder_that_cannot_be_written_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = run_here(tmp_path, "new", "agent", "mine", "--into", "file/mine")
    assert (refused.code, refused.stderr.count("\n")) == (2, 1)
    assert "cannot be written: Not a directory; choose another directory with --into" in refused.stderr


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "agent.py").write_text("precious")
    refused = run_here(tmp_path, "new", "agent", "mine")
    assert (refused.code, "already exists" in refused.stderr) == (2, True)
    assert (tmp_path / "mine" / "agent.py").read_text() == "precious"


def test_completion_is_available_for_each_shell(tmp_path: Path) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert f"_AGL_COMPLETE={shell}_complete" in run_here(tmp_path, "completion", shell).stdout
    words = {"_AGL_COMPLETE": "bash_complete", "COMP_WORDS": "agl roll", "COMP_CWORD": "1"}
    assert "rollouts" in run(tmp_path, "agentlightning", **words)
