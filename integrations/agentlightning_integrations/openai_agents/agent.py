"""OpenAI Agents SDK: an ``Agent``, with its tools and the agents it hands over to."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    Handoff,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunContextWrapper,
    Runner,
    RunResult,
)
from agents.run import AgentRunner, CallModelData, ModelInputData
from agents.tool_context import ToolContext
from agents.tracing import FunctionSpanData, Span, Trace, TracingProcessor, get_trace_provider, set_trace_processors
from agents.tracing.processors import BackendSpanExporter, BatchTraceProcessor
from agents.tracing.span_data import AgentSpanData, GuardrailSpanData, HandoffSpanData
from opentelemetry import trace as otel
from wrapt import wrap_function_wrapper  # type: ignore[import-untyped] # wrapt has no types

from agentlightning import semconv
from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM, hide_secrets
from agentlightning_integrations.shared.agent import FrameworkAgent, by_path, read_input
from agentlightning_integrations.shared.object_copy import walk
from agentlightning_integrations.shared.openai_client import async_client
from agentlightning_integrations.shared.span_tree import (
    INPUT,
    OPERATION,
    OUTPUT,
    TOOL_ARGUMENTS,
    TOOL_RESULT,
    SpanTree,
    to_text,
)


def wrap_agent(agent: Any, options: WrapOptions) -> OpenAIAgentsAgent | None:
    return OpenAIAgentsAgent(agent, options) if isinstance(agent, Agent) else None


class OpenAIAgentsAgent(FrameworkAgent[Agent[Any]]):
    """Runs an agent with ``Runner.run``; the output is its ``RunResult``, with the answer in ``final_output``.

    The endpoint and the prompts of a rollout are set in the run's configuration, which also applies to agents that are
    handed over to or used as tools.
    """

    def texts(self) -> Mapping[str, str | None]:
        """The instructions of each agent by its name, such as ``writer.instructions``."""
        return by_path(
            (f"{agent.name}.instructions", agent.instructions if isinstance(agent.instructions, str) else None)
            for agent in _agents(self.agent)
        )

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> RunResult:
        """Runs the agent on a text or a list of input items."""
        task = read_input(task, "an agent of OpenAI Agents")
        task = task if isinstance(task, list) else to_text(task)

        def set_instructions(data: CallModelData[Any]) -> ModelInputData:
            given = data.model_data
            return replace(given, instructions=texts.get(f"{data.agent.name}.instructions", given.instructions))

        config = RunConfig(
            call_model_input_filter=set_instructions if texts else None,
            tracing_disabled=not any(isinstance(processor, _Recorder) for processor in _processors()),
            trace_include_sensitive_data=True,  # it goes to the store only
        )
        pass_configuration_on()
        token = run_config.set(config)
        try:
            if llm is None:
                return await Runner.run(self.agent, task, run_config=config)
            async with async_client(llm) as client:
                config.model = OpenAIChatCompletionsModel(llm.model, client)
                config.model_settings = _to_settings(llm.sampling_parameters)
                return await Runner.run(self.agent, task, run_config=config)
        finally:
            run_config.reset(token)


def _agents(root: Agent[Any]) -> Iterator[Agent[Any]]:
    """The agent and all agents reachable from it."""
    return (part for part in walk(root, _children) if isinstance(part, Agent))


def _children(part: Any) -> Iterable[Any]:
    if isinstance(part, Agent):
        return part.handoffs, part.tools
    return (agent_behind(part),)


def _to_settings(parameters: Mapping[str, Any]) -> ModelSettings:
    names = {field.name for field in fields(ModelSettings)}
    known = {name: value for name, value in parameters.items() if name in names}
    others = {name: value for name, value in parameters.items() if name not in known}
    return ModelSettings(**known, extra_args=others or None)


def instrument(tracer_provider: Any) -> Callable[[], None]:
    """Sends the SDK's own tracing to the provider, and stops its upload to OpenAI until this is undone."""
    follow_contexts()
    recorder = _Recorder(otel.get_tracer("agentlightning.openai_agents", tracer_provider=tracer_provider))
    before = _processors()
    kept = [processor for processor in before if not _uploads(processor)]
    set_trace_processors([*kept, recorder])

    def undo() -> None:
        added = [processor for processor in _processors() if processor is not recorder and processor not in before]
        set_trace_processors([*before, *added])

    return undo


def _processors() -> list[TracingProcessor]:
    multi = getattr(get_trace_provider(), "_multi_processor", None)
    return list(getattr(multi, "_processors", ()))


def _uploads(processor: TracingProcessor) -> bool:
    return isinstance(processor, BatchTraceProcessor) and isinstance(processor._exporter, BackendSpanExporter)


