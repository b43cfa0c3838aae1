"""Every hook a plugin can implement, in one file. ``docs/plugins.md`` shows each in use.

A plugin is a module named by an entry point of the group ``agentlightning``; its hook implementations carry
``@hookimpl``, take the parameters by the names given here (or fewer) and are synchronous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import pluggy

if TYPE_CHECKING:
    import click

    from agentlightning.event import Event
    from agentlightning.litagent import LitAgent
    from agentlightning.resources import PromptTemplate

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
    "agent",
    "dialect",
    "provider",
    "credit",
    "handler",
    "policy_backend",
    "report",
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


@dataclass(frozen=True, slots=True)
class WrapOptions:
    """What a user said about an object in ``agl.wrap`` that only its integration can carry out."""

    prompts: Mapping[str, str | PromptTemplate | None] = field(default_factory=dict)
    """Which texts of the object are tuned, by path; ``agl.wrap`` says what the values mean."""


@hookspec
def components() -> Iterable[Component]:  # type: ignore[empty-body] # a specification has no body
    """Called once, when the plugin is loaded. Returns what it offers; must not import the targets."""


@hookspec
def instrument(tracer_provider: Any) -> Callable[[], None] | None:
    """Called in each process that traces agents, once for each OpenTelemetry provider, before the first rollout.

    Switches on a library's spans for ``tracer_provider`` and returns a function that undoes exactly this, or None when
    the library is not installed. Must not import the library if it is not.
    """


@hookspec(firstresult=True)
def wrap_agent(agent: Any, options: WrapOptions) -> LitAgent[Any] | None:
    """Called when somebody gives Lightning an object that is neither a function nor a ``LitAgent``.

    Returns the object as an agent, usually a ``FrameworkAgent``, or None when it is not of this plugin's framework; the
    first answer counts. Must not import the framework: an object of it exists only where its module is imported.
    """


@hookspec
def observe(event: Event) -> None:
    """Called in the trainer's process with every event of a run, in order, after what it tells of is durable.

    It is called in the event loop: what takes long belongs in a thread or queue of the plugin's own. An error in it is
    logged, and this plugin is not called again for the run.
    """


@hookspec
def add_commands(cli: click.Group) -> None:
    """Called when the ``agl`` command starts. Adds subcommands; their imports belong inside the functions."""
