"""``agl new`` and ``agl completion``."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import click

from agentlightning import __version__
from agentlightning.cli import echo
from agentlightning.errors import ConfigError, install_command, suggest
from agentlightning.plugin.hookspecs import INTERFACE
from agentlightning.plugin.registry import get_manager
from agentlightning_plugins.shared.lazy import lazy_commands

_TEMPLATES: Final = Path(__file__).with_name("template")
_EXPORT: Final = "    export OPENAI_BASE_URL=... OPENAI_API_KEY=... OPENAI_MODEL=...\n"


class _Kind(NamedTuple):
    """A template of `agl new plugin --kind`."""

    summary: str
    """One line about the component of the template."""
    usage: str
    """How users select it, in Markdown."""
    component: str = ""
    """The kind of the component if it differs from the name of the template."""
    is_function: bool = False
    dependencies: str = ""
    """As in ``pyproject.toml``."""


def _in_configuration(line: str) -> str:
    return f"A configuration selects it:\n\n    {line}"


PLUGIN_KINDS: Final = {
    "adapter": _Kind("converts spans to messages and a reward", _in_configuration("adapter: @NAME@")),
    "advantage": _Kind(
        "compares rewards with their mean",
        _in_configuration("algorithm: {name: grpo, experience: {estimator: @NAME@}}"),
        is_function=True,
    ),
    "agent": _Kind("adds the numbers of a question", _in_configuration("agent: {name: @NAME@, resource: prompt}")),
    "algorithm": _Kind(
        "publishes the best of several prompts",
        _in_configuration('algorithm: {name: @NAME@, candidates: ["Be brief. {question}"]}'),
    ),
    "command": _Kind("counts rollouts by status", "It adds a command:\n\n    agl @NAME@ --store URL", is_function=True),
    "credit": _Kind(
        "gives the last call the reward and others a share",
        _in_configuration("adapter: {name: triplet, credit: {name: @NAME@, share: 0.5}}"),
    ),
    "dialect": _Kind("an API of one question and one answer", "Agents call the gateway at `/@NAME@/ask`."),
    "environment": _Kind(
        "a game of higher and lower", _in_configuration("environment: @NAME@:100"), dependencies='"openai>=1.109"'
    ),
    "integration": _Kind(
        "runs the agents of a framework",
        "`agl.wrap(agent, reward=...)` and `Trainer.fit(agent)` accept the framework's objects.",
        dependencies='"openai>=1.109"',
    ),
    "loss": _Kind(
        "a soft gate instead of clipping",
        _in_configuration("algorithm: {name: grpo, update: {objective: @NAME@}}"),
        component="policy_loss",
        is_function=True,
        dependencies='"torch"',
    ),
    "provider": _Kind(
        "servers with a header of their own for the key",
        "A model list names it: `{model: m, endpoint: ..., provider: @NAME@}`.",
    ),
    "report": _Kind(
        "lists the failures of a run", "Every run with a directory writes it when it ends.", is_function=True
    ),
    "reward": _Kind(
        "compares words", _in_configuration("agent: {target: agent.py:agent, reward: @NAME@}"), is_function=True
    ),
    "store": _Kind("keeps records in memory", _in_configuration('store: "@NAME@://"')),
    "strategy": _Kind("runs everything in one event loop", _in_configuration("strategy: @NAME@")),
    "template_engine": _Kind(
        "renders $name", 'Prompts select it: `PromptTemplate("Be brief. $question", engine="@NAME@")`.'
    ),
    "tracer": _Kind("records the id of the process", _in_configuration("tracer: @NAME@")),
    "tracker": _Kind("writes metrics to a file", _in_configuration("trackers: [console, @NAME@]")),
}
"""The templates of plugins by name, which the folder ``template/kinds`` has."""


@click.group("new")
def new() -> None:
    """Create a plugin or an agent from a template."""


@new.command("plugin")
@click.argument("name")
@click.option("--kind", default="tracker", show_default=True, help=f"What it offers: {', '.join(PLUGIN_KINDS)}.")
@click.option("--into", type=click.Path(path_type=Path), help="Directory to create; default is the plugin's name.")
@click.pass_context
def new_plugin(context: click.Context, name: str, kind: str, into: Path | None) -> None:
    """Create a plugin: a package with one component that works, its test, and a workflow that runs it."""
    kind = next((name for name, each in PLUGIN_KINDS.items() if each.component == kind), kind)
    if kind not in PLUGIN_KINDS:
        hint = suggest(kind, PLUGIN_KINDS)
        raise click.UsageError(f"--kind {kind!r}: there is no such template.{hint} Kinds: {', '.join(PLUGIN_KINDS)}")
    chosen = PLUGIN_KINDS[kind]
    component = chosen.component or kind
    taken = getattr(context.find_root().command, "commands", {}) if kind == "command" else ()
    if name in (taken or get_manager().components(component)):
        raise click.UsageError(f"{name!r}: there is a {kind} of this name already; choose another, as in my-{name}")
    stem, suffix = _to_class_name(name), _to_class_name(kind)
    if not chosen.is_function:
        stem = stem.removesuffix(suffix) or stem
    values = {
        "USAGE": chosen.usage,  # has placeholders itself
        "KIND": kind,
        "A_KIND": f"{'an' if kind[0] in 'aei' else 'a'} {kind.replace('_', ' ')}",
        "COMPONENT": component,
        "OBJECT": name.replace("-", "_") if chosen.is_function else stem + suffix,
        "STEM": stem,
        "SUMMARY": chosen.summary,
        "DEPENDENCIES": chosen.dependencies,
        "INTERFACE": str(INTERFACE),
        "VERSION": __version__,
    }
    folder = _write("plugin", name, into, f"kinds/{kind}", values=values)
    echo(
        f"Created a plugin with {values['A_KIND']} in {folder}. Next:\n\n"
        f"    cd {folder}\n    pip install -e '.[test]'\n    agl plugins\n    pytest\n\nREADME.md says how to use it."
    )


@new.command("agent")
@click.argument("name")
@click.option("--into", type=click.Path(path_type=Path), help="Directory to create; default is the agent's name.")
@click.option("--apo", "algorithm", flag_value="apo", help="Add a configuration that tunes a prompt with `apo`.")
@click.option("--grpo", "algorithm", flag_value="grpo", help="Add a configuration that trains weights with `grpo`.")
@click.option("--verl", "algorithm", flag_value="verl", help="Add a configuration that trains weights with `verl`.")
@click.option("--preset", metavar="NAME", help="Add a coding agent, such as codex, and programs to repair.")
def new_agent(name: str, into: Path | None, algorithm: str | None, preset: str | None) -> None:
    """Create an agent with tasks and a configuration, ready to run; by default, it is only measured."""
    if preset is not None:
        from agentlightning_plugins.shared.presets.preset import load_preset  # slow to import

        if algorithm is not None:
            raise click.UsageError(
                f"--preset and --{algorithm}: give one of them; the algorithm is named in config.yaml"
            )
        values = {"PRESET": preset, "INSTALL": load_preset(preset).install}
        folder = _write("coding", name, into, values=values)
        echo(
            f"Created tasks for {preset} in {folder}. Next:\n\n    {values['INSTALL']}\n    cd {folder}\n"
            f"{_EXPORT}    agl doctor config.yaml\n"
            "    agl train config.yaml"
        )
        return
    layers = {"apo": ("apo",), "grpo": ("weights", "grpo"), "verl": ("weights", "verl")}
    folder = _write("agent", name, into, *layers.get(algorithm or "", ()))
    where, install = "", ""
    if algorithm == "verl":
        where = ", in a separate environment (docs/verl.md)"
        install = "    pip install -c constraints/verl.txt '.[verl]'    # in a checkout of Lightning\n"
    elif algorithm is not None:
        install = f"    {install_command(algorithm)} openai\n"
    steps = f"{install}    cd {folder}\n{_EXPORT if algorithm == 'apo' else ''}    agl train config.yaml"
    echo(f"Created a working agent in {folder}. Next{where}:\n\n{steps}")


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of `agl` for SHELL.

    \b
    bash:  agl completion bash >> ~/.bashrc
    zsh:   agl completion zsh >> ~/.zshrc
    fish:  agl completion fish > ~/.config/fish/completions/agl.fish
    """  # noqa: D301 # the backspace keeps click from wrapping the lines
    from click.shell_completion import get_completion_class

    cls = get_completion_class(shell)
    assert cls is not None
    echo(cls(context.find_root().command, {}, "agl", "_AGL_COMPLETE").source())