class _Recorder(TracingProcessor):
    """Agents, tools, handoffs and guardrails as spans; model calls are recorded by the client's instrumentation."""

    def __init__(self, tracer: otel.Tracer) -> None:
        self._spans = SpanTree(tracer)

    def on_trace_start(self, trace: Trace) -> None:
        """Does nothing: the attempt has a trace already."""

    on_trace_end = on_trace_start

    def on_span_start(self, span: Span[Any]) -> None:
        data, key, parent = span.span_data, span.span_id, span.parent_id
        if isinstance(data, AgentSpanData):
            self._spans.begin_agent(key, data.name, parent, attributes=read_context())
        elif isinstance(data, FunctionSpanData):
            self._spans.begin_tool(key, data.name, parent)
        elif isinstance(data, HandoffSpanData):
            self._spans.begin(key, "handoff", {OPERATION: "handoff"}, parent)
        elif isinstance(data, GuardrailSpanData):
            self._spans.begin(key, f"guardrail {data.name}", {OPERATION: "guardrail"}, parent)
        else:
            self._spans.omit(key, parent)

    def on_span_end(self, span: Span[Any]) -> None:
        data = span.span_data
        attributes: dict[str, Any] = {}
        if isinstance(data, FunctionSpanData):
            attributes = {TOOL_ARGUMENTS: to_text(data.input), TOOL_RESULT: to_text(data.output), **read_context()}
        elif isinstance(data, HandoffSpanData):
            attributes = {INPUT: data.from_agent, OUTPUT: data.to_agent}
        elif isinstance(data, GuardrailSpanData):
            attributes = {"guardrail.triggered": data.triggered}
        error = None
        if span.error is not None:
            error = RuntimeError(f"{span.error['message']} {to_text(span.error['data']) or ''}")
        self._spans.end(span.span_id, attributes, error)

    def shutdown(self) -> None:
        self._spans.clear()

    def force_flush(self) -> None:
        """Does nothing: spans are passed on when they end."""


run_context: ContextVar[Any] = ContextVar("agentlightning_openai_agents_context", default=None)
"""The context object that the user gave to the innermost run."""


@functools.cache
def follow_contexts() -> None:
    """Keeps the context of each run for its spans, which do not have it."""

    def run(wrapped: Callable[..., Any], runner: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = kwargs.get("context")
        run_context.set(given.context if isinstance(given, RunContextWrapper) else given)
        return wrapped(*args, **kwargs)

    for name in ("run", "run_streamed"):
        wrap_function_wrapper(AgentRunner, name, run)


def read_context() -> dict[str, str]:
    """Returns the data in the run's context as an attribute: the state of the agent, without secrets and clients."""
    context = run_context.get()
    if isinstance(context, Mapping):
        found = dict(context)
    elif is_dataclass(context):
        found = {field.name: getattr(context, field.name) for field in fields(context)}
    else:
        found = getattr(context, "__dict__", {})
    variables = {}
    for name, value in found.items():
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # not data
            variables[str(name)] = json.loads(json.dumps(value))
    return {semconv.STATE: json.dumps(hide_secrets(variables), ensure_ascii=False)} if variables else {}


run_config: ContextVar[RunConfig | None] = ContextVar("agentlightning_openai_agents_config", default=None)
"""The configuration of the rollout, for runs that tools start."""


def agent_behind(part: Any) -> Any:
    """Returns the agent of a handoff or of a tool, or None; before version 0.8 of the SDK, a closure holds it."""
    if isinstance(part, Handoff):
        reference = getattr(part, "_agent_ref", None)
        return _closed_over(part.on_invoke_handoff, "agent") if reference is None else reference()
    if isinstance(part, FunctionTool) and not hasattr(part, "_agent_instance"):
        return _closed_over(part.on_invoke_tool, "_on_invoke_tool_impl", "the_func", "self")
    return getattr(part, "_agent_instance", None)


def _closed_over(function: Any, *names: str) -> Any:
    """Follows variables of closures, by their names, from function to function."""
    for name in names:
        function = inspect.getclosurevars(function).nonlocals.get(name) if inspect.isfunction(function) else None
    return function


@functools.cache
def pass_configuration_on() -> None:
    """Makes agents used as tools run with the configuration of their rollout, as the SDK does since version 0.8.4."""
    if "run_config" in inspect.signature(ToolContext).parameters:
        return

    def run(wrapped: Callable[..., Any], runner: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **{**kwargs, "run_config": kwargs.get("run_config") or run_config.get()})

    wrap_function_wrapper(AgentRunner, "run", run)
