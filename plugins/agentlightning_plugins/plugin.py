"""What the plugin root offers: stores, tracers, gateway, strategies, trackers and commands."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentlightning.hookspecs import Component, hookimpl

if TYPE_CHECKING:
    import click

    from agentlightning.event import Event

_event_logger = logging.getLogger("agentlightning.event")


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
            "store",
            "postgresql",
            f"{root}.postgresql_store:PostgresLightningStore",
            extra="postgresql",
            summary="one database for the processes of many machines",
        ),
        Component(
            "store",
            "postgres",
            f"{root}.postgresql_store:PostgresLightningStore",
            extra="postgresql",
            summary="the same, under its other name",
        ),
        Component(
            "store", "http", f"{root}.store_client:LightningStoreClient", summary="a store served by `agl store`"
        ),
        Component("store", "https", f"{root}.store_client:LightningStoreClient", summary="the same, encrypted"),
        Component("server", "store", f"{root}.store_server:LightningStoreServer", summary="serves a store over HTTP"),
        Component("gateway", "gateway", f"{root}.gateway:LLMProxy", summary="OpenAI-compatible, records every call"),
        *_dialects(f"{root}.gateway"),
        *_providers(f"{root}.gateway"),
        Component("agent", "command", f"{root}.command_agent:CommandAgent", summary="a command line in any language"),
        Component("tracer", "otel", f"{root}.otel_tracer:OtelTracer", summary="OpenTelemetry, the default"),
        Component(
            "tracer",
            "agentops",
            f"{root}.agentops_tracer:AgentOpsTracer",
            extra="agentops",
            summary="AgentOps' instrumentation without its cloud",
        ),
        Component(
            "tracer",
            "openinference",
            f"{root}.openinference_tracer:OpenInferenceTracer",
            extra="openinference",
            summary="OpenInference's instrumentation",
        ),
        Component(
            "tracer", "dummy", "agentlightning.tracer.dummy:DummyTracer", summary="what the agent emits, no more"
        ),
        *_adapters("agentlightning.adapter"),
        *_credit_rules(root),
        Component(
            "strategy", "cs", f"{root}.client_server:ClientServerExecutionStrategy", summary="runners are processes"
        ),
        Component(
            "strategy", "shm", f"{root}.shared_memory:SharedMemoryExecutionStrategy", summary="runners are threads"
        ),
        Component(
            "strategy",
            "ray",
            f"{root}.ray_strategy:RayExecutionStrategy",
            extra="ray",
            summary="runners are Ray actors, on one machine or many",
        ),
        Component("tracker", "console", f"{root}.console_tracker:ConsoleTracker", summary="live at the terminal"),
        Component(
            "tracker", "jsonl", f"{root}.jsonl_tracker:JsonlTracker", summary="metrics.jsonl in the run's directory"
        ),
        *_trackers(root),
    ]


def _adapters(root: str) -> list[Component]:
    return [
        Component("adapter", "triplet", f"{root}.triplet:TraceToTriplet", summary="prompt, response, reward"),
        Component(
            "adapter",
            "llm-proxy-triplet",
            f"{root}.triplet:LlmProxyTraceToTriplet",
            summary="the same, of what the gateway saw",
        ),
        Component("adapter", "messages", f"{root}.message:TraceToMessages", summary="chat histories with tools"),
        Component("adapter", "transition", f"{root}.transition:TraceToTransitions", summary="state, action, reward"),
        Component(
            "adapter", "trajectory", f"{root}.trajectory:TraceToTrajectories", summary="tokens with masks, calls joined"
        ),
    ]


def _credit_rules(root: str) -> list[Component]:
    return [
        Component("credit", "identical", f"{root}.credit:IdenticalCredit", summary="the final reward for all calls"),
        Component("credit", "nearest", f"{root}.credit:NearestCredit", summary="rewards of the nearest call"),
        Component("credit", "discounted", f"{root}.credit:DiscountedCredit", summary="discounted return-to-go"),
        Component(
            "credit",
            "intermediate",
            f"{root}.intermediate_credit:IntermediateCredit",
            summary="tools, invalid outputs and retries count",
        ),
    ]


def _trackers(root: str) -> list[Component]:
    return [
        Component(
            "tracker", "tensorboard", f"{root}.tensorboard_tracker:TensorBoardTracker", "tensorboard", "event files"
        ),
        Component("tracker", "wandb", f"{root}.wandb_tracker:WandbTracker", "wandb", "Weights & Biases"),
        Component(
            "tracker", "mlflow", f"{root}.mlflow_tracker:MlflowTracker", "mlflow", "a server or a local database"
        ),
        Component("tracker", "trackio", f"{root}.trackio_tracker:TrackioTracker", "trackio", "a local dashboard"),
    ]


def _dialects(root: str) -> list[Component]:
    return [
        Component("dialect", "openai-chat", f"{root}.openai_dialect:ChatCompletions", summary="Chat Completions"),
        Component("dialect", "openai-completions", f"{root}.openai_dialect:Completions", summary="Completions"),
        Component("dialect", "openai-embeddings", f"{root}.embedding_dialect:Embeddings", summary="Embeddings"),
        Component("dialect", "openai-responses", f"{root}.responses_dialect:Responses", summary="Responses"),
        Component("dialect", "anthropic-messages", f"{root}.messages_dialect:Messages", summary="Anthropic Messages"),
        Component(
            "dialect", "anthropic-count-tokens", f"{root}.messages_dialect:CountTokens", summary="tokens of Messages"
        ),
    ]


def _providers(root: str) -> list[Component]:
    return [
        Component("provider", "openai-compatible", f"{root}.provider:OpenAICompatible", summary="the default"),
        Component("provider", "vllm", f"{root}.provider:VLLM", summary="vLLM, with token ids"),
        Component("provider", "openai", f"{root}.provider:OpenAI", summary="OpenAI itself"),
        Component("provider", "anthropic", f"{root}.provider:Anthropic", summary="Anthropic itself"),
        Component(
            "provider", "litellm", f"{root}.litellm_provider:LiteLLM", extra="litellm", summary="any that litellm knows"
        ),
    ]


@hookimpl
def observe(event: Event) -> None:
    if _event_logger.isEnabledFor(logging.DEBUG):
        _event_logger.debug("%s", event)


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_plugins.store_command import command

    cli.add_command(command)
    from agentlightning_plugins.doctor.command import command as doctor_command

    cli.add_command(doctor_command)
    from agentlightning_plugins.gateway_command import command as gateway_command

    cli.add_command(gateway_command)
    from agentlightning_plugins.inspection.ab import compare as ab_command
    from agentlightning_plugins.inspection.replay import command as replay_command
    from agentlightning_plugins.inspection.resources import resources
    from agentlightning_plugins.inspection.rollouts import rollouts
    from agentlightning_plugins.inspection.spans import spans
    from agentlightning_plugins.inspection.workers import workers
    from agentlightning_plugins.scaffold.command import completion, new
    from agentlightning_plugins.train.command import command as train_command
    from agentlightning_plugins.train.command import config_command
    from agentlightning_plugins.train.compare_command import command as compare_command
    from agentlightning_plugins.train.eval_command import command as eval_command
    from agentlightning_plugins.train.report_command import command as report_command
    from agentlightning_plugins.train.runner_command import command as runner_command

    cli.add_command(ab_command)
    cli.add_command(replay_command)
    cli.add_command(new)
    cli.add_command(completion)
    for group in (rollouts, spans, resources, workers):
        cli.add_command(group)
    cli.add_command(compare_command)
    cli.add_command(eval_command)
    cli.add_command(report_command)
    cli.add_command(runner_command)
    cli.add_command(train_command)
    cli.add_command(config_command)
