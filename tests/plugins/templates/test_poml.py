"""The template engine ``poml``, with a stand-in for the package ``poml``, which brings 300 MB of Node.js."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.plugin import registry
from agentlightning.plugin.registry import PluginManager
from agentlightning_plugins.templates.poml import engine, plugin

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
    monkeypatch.setattr(engine, "_TIMEOUT_S", 5.0)
    with pytest.raises(agl.ConfigError, match="took longer than 5 s"):
        agl.PromptTemplate(f"slow {tmp_path / 'pid'}", "poml").format()
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    deadline = time.monotonic() + 60
    while status.exists() and ") Z " not in status.read_text():
        assert time.monotonic() < deadline, "the child process still runs"
        time.sleep(0.05)
