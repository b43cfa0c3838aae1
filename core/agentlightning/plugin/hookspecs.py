"""All hooks that a plugin can implement. ``docs/plugins.md`` shows each in use.

A plugin is a module named by an entry point of the group ``agentlightning``; its hook implementations carry
``@hookimpl``, take the parameters that are named here (or fewer of them) and are synchronous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import pluggy

if TYPE_CHECKING:
    import click

    from agentlightning.event import Event

hookspec: Final = pluggy.HookspecMarker("agentlightning")
hookimpl: Final = pluggy.HookimplMarker("agentlightning")

_RunKind: TypeAlias = Literal["store", "server", "tracer", "adapter", "algorithm", "strategy", "tracker"]
_CallKind: TypeAlias = Literal["resource", "template_engine", "gateway", "agent", "dialect", "provider"]
_LearningKind: TypeAlias = Literal["credit", "reward", "handler", "policy_backend", "policy_loss", "advantage"]
_BatchKind: TypeAlias = Literal["aggregation", "schedule", "task_sampler", "rollout_filter", "reward_shaping"]
_ReportKind: TypeAlias = Literal["training_metrics", "report", "pages"]
ComponentKind: TypeAlias = _RunKind | _CallKind | _LearningKind | _BatchKind | _ReportKind
COMPONENT_KINDS: Final[tuple[str, ...]] = tuple(kind for group in get_args(ComponentKind) for kind in get_args(group))


@dataclass(frozen=True, slots=True)
class Component:
    """A class that a plugin offers under a name. Users select it by kind and name; ``agl plugins`` lists it.

    Describing a component is cheap: ``target`` is imported, and the packages of ``extra`` are looked up, on first use.
    Several plugins may offer one target under the same kind and name; different targets raise an error on use.

        Component("tracker", "slack", "my_company.slack:SlackTracker", extra="slack", summary="posts to a channel")
    """

    kind: ComponentKind
    """Kind of the component; ``docs/plugins.md`` says which class each kind expects."""
    name: str
    """Name, unique within the kind, for code and configuration: ``Trainer(trackers=["slack"])``."""
    target: str
    """``"module:attribute"`` of the class, whose constructor takes the component's settings as keyword arguments."""
    extra: str | None = None
    """The extra of the plugin's distribution that installs what the target imports."""
    summary: str = ""
    """One line for ``agl plugins``."""


@dataclass(frozen=True, slots=True)
class WrapOptions:
    """The options of ``agl.wrap`` that only the integration of the framework can apply."""

    prompts: Mapping[str, Any] = field(default_factory=dict)
    """Texts of the object that are tuned, by path. A value is a str, a PromptTemplate or None; see ``agl.wrap``."""


@hookspec
def components() -> Iterable[Component]:  # type: ignore[empty-body] # a specification has no body
    """Called once, when the plugin is loaded. Returns the components it offers; must not import their targets."""


@hookspec
def instrument(tracer_provider: Any) -> Callable[[], None] | None:
    """Called in each process that traces agents, once for each OpenTelemetry provider, before the first rollout.

    Turns on a library's spans for ``tracer_provider`` and returns a function that undoes exactly this, or None when the
    library is not installed. Must not import the library.
    """


@hookspec(firstresult=True)
def wrap_agent(agent: Any, options: WrapOptions) -> Any:
    """Called when ``agl.wrap`` or ``Trainer.fit`` gets an object that is neither a function nor a ``LitAgent``.

    Returns a ``LitAgent`` that runs the object, usually a ``FrameworkAgent``, or None when the object does not belong
    to this plugin's framework; the first ``LitAgent`` wins. Must not import the framework: its objects exist only where
    its module has been imported.
    """


@hookspec
def observe(event: Event) -> None:
    """Called in the trainer's process with every event of a run, in order, once the event is durable.

    Runs in a separate thread. If it raises, the error is logged and this plugin is not called again for the run.
    """


@hookspec
def add_commands(cli: click.Group) -> None:
    """Called when the ``agl`` command starts. Adds subcommands; their imports belong inside the functions."""
