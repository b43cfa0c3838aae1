"""``agl new`` and ``agl completion``."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path
from typing import Final

import click

from agentlightning.cli import echo
from agentlightning.plugin.hookspecs import hookimpl

_TEMPLATES: Final = Path(__file__).with_name("template")


@click.group("new")
def new() -> None:
    """Create a plugin or an agent from a template."""


@new.command("plugin")
@click.argument("name")
@click.option("--into", type=click.Path(path_type=Path), help="Directory to create; default is the plugin's name.")
def new_plugin(name: str, into: Path | None) -> None:
    """Create a plugin package: a tracker, with a test that installs and uses it."""
    folder = _write("plugin", name, into)
    echo(
        f"Created a working plugin in {folder}. Next:\n\n"
        f"    cd {folder}\n    pip install -e . pytest\n    agl plugins\n    pytest"
    )


@new.command("agent")
@click.argument("name")
@click.option("--into", type=click.Path(path_type=Path), help="Directory to create; default is the agent's name.")
@click.option("--apo", "algorithm", flag_value="apo", help="Add a configuration that tunes a prompt with `apo`.")
@click.option("--grpo", "algorithm", flag_value="grpo", help="Add a configuration that trains weights with `grpo`.")
@click.option("--verl", "algorithm", flag_value="verl", help="Add a configuration that trains weights with `verl`.")
def new_agent(name: str, into: Path | None, algorithm: str | None) -> None:
    """Create an agent with tasks and a configuration, ready to run; by default, it is only measured."""
    layers: dict[str | None, tuple[str, ...]] = {
        None: (),
        "apo": ("apo",),
        "grpo": ("weights", "grpo"),
        "verl": ("weights", "verl"),
    }
    folder = _write("agent", name, into, *layers[algorithm])
    where, install = "", ""
    if algorithm == "verl":
        where = ", in a separate environment (docs/verl.md)"
        install = "    pip install -c constraints/verl.txt '.[verl]'    # in a checkout of Lightning\n"
    elif algorithm is not None:
        install = f"    pip install openai 'lightning[{algorithm}]'\n"
    echo(f"Created a working agent in {folder}. Next{where}:\n\n{install}    cd {folder}\n    agl train config.yaml")


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


def _write(kind: str, name: str, into: Path | None, *layers: str) -> Path:
    """Fills in the template ``kind``, whose files may be replaced by those of ``layers``; returns the directory."""
    if re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) is None:
        raise click.UsageError(f"{name!r}: a name consists of lower-case letters, digits and hyphens, as in my-{kind}")
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise click.UsageError(f"{name!r}: Python uses this name; choose another, as in my-{name}")
    folder = into or Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise click.UsageError(f"{folder} already exists; choose another directory with --into")
    class_name = "".join(part.capitalize() for part in module.split("_"))
    templates: dict[str, Path] = {}
    for layer in (kind, *layers):
        templates |= {str(file.relative_to(_TEMPLATES / layer)): file for file in (_TEMPLATES / layer).rglob("*.in")}
    for path, source in sorted(templates.items()):
        target = folder / path.removesuffix(".in").replace("MODULE", module)
        text = source.read_text(encoding="utf-8")
        for placeholder, value in (("@NAME@", name), ("@MODULE@", module), ("@CLASS@", class_name)):
            text = text.replace(placeholder, value)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return folder


@hookimpl
def add_commands(cli: click.Group) -> None:
    cli.add_command(completion)
    cli.add_command(new)
