from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import click
import pytest
from click.testing import CliRunner

from agentlightning import semconv
from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.cli import cli, main
from agentlightning.errors import ConfigError, PluginError, install_command
from agentlightning.plugin.hookspecs import Component, Kind, hookimpl
from agentlightning.plugin.registry import PluginManager
from agentlightning.types import Span
from agentlightning_plugins.commands import plugins as plugins_command
from tests.source import run_python


class Tuned(Algorithm):
    """A component with settings."""

    def __init__(self, *, rate: float = 0.5, label: str = "x", steps: int) -> None:
        self.rate, self.label, self.steps = rate, label, steps


class Other(Tuned):
    """Another component of the same name."""


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
        "from agentlightning import Algorithm\n"
        "class Tuned(Algorithm):\n    def __init__(self, *, rate: float = 0.0): self.rate = rate\n"
        "def make(*, rate: float): return Tuned(rate=rate)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("own_parts:Tuned", "own_parts.Tuned", "own_parts:make"):
        for key in ("name", "type"):  # the name of this key in release 0.3
            made = manager.create("algorithm", {key: path, "rate": 0.5})
            assert (type(made).__name__, made.rate) == ("Tuned", 0.5)


def test_a_component_name_offered_by_two_plugins_is_an_error_when_it_is_used(manager: PluginManager) -> None:
    manager.register(offering(Component("algorithm", "tuned", f"{__name__}:Other")), "theirs")
    with pytest.raises(PluginError, match=r"offered by mine .* and theirs .*; write 'tuned@mine' or 'tuned@theirs'"):
        manager.get("algorithm", "tuned")
    assert manager.get("algorithm", "tuned@theirs") is Other
    assert list(manager.components("algorithm")) == ["tuned@mine", "tuned@theirs"]


def test_the_error_about_a_component_that_cannot_be_imported_names_its_plugin(manager: PluginManager) -> None:
    manager.register(offering(Component("store", "gone", f"{__name__}:Gone")), "other")
    with pytest.raises(PluginError, match=r"store 'gone' of plugin other .*has no attribute 'Gone'"):
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
        ("@hookimpl\ndef observe(event=None):\n    pass", "hook 'observe' has a default for 'event'"),
        ("def observe(event):\n    pass", "'observe' is the name of a hook, .* not decorated with @hookimpl"),
        ("@hookimpl\ndef components():\n    return ['x']", "returned 'x', which is no Component"),
        ("plugin_interface = 99", "written for plugin interface 99"),
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
    assert "declares this name for first_of_two too" in states[1][1]


def install(folder: Path, name: str, source: str, *, metadata: str = "", entry_point: str = "") -> None:
    """Installs a distribution with one module, ``<name>_plugin``, into a folder of ``sys.path``."""
    sys.modules.pop(f"{name}_plugin", None)  # of another test
    (folder / f"{name}_plugin.py").write_text(
        "from agentlightning import Algorithm, Component, hookimpl\n"
        f"class Tuned(Algorithm):\n    origin = {name!r}\n"
        "def offer(*components):\n"
        "    return hookimpl(lambda: [Component(*component) for component in components])\n" + source
    )
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{metadata}")
    (info / "entry_points.txt").write_text(f"[agentlightning]\n{entry_point or name} = {name}_plugin\n")


def test_no_installed_package_changes_what_a_built_in_name_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        "intruder",
        "T = 'intruder_plugin:Tuned'\ncomponents = offer(('store', 'memory', T), ('tracker', 'mine', T))",
        entry_point="stores.memory",
    )
    for first in (True, False):  # in whatever order the packages are found
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path] if first else [*sys.path, str(tmp_path)])
        manager = PluginManager()
        assert manager.get("store", "memory") is PluginManager([]).get("store", "agentlightning:InMemoryLightningStore")
        assert manager.get("tracker", "mine").origin == "intruder"
        assert manager.get("store", "memory@Intruder").origin == "intruder"
        assert {"memory", "memory@intruder"} <= manager.components("store").keys()
        states = {name: plugin.state for name, plugin in manager.plugins.items() if "stores.memory" in name}
        assert states == {"stores.memory@lightning": "loaded", "stores.memory@intruder": "loaded"}


def test_two_packages_that_offer_one_name_are_both_listed_and_selected_by_their_full_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("acme", "zeta"):
        install(tmp_path, name, f"components = offer(('algorithm', 'tuned', '{name}_plugin:Tuned'))")
    manager = PluginManager()
    with pytest.raises(PluginError, match=r"write 'tuned@acme' or 'tuned@zeta'"):
        manager.create("algorithm", "tuned")
    assert manager.create("algorithm", {"name": "tuned@zeta"}).origin == "zeta"
    monkeypatch.setattr(plugins_command, "get_manager", lambda: manager)
    printed = CliRunner().invoke(plugins_command.command).output
    assert "tuned@acme" in printed
    assert "tuned@zeta" in printed
    with pytest.raises(PluginError, match=r"no algorithm named 'tuned@acne'\. Did you mean 'tuned@acme'\?"):
        manager.get("algorithm", "tuned@acne")


