"""What the plugin root offers: stores, tracers, gateway, strategies, trackers and commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from agentlightning.hookspecs import Component, hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def components() -> Iterable[Component]:
    root = "agentlightning_plugins"
    return [
        Component(
            "store",
            "memory",
            f"{root}.memory_store:InMemoryLightningStore",
            summary="in this process, for tests and runs",
        ),
        Component(
            "store",
            "sqlite",
            f"{root}.sqlite_store:SqliteLightningStore",
            summary="one durable file, shared by the processes of a machine",
        ),
        Component(
            "store", "http", f"{root}.store_client:LightningStoreClient", summary="a store served by `agl store`"
        ),
        Component("store", "https", f"{root}.store_client:LightningStoreClient", summary="the same, encrypted"),
        Component("server", "store", f"{root}.store_server:LightningStoreServer", summary="serves a store over HTTP"),
        Component("gateway", "gateway", f"{root}.gateway:LLMProxy", summary="OpenAI-compatible, records every call"),
        Component("tracer", "otel", f"{root}.otel_tracer:OtelTracer", summary="OpenTelemetry, the default"),
        Component(
            "tracer", "dummy", "agentlightning.tracer.dummy:DummyTracer", summary="what the agent emits, no more"
        ),
        Component(
            "adapter", "triplet", "agentlightning.adapter.triplet:TraceToTriplet", summary="prompt, response, reward"
        ),
        Component(
            "strategy", "cs", f"{root}.client_server:ClientServerExecutionStrategy", summary="runners are processes"
        ),
        Component(
            "strategy", "shm", f"{root}.shared_memory:SharedMemoryExecutionStrategy", summary="runners are threads"
        ),
        Component("tracker", "console", f"{root}.console_tracker:ConsoleTracker", summary="live at the terminal"),
        Component(
            "tracker", "jsonl", f"{root}.jsonl_tracker:JsonlTracker", summary="metrics.jsonl in the run's directory"
        ),
    ]


@hookimpl
def instrument(tracer_provider: Any) -> Callable[[], None] | None:
    from agentlightning_plugins.openai_instrument import instrument as instrument_openai

    return instrument_openai(tracer_provider)


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_plugins.store_command import command

    cli.add_command(command)
