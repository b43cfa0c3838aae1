"""All hooks that a plugin can implement. ``docs/plugins.md`` shows each in use.

A plugin is a module named by an entry point of the group ``agentlightning``; its hook implementations carry
``@hookimpl``, take the parameters that are named here (or fewer of them) and are synchronous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    import click

    from agentlightning.event import Event
    from agentlightning.records import Rollout, Run, Span

INTERFACE: Final = 1
"""The number of this plugin interface. A plugin may state the number that it was written for: ``plugin_interface = 1``
in its module. It grows when a plugin that works has to be changed; a plugin for a later number is refused."""

hookspec: Final = pluggy.HookspecMarker("agentlightning")
hookimpl: Final = pluggy.HookimplMarker("agentlightning")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of components. The plugin that uses components of a kind declares it."""

    name: str
    """Unique name, as in ``Component.kind``."""
    expects: str
    """``"module:attribute"`` of the components' class or protocol, or the signature of a function, such as
    ``"(task, output, rollout) -> float"``: each component is checked against it when it is made. Other text is only
    shown."""
    summary: str
    """One line for ``agl plugins``."""


CORE_KINDS: Final = (
    Kind("adapter", "agentlightning.adapter.adapter:TraceAdapter", "converts spans to training data"),
    Kind("agent", "agentlightning.litagent.agent:LitAgent", "an agent that is built from settings"),
    Kind("algorithm", "agentlightning.algorithm.algorithm:Algorithm", "learns from rollouts"),
    Kind("credit", "an object with apply(nodes, calls, triplets, rewards, final)", "assigns rewards to model calls"),
    Kind("dataset", "(source) -> Dataset", "reads tasks; its name is the ending or the prefix of its sources"),
    Kind("environment", "agentlightning.environment:Environment", "what a model acts in; its name begins its address"),
    Kind("gateway", "agentlightning.algorithm.algorithm:Gateway", "records the agents' model calls"),
    Kind("handler", "(tracer_provider) -> object", "a framework's callbacks; Tracer.get_handler makes one"),
    Kind("report", "(store, directory) -> Awaitable[None]", "writes a file when a run with a directory ends"),
    Kind("resource", "agentlightning.resources:Resource", "a type of resource; its name is the resource_type"),
    Kind("reward", "(task, output, rollout) -> float | Awaitable[float]", "rates the output of an agent"),
    Kind("span_reader", "agentlightning.semconv:SpanReader", "reads spans of a library with other conventions"),
    Kind("store", "agentlightning.store.protocol:LightningStore", "a store; its name is the scheme of its URLs"),
    Kind("strategy", "agentlightning.execution.strategy:ExecutionStrategy", "runs the algorithm and its runners"),
    Kind(
        "template_engine",
        "agentlightning.resources:TemplateEngine",
        "renders prompts; its name is PromptTemplate.engine",
    ),
    Kind("tracer", "agentlightning.tracer.tracer:Tracer", "records the agents"),
    Kind("tracker", "agentlightning.run.tracker:Tracker", "receives the events and metrics of a run"),
)


@dataclass(frozen=True, slots=True)
class Component:
    """A class that a plugin offers under a name. Users select it by kind and name; ``agl plugins`` lists it.

    Describing a component is cheap: ``target`` is imported, and the packages of ``extra`` are looked up, on first use.
    The names of Lightning's own components keep their meaning whatever else is installed.

        Component("tracker", "slack", "my_company.slack:SlackTracker", extra="slack", summary="posts to a channel")
    """

    kind: str
    """Name of a ``Kind``."""
    name: str
    """Name for code and configuration: ``Trainer(trackers=["slack"])``; ``slack@distribution`` if several offer it."""
    target: str
    """``"module:attribute"`` of the class, whose constructor takes the component's settings as keyword arguments.

    If the kind is a function: of the function, whose other parameters are settings, or of a class of callable objects.
    """
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
def kinds() -> Iterable[Kind]:  # type: ignore[empty-body] # a specification has no body
    """Called once, when the plugin is loaded. Returns the kinds of components that this plugin uses."""


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
def observe(event: Event, run: Run, directory: Path | None, settings: Any) -> None:
    """Called in the trainer's process with every event of a run, in order, once the event is durable.

    Runs in a thread of the plugin. If it raises, the error is logged and this plugin is not called again for the run.
    Events are lost, and counted in the log, if it is 10,000 events behind or still busy 5 s after the end of the run.

    Args:
        event: what has happened.
        run: the run.
        directory: where the run keeps its files; None if it keeps none.
        settings: an instance of the class ``Settings`` in the plugin's module, made from ``plugin_settings`` of the
            configuration; None if there is no such class, or if settings without a default are not configured.
    """


@hookspec
def observe_rollout(rollout: Rollout, spans: Sequence[Span], run: Run, directory: Path | None, settings: Any) -> None:
    """Called like ``observe`` with each rollout that has finished, and the spans of its latest attempt.

    ``spans`` has what the agent and the gateway have stored by then.
    """


@hookspec
def add_commands(cli: click.Group) -> None:
    """Called when the ``agl`` command starts. Adds subcommands; their imports belong inside the functions."""