def _to_class_name(name: str) -> str:
    return "".join(part.capitalize() for part in re.split("[-_]", name))


def _write(kind: str, name: str, into: Path | None, *layers: str, values: Mapping[str, str] | None = None) -> Path:
    """Fills in the template ``kind``, after files of ``layers`` have replaced its files; returns the directory.

    ``@NAME@``, ``@MODULE@`` and the names of ``values`` in the files are replaced, in the order of ``values``.
    """
    if re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) is None:
        raise click.UsageError(f"{name!r}: a name consists of lower-case letters, digits and hyphens, as in my-{kind}")
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise click.UsageError(f"{name!r}: Python uses this name; choose another, as in my-{name}")
    folder = into or Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise click.UsageError(f"{folder} already exists; choose another directory with --into")
    templates: dict[str, Path] = {}
    for layer in (kind, *layers):
        templates |= {str(file.relative_to(_TEMPLATES / layer)): file for file in (_TEMPLATES / layer).rglob("*.in")}
    for path, source in sorted(templates.items()):
        target = folder / path.removesuffix(".in").replace("MODULE", module)
        text = source.read_text(encoding="utf-8")
        for placeholder, value in {**(values or {}), "NAME": name, "MODULE": module}.items():
            text = text.replace(f"@{placeholder}@", value)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"{target} cannot be written: {reason}; choose another directory with --into") from error
    return folder


add_commands = lazy_commands(f"{__name__}:completion", f"{__name__}:new")
