"""``agl skill``: teaches a coding agent to improve an agent with Lightning."""

from __future__ import annotations

from pathlib import Path

import click

from agentlightning.cli import echo
from agentlightning.errors import ConfigError
from agentlightning.plugin.hookspecs import hookimpl


@click.group("skill")
def skill() -> None:
    """Teach a coding agent to use Lightning."""


@skill.command("install")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
def install(directory: Path) -> None:
    """Write the skill `lightning` to DIRECTORY, where the coding agent looks for skills: a folder with a SKILL.md.

    An older version of it is replaced.
    """
    target = directory / "lightning" / "SKILL.md"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(__file__).with_name("SKILL.md").read_bytes())
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}; choose another directory") from error
    echo(f"Wrote {target}")


@hookimpl
def add_commands(cli: click.Group) -> None:
    cli.add_command(skill)
