from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from agentlightning.cli import cli, main
from agentlightning.errors import ConfigError, PluginError
from agentlightning.plugin.hookspecs import Component, Kind, hookimpl
from agentlightning.plugin.registry import PluginManager
from agentlightning_plugins.commands import plugins as plugins_command
from tests.source import run_python


class Tuned:
    """A component with settings."""

    def __init__(self, *, rate: float = 0.5, label: str = "x", steps: int) -> None:
        self.rate, self.label, self.steps = rate, label, steps


def offering(*components: Component) -> Any:
    @hookimpl
    def components_() -> Iterable[Component]:
        return components

    return SimpleNamespace(components=components_)


def entry_point(module: Path, name: str = "third") -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, module.stem, "agentlightning")


@pytest.fixture
def manager() -> PluginManager:
    manager = PluginManager([])
    manager.register(offering(Component("algorithm", "tuned", f"{__name__}:Tuned")), "mine")
    return manager


def test_a_component_is_created_from_its_name_and_settings(manager: PluginManager) -> None:
    made = manager.create("algorithm", {"name": "tuned", "steps": "3", "rate": 1})
    assert (type(made).__name__, made.steps, made.rate) == ("Tuned", 3, 1.0)


def test_the_error_about_an_unknown_name_suggests_a_similar_one_and_lists_the_installed_names(
    manager: PluginManager,
) -> None:
    with pytest.raises(PluginError, match=r"no algorithm named 'tunde'\. Did you mean 'tuned'\? Installed: tuned\."):
        manager.get("algorithm", "tunde")


def test_the_error_about_an_unknown_setting_suggests_a_similar_one(manager: PluginManager) -> None:
    with pytest.raises(ConfigError, match=r"algorithm 'tuned' has no setting 'rat'\. Did you mean 'rate'\?"):
        manager.create("algorithm", {"name": "tuned", "steps": 1, "rat": 1.0})


def test_the_error_about_a_setting_of_the_wrong_type_names_value_and_reason(manager: PluginManager) -> None:
    with pytest.raises(ConfigError, match=r"algorithm 'tuned': steps = 'many'.*valid integer"):
        manager.create("algorithm", {"name": "tuned", "steps": "many"})


def test_the_error_about_a_missing_setting_names_it(manager: PluginManager) -> None:
    with pytest.raises(ConfigError, match="algorithm 'tuned' needs the setting steps"):
        manager.create("algorithm", "tuned")