@pytest.mark.parametrize("name", ["acme", "noisy", "noisy@acme"])
def test_a_plugin_can_be_switched_off_without_uninstalling_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "acme", "raise AssertionError('imported')", entry_point="noisy")
    monkeypatch.setenv("AGL_DISABLED_PLUGINS", f"{name}, trackers.console")
    manager = PluginManager()
    assert manager.plugins["noisy@acme"].state == "off"
    assert manager.plugins["trackers.console@lightning"].state == "off"
    with pytest.raises(PluginError, match=r"no tracker named 'console'.*console@lightning \(switched off by AGL_DIS"):
        manager.get("tracker", "console")


def test_a_loaded_plugin_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_DISABLED_PLUGINS", "")
    manager = PluginManager()
    with pytest.raises(PluginError, match="called 'trackers.consol'. Did you mean 'trackers.console'"):
        manager.disable(["trackers.consol"])
    manager.disable(["trackers.console", "integrations.openai"])
    assert "console" not in manager.components("tracker")
    hooks = [each.plugin_name for each in manager.hook.instrument.get_hookimpls()]
    assert "integrations.openai@lightning" not in hooks
    with pytest.raises(PluginError, match="console@lightning .switched off by the configuration"):
        manager.get("tracker", "console")
    assert PluginManager().plugins["trackers.console@lightning"].state == "off"  # as in a process started now


def test_a_switch_that_names_no_plugin_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AGL_DISABLED_PLUGINS", "trackers.consol")
    PluginManager()
    assert "'trackers.consol', which is not installed. Did you mean 'trackers.console'?" in caplog.text


@pytest.mark.parametrize(
    ("requirement", "complaint"),
    [
        ("lightning>=9", r"it needs lightning>=9, and .* is installed"),
        ("lightning[warp]", r"it needs lightning\[warp\], and lightning .* has no such extra"),
    ],
)
def test_a_plugin_for_another_version_is_refused_and_not_imported(
    requirement: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "acme", "raise AssertionError('imported')", metadata=f"Requires-Dist: {requirement}\n")
    plugin = PluginManager().plugins["acme"]
    assert plugin.state == "refused"
    assert re.match(complaint, plugin.error)


@pytest.mark.parametrize(
    ("offer", "complaint"),
    [
        ("('tracker', 'x', 'acme_plugin.Tuned')", "a target 'acme_plugin.Tuned'; write 'module:attribute'"),
        ("('tracker', 'x', 'acme_plugin.parts:X')", "there is no module 'acme_plugin.parts'"),
        ("('tracker', 'x', 'acme_plugin:Tuned', 'nosuch')", "an extra 'nosuch', which acme 1.0 does not declare"),
    ],
)
def test_a_component_that_cannot_work_is_reported_when_its_plugin_is_loaded(
    offer: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "acme", f"components = offer({offer}, ('algorithm', 'tuned', 'acme_plugin:Tuned'))")
    manager = PluginManager()
    assert complaint in manager.plugins["acme"].error
    with pytest.raises(PluginError, match=re.escape(complaint)):
        manager.get("tracker", "x")
    assert manager.get("algorithm", "tuned").origin == "acme"


def test_an_installed_requirement_of_another_version_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(
        tmp_path,
        "acme",
        "components = offer(('algorithm', 'tuned', 'acme_plugin:Tuned', 'new'))",
        metadata="Provides-Extra: new\nRequires-Dist: pluggy>=99; extra == 'new'\n",
    )
    with pytest.raises(
        PluginError, match=r"needs pluggy>=99 \(.* is installed\)\. Install with: (uv )?pip install 'acme\[new"
    ):
        PluginManager().get("algorithm", "tuned")


OWN_PLUGIN = """
from agentlightning import Component, hookimpl

class Shout:
    def start(self, run, directory): ...
    def on_event(self, event): ...
    def close(self): ...

@hookimpl
def components():
    return [Component("tracker", "shout", f"{__name__}:Shout")]
"""


