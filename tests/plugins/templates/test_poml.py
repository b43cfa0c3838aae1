"""The template engine ``poml``, with a stand-in for the package ``poml``, which brings 300 MB of Node.js."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.plugin import registry
from agentlightning.plugin.registry import PluginManager
from agentlightning_plugins.templates import poml as plugin
from tests.waiting import blocking_until

STAND_IN = """
import json, os, subprocess

def poml(markup, context, chat, format):
    assert (chat, format) == (False, "raw")
    template = markup.read_text()
    if template == "broken":
        raise ValueError("Error: Unclosed tag")
    if template == "environment":
        return json.dumps({"messages": " ".join(sorted(os.environ))})
    if template.startswith("slow"):
        child = subprocess.Popen(["sleep", "300"])
        open(template.partition(" ")[2], "w").write(str(child.pid))
        child.wait()
    if template == "image":
        return json.dumps({"messages": [{"type": "image"}]})
    return json.dumps({"messages": template + json.dumps(context)})
"""


@pytest.fixture(autouse=True)
def poml_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "poml.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    manager = PluginManager([])
    manager.register(plugin, "templates.poml")
    monkeypatch.setattr(registry, "get_manager", lambda: manager)


def test_a_template_gets_the_given_values() -> None:
    text = agl.PromptTemplate("<p>Hi</p>", "poml").format(name="Ada", tags=["a"])
    assert text == '<p>Hi</p>{"name": "Ada", "tags": ["a"]}'


def test_a_template_cannot_read_secrets_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    names = set(agl.PromptTemplate("environment", "poml").format().split())
    assert "OPENAI_API_KEY" not in names
    assert {"HOME", "PATH", "PYTHONPATH", "TMPDIR"} <= names


@pytest.mark.parametrize(("template", "reason"), [("broken", "Unclosed tag"), ("image", "other than text")])
def test_a_template_that_gives_no_text_raises_a_config_error(template: str, reason: str) -> None:
    with pytest.raises(agl.ConfigError, match=reason):
        agl.PromptTemplate(template, "poml").format()


def test_a_template_that_takes_too_long_is_killed_with_its_child_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"

    def communicate(process: subprocess.Popen[str], timeout: float) -> None:
        blocking_until(lambda: pid.exists() and pid.read_text())
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(agl.ConfigError, match="took longer than 60 s"):
        agl.PromptTemplate(f"slow {pid}", "poml").format()
    status = Path(f"/proc/{pid.read_text()}/stat")
    blocking_until(lambda: not status.exists() or ") Z " in status.read_text())