def test_a_class_of_the_user_can_be_given_by_its_import_path(
    manager: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_parts.py").write_text(
        "class Tuned:\n    def __init__(self, *, rate: float = 0.0): self.rate = rate\n"
        "def make(*, rate: float): return Tuned(rate=rate)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("own_parts:Tuned", "own_parts.Tuned", "own_parts:make"):
        for key in ("name", "type"):  # the name of this key in release 0.3
            made = manager.create("algorithm", {key: path, "rate": 0.5})
            assert (type(made).__name__, made.rate) == ("Tuned", 0.5)


def test_a_component_name_offered_by_two_plugins_is_an_error_when_it_is_used(manager: PluginManager) -> None:
    manager.register(offering(Component("algorithm", "tuned", "elsewhere:Tuned")), "theirs")
    with pytest.raises(PluginError, match=r"offered by mine .* and theirs"):
        manager.get("algorithm", "tuned")


def test_the_error_about_a_component_that_cannot_be_imported_names_its_plugin(manager: PluginManager) -> None:
    manager.register(offering(Component("store", "gone", "no_such_module:Store")), "other")
    with pytest.raises(PluginError, match=r"store 'gone' of plugin other .*no_such_module"):
        manager.get("store", "gone")


def test_a_plugin_that_fails_to_import_is_reported_and_does_not_stop_other_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no luck')")
    monkeypatch.syspath_prepend(tmp_path)
    manager = PluginManager([entry_point(tmp_path / "broken_plugin.py")])
    assert manager.plugins["third"].state == "broken"
    assert "no luck" in caplog.text
    with pytest.raises(PluginError, match=r"Not loaded: third \(RuntimeError: no luck\)"):
        manager.get("store", "anything")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("@hookimpl\ndef componets():\n    return []", r"no hook 'componets'\. Did you mean 'components'\?"),
        ("@hookimpl\nasync def instrument(tracer_provider):\n    return None", "hook 'instrument' is async"),
        ("@hookimpl\ndef instrument(provider):\n    return None", "provider"),
    ],
)
def test_a_plugin_with_an_invalid_hook_is_broken_with_a_clear_reason(
    source: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / f"wrong_plugin_{abs(hash(source))}.py"
    module.write_text("from agentlightning.plugin.hookspecs import Component, hookimpl\n" + source)
    monkeypatch.syspath_prepend(tmp_path)
    plugin = PluginManager([entry_point(module)]).plugins["third"]
    assert plugin.state == "broken"
    assert re.search(complaint, plugin.error)


def test_a_component_of_an_unknown_kind_is_reported_with_the_kind_that_may_be_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "misspelt.py").write_text(
        "from agentlightning.plugin.hookspecs import Component, hookimpl\n"
        "@hookimpl\ndef components():\n"
        f"    return [Component('stor', 'x', 'y:z'), Component('algorithm', 'tuned', '{__name__}:Tuned')]"
    )
    monkeypatch.syspath_prepend(tmp_path)
    manager = PluginManager([entry_point(tmp_path / "misspelt.py")])
    complaint = r"component 'x' has an unknown kind 'stor'\. Did you mean 'store'\? Kinds: adapter, "
    assert re.search(complaint, manager.plugins["third"].error)
    assert re.search(complaint, caplog.text)
    assert manager.get("algorithm", "tuned").__name__ == "Tuned"
    with pytest.raises(PluginError, match=r"no store named 'x'.*third \(component 'x'"):
        manager.get("store", "x")
    with pytest.raises(PluginError, match=r"unknown kind 'tracr'\. Did you mean 'tracer'\?"):
        manager.get("tracr", "otel")
    with pytest.raises(PluginError, match="unknown kind 'gizmo'"):
        manager.register(offering(Component("gizmo", "x", "y:z")), "mine")
    assert "mine" not in manager.plugins


def test_kinds_that_a_plugin_declares_can_be_offered_by_any_plugin(manager: PluginManager) -> None:
    @hookimpl
    def kinds() -> Iterable[Kind]:
        return [Kind("gizmo", "() -> object", "something of this plugin")]

    manager.register(SimpleNamespace(kinds=kinds), "user")
    manager.register(offering(Component("gizmo", "tuned", f"{__name__}:Tuned")), "maker")
    assert manager.get("gizmo", "tuned").__name__ == "Tuned"


def test_no_hook_of_a_broken_plugin_stays_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_broken.py").write_text(
        "from agentlightning.plugin.hookspecs import hookimpl\n"
        "@hookimpl\ndef add_commands(cli):\n    raise AssertionError\n"
        "@hookimpl\ndef instrument(provider):\n    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    manager = PluginManager([entry_point(tmp_path / "half_broken.py")])
    assert manager.plugins["third"].state == "broken"
    assert manager.hook.add_commands.get_hookimpls() == []


def test_the_same_component_of_two_plugins_is_usable_and_printed_once(
    manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.register(offering(Component("algorithm", "tuned", f"{__name__}:Tuned")), "theirs")
    assert manager.get("algorithm", "tuned").__name__ == "Tuned"
    monkeypatch.setattr(plugins_command, "get_manager", lambda: manager)
    printed = CliRunner().invoke(plugins_command.command).output
    assert printed.count("tuned") == 1


def test_the_metadata_of_a_distribution_is_read_once_for_all_its_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read_text = importlib.metadata.PathDistribution.read_text

    def count(distribution: importlib.metadata.PathDistribution, name: Any) -> str | None:
        reads.append(name)
        return read_text(distribution, name)

    monkeypatch.setattr(importlib.metadata.PathDistribution, "read_text", count)
    manager = PluginManager()
    assert len(manager.plugins) > 40
    assert reads.count("METADATA") <= len({plugin.origin for plugin in manager.plugins.values()})


def test_two_plugins_with_one_name_are_both_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first_of_two", "second_of_two"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    points = [entry_point(tmp_path / "first_of_two.py", "same"), entry_point(tmp_path / "second_of_two.py", "same")]
    states = [(plugin.state, plugin.error) for plugin in PluginManager(points).plugins.values()]
    assert [state for state, _ in states] == ["loaded", "broken"]
    assert "taken by first_of_two" in states[1][1]


def test_a_missing_extra_is_found_without_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> None:
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)

    manager = PluginManager()
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    assert manager.missing_requirements("algorithm", "grpo") == ["torch"]
    with pytest.raises(PluginError, match=r"'grpo' needs torch\. Install with: pip install 'lightning\[grpo\]'"):
        manager.get("algorithm", "grpo")


