"""OpenAI Agents SDK: an ``Agent``, with its tools and the agents it hands over to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from agents import (
    Agent,
    Handoff,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    RunResult,
    set_trace_processors,
)
from agents.run_config import CallModelData, ModelInputData
from agents.tracing import FunctionSpanData, Span, Trace, TracingProcessor, get_trace_provider
from agents.tracing.processors import BackendSpanExporter, BatchTraceProcessor
from agents.tracing.span_data import AgentSpanData, GuardrailSpanData, HandoffSpanData
from opentelemetry import trace as otel

from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM
from agentlightning_integrations.framework.agent import FrameworkAgent
from agentlightning_integrations.framework.openai_client import async_client, carry_clients
from agentlightning_integrations.framework.span_tree import (
    AGENT_NAME,
    INPUT,
    OPERATION,
    OUTPUT,
    TOOL_ARGUMENTS,
    TOOL_NAME,
    TOOL_RESULT,
    SpanTree,
    to_text,
)


def wrap_agent(agent: Any, options: WrapOptions) -> OpenAIAgentsAgent | None:
    """See the hook of this name."""
    if not isinstance(agent, Agent):
        return None
    carry_clients()
    return OpenAIAgentsAgent(agent, options)


class OpenAIAgentsAgent(FrameworkAgent[Agent[Any]]):
    """Runs an agent with ``Runner.run``; the output is its ``RunResult``, and ``final_output`` of that the answer.

    The endpoint and the prompts of a rollout are given by the run's configuration, which reaches the agents that are
    handed over to and those that are tools.
    """

    def texts(self) -> Mapping[str, str]:
        """The instructions of each agent, by its name, as ``writer.instructions``."""
        return {
            f"{agent.name}.instructions": agent.instructions
            for agent in _walk(self.agent)
            if isinstance(agent.instructions, str)
        }

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> RunResult:
        """Runs the agent on a text or a list of input items."""

        def tune(data: CallModelData[Any]) -> ModelInputData:
            given = data.model_data
            instructions = texts.get(f"{data.agent.name}.instructions", given.instructions)
            return replace(given, instructions=instructions)

        config = RunConfig(
            call_model_input_filter=tune if texts else None,
            tracing_disabled=not _is_recorded(),
            trace_include_sensitive_data=True,  # it goes to the store and nowhere else
        )
        if llm is None:
            return await Runner.run(self.agent, task, run_config=config)
        async with async_client(llm) as client:
            config.model = OpenAIChatCompletionsModel(llm.model, client)
            config.model_settings = _to_settings(llm.sampling_parameters)
            return await Runner.run(self.agent, task, run_config=config)


def _walk(agent: Agent[Any]) -> Iterator[Agent[Any]]:
    """The agent and all that can be reached from it, each once."""
    seen: set[int] = set()
    waiting = [agent]
    while waiting:
        found = waiting.pop(0)
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        for handoff in found.handoffs:
            other = handoff._agent_ref() if isinstance(handoff, Handoff) and handoff._agent_ref else handoff
            if isinstance(other, Agent):
                waiting.append(other)
        for tool in found.tools:
            inner = getattr(tool, "_agent_instance", None)
            if isinstance(inner, Agent):
                waiting.append(inner)


def _to_settings(parameters: Mapping[str, Any]) -> ModelSettings:
    names = {field.name for field in fields(ModelSettings)}
    known = {name: value for name, value in parameters.items() if name in names}
    others = {name: value for name, value in parameters.items() if name not in known}
    return ModelSettings(**known, extra_args=others or None)


def instrument(tracer_provider: Any) -> Callable[[], None]:
    """Sends the SDK's own tracing to the provider, and nowhere else: it is not uploaded to OpenAI meanwhile."""
    recorder = _Recorder(otel.get_tracer("agentlightning.openai_agents", tracer_provider=tracer_provider))
    before = _processors()
    kept = [processor for processor in before if not _uploads(processor)]
    set_trace_processors([*kept, recorder])

    def undo() -> None:
        added = [processor for processor in _processors() if processor is not recorder and processor not in kept]
        set_trace_processors([*before, *(processor for processor in added if processor not in before)])

    return undo


def _processors() -> list[TracingProcessor]:
    multi = getattr(get_trace_provider(), "_multi_processor", None)
    return list(getattr(multi, "_processors", ()))


def _uploads(processor: TracingProcessor) -> bool:
    return isinstance(processor, BatchTraceProcessor) and isinstance(processor._exporter, BackendSpanExporter)


def _is_recorded() -> bool:
    return any(isinstance(processor, _Recorder) for processor in _processors())


class _Recorder(TracingProcessor):
    """Agents, tools, handoffs and guardrails as spans; model calls are recorded by the client's instrumentation."""

    def __init__(self, tracer: otel.Tracer) -> None:
        self._spans = SpanTree(tracer)

    def on_trace_start(self, trace: Trace) -> None:
        """Not of interest: the attempt has a trace already."""

    def on_trace_end(self, trace: Trace) -> None:
        """See ``on_trace_start``."""

    def on_span_start(self, span: Span[Any]) -> None:
        """Begins our span."""
        data = span.span_data
        if isinstance(data, AgentSpanData):
            attributes = {OPERATION: "invoke_agent", AGENT_NAME: data.name}
            self._spans.begin(span.span_id, f"invoke_agent {data.name}", attributes, span.parent_id)
        elif isinstance(data, FunctionSpanData):
            attributes = {OPERATION: "execute_tool", TOOL_NAME: data.name}
            self._spans.begin(span.span_id, f"execute_tool {data.name}", attributes, span.parent_id)
        elif isinstance(data, HandoffSpanData):
            self._spans.begin(span.span_id, "handoff", {OPERATION: "handoff"}, span.parent_id)
        elif isinstance(data, GuardrailSpanData):
            self._spans.begin(span.span_id, f"guardrail {data.name}", {OPERATION: "guardrail"}, span.parent_id)
        else:
            self._spans.pass_over(span.span_id, span.parent_id)

    def on_span_end(self, span: Span[Any]) -> None:
        """Ends our span, with what is known by now."""
        data = span.span_data
        attributes: dict[str, Any] = {}
        if isinstance(data, FunctionSpanData):
            attributes = {TOOL_ARGUMENTS: to_text(data.input), TOOL_RESULT: to_text(data.output)}
        elif isinstance(data, HandoffSpanData):
            attributes = {INPUT: data.from_agent, OUTPUT: data.to_agent}
        elif isinstance(data, GuardrailSpanData):
            attributes = {"guardrail.triggered": data.triggered}
        error = (
            None if span.error is None else RuntimeError(f"{span.error['message']} {to_text(span.error['data']) or ''}")
        )
        self._spans.end(span.span_id, attributes, error)

    def shutdown(self) -> None:
        """Ends what was left open."""
        self._spans.clear()

    def force_flush(self) -> None:
        """Nothing is held back."""