@pytest.mark.parametrize("path", ["own_shout.py", "own_pack/__init__.py"])
def test_a_file_is_a_plugin_here_and_in_processes_that_start_later(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("AGL_PLUGINS", "")
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(OWN_PLUGIN)
    given = file if file.parent == tmp_path else file.parent
    manager = PluginManager()
    manager.load_files([given])
    manager.load_files([given])  # twice does no harm
    assert type(manager.create("tracker", "shout")).__module__ == given.stem
    code = "from agentlightning.plugin.registry import get_manager as m; print(m().create('tracker', 'shout'))"
    assert f"{given.stem}.Shout" in run_python("-c", code)


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("missing.py", None, "there is no file .*missing.py; give a file"),
        ("json.py", "", r"its name 'json' is taken by the module .*; rename the file"),
        ("own_error.py", "1 / 0", "ZeroDivisionError"),
        ("own_typo.py", OWN_PLUGIN.replace("__name__}:Shout", "__name__}.Shout"), "write 'module"),
    ],
)
def test_a_file_that_is_no_plugin_is_refused(
    name: str, source: str | None, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("AGL_PLUGINS", "")
    if source is not None:
        (tmp_path / name).write_text(source)
    with pytest.raises(PluginError, match=complaint):
        PluginManager().load_files([tmp_path / name])


def scaled(progress: float, *, factor: float = 1.0) -> float:
    return progress * factor


def twice(progress: float) -> float:
    return progress * 2


class Stepped:
    def __init__(self, *, at: float) -> None:
        self.at = at

    def __call__(self, progress: float) -> float:
        return float(progress < self.at)


def test_a_component_that_is_a_function_has_settings(manager: PluginManager) -> None:
    @hookimpl
    def kinds() -> Iterable[Kind]:
        return [Kind("curve", "(progress: float) -> float", "a curve"), Kind("pair", "(a, *, b) -> int", "two")]

    names = {"curve": ("scaled", "twice", "Stepped", "Tuned"), "pair": ("scaled",)}
    offers = [Component(kind, name, f"{__name__}:{name}") for kind in names for name in names[kind]]
    manager.register(SimpleNamespace(kinds=kinds, components=offering(*offers).components), "curves")
    assert manager.create("curve", "twice") is twice
    assert manager.create("curve", "scaled")(0.5) == 0.5
    assert manager.create("curve", {"name": "scaled", "factor": 3})(0.5) == 1.5
    assert manager.create("curve", {"name": "Stepped", "at": 0.7})(0.5) == 1.0
    with pytest.raises(ConfigError, match=r"curve 'scaled' has no setting 'factr'\. Did you mean 'factor'\?"):
        manager.check("curve", {"name": "scaled", "factr": 3})
    with pytest.raises(PluginError, match=r"'Tuned' .* is not callable; a curve is called with \(progress\)"):
        manager.create("curve", {"name": "Tuned", "steps": 1})
    with pytest.raises(ConfigError, match=r"pair 'scaled'.* called with \(a, \*, b\), and takes \(progress"):
        manager.check("pair", "scaled")


def test_what_a_plugin_makes_must_be_of_its_kind(manager: PluginManager) -> None:
    names = ("store", "tracer", "adapter", "strategy", "tracker")
    manager.register(offering(*[Component(kind, "tuned", f"{__name__}:Tuned") for kind in names]), "wrong")
    for kind in names:
        with pytest.raises(PluginError, match=rf"the {kind} 'tuned' of plugin wrong .* is a Tuned (and no|without) "):
            manager.create(kind, {"name": "tuned", "steps": 1})


def test_a_missing_extra_is_found_without_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> None:
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)

    manager = PluginManager()
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    assert manager.missing_requirements("algorithm", "grpo") == ["torch"]
    with pytest.raises(PluginError, match=re.escape(f"'grpo' needs torch. Install with: {install_command('grpo')}")):
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
        "from agentlightning import Algorithm\n"
        "class Tuned(Algorithm):\n"
        "    def __init__(self, client: AsyncOpenAI | None = None, rate: float = 0.0): self.rate = rate\n"
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
        "from agentlightning import Algorithm\n"
        "class Tuned(Algorithm):\n    def __init__(self, rate: float = 0.0): self.rate = rate\n"
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


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'lightning[grpo]'"),
        ('{"url": "file:///srv/own", "dir_info": {"editable": true}}', "pip install -e '/srv/own[grpo]'"),
        ('{"url": "file:///srv/own", "dir_info": {}}', "pip install '/srv/own[grpo]'"),
        ('{"url": "file:///tmp/a.whl", "archive_info": {}}', "pip install 'lightning[grpo] @ file:///tmp/a.whl'"),
    ],
    ids=["index", "checkout", "folder", "wheel"],
)
def test_a_hint_installs_from_where_the_package_came(
    monkeypatch: pytest.MonkeyPatch, origin: str | None, command: str
) -> None:
    found = Mock(read_text=lambda file: origin)
    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", lambda name: found)
    for has_pip, shown in ((True, command), (False, f"uv {command}")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, has_pip=has_pip: found if has_pip else None)
        assert install_command("grpo") == shown


def test_a_span_reader_that_cannot_be_imported_is_left_out_with_one_warning(
    manager: PluginManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, target in (("broken", f"{__name__}:MISSING"), ("good", f"{__name__}:READER")):
        manager.register(offering(Component("span_reader", name, target)), name)
    monkeypatch.setattr(semconv, "get_manager", lambda: manager)
    span = Span.from_attributes(attributes={"model_of_acme": "m"})
    found = [semconv.read_attribute(span, semconv.GEN_AI_REQUEST_MODEL) for _ in range(3)]
    assert found == ["m"] * 3
    assert [record.getMessage().count("span_reader 'broken'") for record in caplog.records] == [1]


READER = {semconv.GEN_AI_REQUEST_MODEL: lambda span: span.attributes.get("model_of_acme")}


def test_a_component_is_found_by_a_name_of_its_plugin_with_an_underscore(manager: PluginManager) -> None:
    manager.register(offering(Component("algorithm", "tuned", f"{__name__}:Other")), "my_plugin")
    assert manager.get("algorithm", "tuned@my_plugin") is Other
    assert [manager.missing_requirements("algorithm", each) for each in ("tuned@my_plugin", "tuned@mine")] == [[], []]