def test_the_requirements_of_a_component_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = PluginManager()
    found = manager.get("algorithm", "apo")
    looked_up: list[str] = []
    monkeypatch.setattr(importlib.metadata, "distribution", looked_up.append)
    assert manager.missing_requirements("algorithm", "apo") == []
    assert looked_up  # the extra is not empty
    looked_up.clear()
    assert manager.get("algorithm", "apo") is found
    assert looked_up == []


def run_agl(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Runs ``agl`` in this process and returns its exit code."""
    monkeypatch.setattr(cli, "commands", dict(cli.commands))
    monkeypatch.setattr(sys, "argv", ["agl", *arguments])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_agl_plugins_lists_components_and_their_state(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_agl(monkeypatch, "plugins") == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[1] == "baseline")
    assert line.split()[2:4] == ["ready", "lightning"]
    assert line.rstrip().endswith("runs the agent over the data"), "a line is not folded without a terminal"
    assert run_agl(monkeypatch, "plugins", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    offers = {(offer["kind"], offer["name"]) for row in rows for offer in row["offers"]}
    assert {("store", "memory"), ("algorithm", "grpo"), ("tracer", "otel"), ("strategy", "cs")} <= offers


def test_commands_of_plugins_appear_in_agl_and_an_unknown_command_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = run_python("-m", "agentlightning", "--help")
    assert {"plugins", "store", "demo"} <= set(usage.split())
    assert run_agl(monkeypatch, "dmeo") == 2
    assert "No such command 'dmeo'" in capsys.readouterr().err
    assert run_agl(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("agl, version")


def test_dir_lists_names_that_are_imported_on_first_use() -> None:
    found = run_python("-c", "import agentlightning as agl; print(*dir(agl))").split()
    assert {"Trainer", "APO", "LLMProxy", "rollout"} <= set(found)


def test_a_component_may_have_annotations_that_are_not_defined_at_run_time(
    manager: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "typed_parts.py").write_text(
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from openai import AsyncOpenAI\n"
        "class Tuned:\n    def __init__(self, client: AsyncOpenAI | None = None, rate: float = 0.0): self.rate = rate\n"
        "def make(rate: float): return Tuned(rate=rate)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert manager.create("algorithm", {"name": "typed_parts:Tuned", "rate": 0.5}).rate == 0.5
    with pytest.raises(ConfigError, match="rate = 'much'"):
        manager.create("algorithm", {"name": "typed_parts:make", "rate": "much"})


@pytest.mark.parametrize("name", ["part", "factory"])
def test_a_component_can_be_created_by_a_partial_or_a_callable_object(
    name: str, manager: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "callable_parts.py").write_text(
        "import functools\n"
        "class Tuned:\n    def __init__(self, rate: float = 0.0): self.rate = rate\n"
        "class Factory:\n    def __call__(self, rate: float = 0.0): return Tuned(rate)\n"
        "part, factory = functools.partial(Tuned), Factory()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert manager.create("algorithm", {"name": f"callable_parts:{name}", "rate": 0.5}).rate == 0.5


@pytest.mark.parametrize(("body", "exit_code"), [("click.get_current_context().exit(5)", 5), ("42", 0), ("True", 0)])
def test_agl_exits_with_the_exit_code_of_a_plugins_command_and_ignores_its_return_value(
    body: str, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "commands", dict(cli.commands))
    cli.add_command(click.Command("mine", callback=lambda: eval(body)))
    assert run_agl(monkeypatch, "mine") == exit_code
