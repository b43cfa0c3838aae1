"""Every hook a plugin can implement, in one file. ``docs/plugins.md`` shows each in use.

A plugin is a module named by an entry point of the group ``agentlightning``; its hook implementations carry
``@hookimpl``, take the parameters by the names given here (or fewer) and are synchronous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import pluggy

if TYPE_CHECKING:
    import click

hookspec: Final = pluggy.HookspecMarker("agentlightning")
hookimpl: Final = pluggy.HookimplMarker("agentlightning")

ComponentKind: TypeAlias = Literal[
    "store",
    "server",
    "tracer",
    "adapter",
    "algorithm",
    "strategy",
    "tracker",
    "resource",
    "gateway",
]
COMPONENT_KINDS: Final[tuple[str, ...]] = get_args(ComponentKind)


@dataclass(frozen=True, slots=True)
class Component:
    """Something a plugin offers under a name that users write in code, configuration and error reports."""

    kind: ComponentKind
    name: str
    target: str
    """``"module:attribute"`` of the class, imported only when somebody asks for it."""
    extra: str | None = None
    """The extra of the plugin's distribution that installs what the target imports."""
    summary: str = ""
    """One line for ``agl plugins``."""


@hookspec
def components() -> Iterable[Component]:  # type: ignore[empty-body] # a specification has no body
    """Called once, when the plugin is loaded. Returns what it offers; must not import the targets."""


@hookspec
def instrument(tracer_provider: Any) -> Callable[[], None] | None:
    """Called in each process that traces agents, once for each OpenTelemetry provider, before the first rollout.

    Switches on a library's spans for ``tracer_provider`` and returns a function that undoes exactly this, or None when
    the library is not installed. Must not import the library if it is not.
    """


@hookspec
def add_commands(cli: click.Group) -> None:
    """Called when the ``agl`` command starts. Adds subcommands; their imports belong inside the functions."""
