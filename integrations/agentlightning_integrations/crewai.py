"""CrewAI: crews and agents."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias, TypeVar

from crewai import Agent, Crew, Flow
from crewai.crews import CrewOutput
from crewai.events.base_events import BaseEvent
from crewai.events.event_bus import CrewAIEventsBus
from crewai.events.listeners.tracing import utils as tracing_module
from crewai.events.types.agent_events import (
    AgentExecutionCompletedEvent,
    AgentExecutionErrorEvent,
    AgentExecutionStartedEvent,
    LiteAgentExecutionCompletedEvent,
    LiteAgentExecutionErrorEvent,
    LiteAgentExecutionStartedEvent,
)
from crewai.events.types.tool_usage_events import ToolUsageErrorEvent, ToolUsageFinishedEvent, ToolUsageStartedEvent
from crewai.events.utils import console_formatter as console_module
from crewai.lite_agent_output import LiteAgentOutput
from crewai.llms.providers.openai.completion import OpenAICompletion
from openai import AsyncOpenAI
from opentelemetry import trace as otel

from agentlightning.errors import ConfigError
from agentlightning.hookspecs import WrapOptions
from agentlightning.litagent import FrameworkAgent
from agentlightning.resources import LLM
from agentlightning.tracer.tracer import get_active_trace
from agentlightning_integrations.openai_client import carry_clients, optional_client
from agentlightning_integrations.span_tree import (
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

Runnable: TypeAlias = Crew | Agent
A = TypeVar("A")

_AGENT_TEXTS: Final = ("role", "goal", "backstory")
_TASK_TEXTS: Final = ("description", "expected_output")
_AGENT_MODELS: Final = ("llm", "function_calling_llm")
_KEPT_SETTINGS: Final = ("temperature", "top_p", "max_tokens", "stop", "seed")
_CREW_MODELS: Final = ("manager_llm", "function_calling_llm", "planning_llm", "chat_llm")


def wrap_agent(agent: Any, options: WrapOptions) -> CrewAIAgent | None:
    """See the hook of this name."""
    if isinstance(agent, Flow):
        raise ConfigError(
            "a CrewAI Flow makes its agents in its methods, where nobody can give them the rollout's model; run it in "
            "a function with @agl.rollout, whose parameter llm is for crewai.LLM(llm.model, base_url=llm.endpoint, "
            "api_key=llm.api_key)"
        )
    if not isinstance(agent, (Crew, Agent)):
        return None
    carry_clients()
    _stay_home()
    return CrewAIAgent(agent, options)


class CrewAIAgent(FrameworkAgent[Runnable]):
    """Runs a copy of a crew or agent; the output is its ``CrewOutput`` or ``LiteAgentOutput``.

    A crew takes a task that has fields as its inputs, any other as the input ``task``. Every rollout has agents and
    tasks of its own; tools, memory and knowledge are shared by all rollouts.
    """

    def texts(self) -> Mapping[str, str]:
        """Of agents by their role: ``writer.role``, ``.goal``, ``.backstory``; of tasks by their name or number.

        A task is ``draft.description`` if it has the name ``draft``, else ``task_1.description``.
        """
        return {
            f"{name}.{label}": getattr(part, label)
            for name, part, labels in _named_parts(self.agent)
            for label in labels
            if isinstance(getattr(part, label), str)
        }

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> CrewOutput | LiteAgentOutput:
        """Runs the copy on a task."""
        result: Any
        async with optional_client(llm) as client:
            copied = _copy(self.agent, llm, client)
            for name, part, labels in _named_parts(copied):
                for label in labels:
                    setattr(part, label, texts.get(f"{name}.{label}", getattr(part, label)))
            with _quietly(copied.verbose):
                if isinstance(copied, Agent):
                    result = await copied.akickoff(task if isinstance(task, (str, list)) else to_text(task) or "")
                else:
                    result = await copied.akickoff(inputs=dict(task) if isinstance(task, Mapping) else {"task": task})
        return result  # type: ignore[no-any-return] # no stream: copies do not stream


def _named_parts(root: Runnable) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """The agents and tasks with their names and the attributes that hold their texts."""
    if isinstance(root, Agent):
        yield root.role.strip(), root, _AGENT_TEXTS
        return
    manager = [] if root.manager_agent is None else [root.manager_agent]
    for agent in [*root.agents, *manager]:
        yield agent.role.strip(), agent, _AGENT_TEXTS
    for number, task in enumerate(root.tasks, start=1):
        yield task.name or f"task_{number}", task, _TASK_TEXTS


def _copy(root: Runnable, llm: LLM | None, client: AsyncOpenAI | None) -> Runnable:
    """CrewAI's own copy, with models that call the rollout's endpoint."""
    if isinstance(root, Agent):
        return _copy_agent(root, root.copy(), llm, client)
    models = {name: vars(root).get(name) for name in _CREW_MODELS}
    bare = root.model_copy(update=dict.fromkeys(_CREW_MODELS[1:]))  # copying a crew makes dicts of these
    copied = bare.copy()
    copied.stream = copied.tracing = False
    for name, model in models.items():
        if model is not None:
            setattr(copied, name, _redirect(model, llm, client))
    for agent, made in zip(root.agents, copied.agents, strict=True):
        _copy_agent(agent, made, llm, client)
    if root.manager_agent is not None and copied.manager_agent is not None:
        _copy_agent(root.manager_agent, copied.manager_agent, llm, client)
    return copied


def _copy_agent(agent: Any, copied: A, llm: LLM | None, client: AsyncOpenAI | None) -> A:
    for name in _AGENT_MODELS:
        model = vars(agent).get(name)  # asked as an attribute, a deprecated one warns
        if model is not None:
            setattr(copied, name, _redirect(model, llm, client))
    return copied


def _redirect(model: Any, llm: LLM | None, client: AsyncOpenAI | None) -> Any:
    """The same model settings for another endpoint and model; a model may be no more than its name."""
    if llm is None or client is None:
        return model
    known = {name: value for name, value in llm.sampling_parameters.items() if name in OpenAICompletion.model_fields}
    others = {name: value for name, value in llm.sampling_parameters.items() if name not in known}
    settings = {
        **known,
        "model": llm.model,
        "base_url": llm.get_base_url(),
        "api_key": llm.api_key or "unused",
        "custom_openai": True,  # that it is no server of OpenAI's, which answers other questions too
        "api": "completions",
        "is_o1_model": False,
        "is_gpt4_model": False,
    }
    if isinstance(model, OpenAICompletion):
        copied = model.model_copy(update={**settings, "additional_params": {**model.additional_params, **others}})
    else:
        kept = {name: getattr(model, name) for name in _KEPT_SETTINGS if getattr(model, name, None) is not None}
        copied = OpenAICompletion(**{**kept, **settings, "additional_params": others})
    copied._async_client = client
    copied._client = None  # made on first use, where somebody does not await
    return copied


@contextlib.contextmanager
def _quietly(is_verbose: bool) -> Iterator[None]:
    """Keeps CrewAI from offering to upload traces, looking for new versions and printing, in this context alone."""
    tokens: list[Any] = [
        tracing_module.set_tracing_enabled(False),
        tracing_module._first_time_trace_hook.set(lambda: False),
        tracing_module.set_suppress_tracing_messages(True),
        console_module.set_suppress_console_output(not is_verbose),
        console_module._disable_version_check.set(True),
    ]
    try:
        yield
    finally:
        for token in reversed(tokens):
            token.var.reset(token)


def _stay_home() -> None:
    """Switches anonymous usage reports off, here and in processes that we start. They are sent unless this is set."""
    os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")


def instrument(tracer_provider: Any) -> Callable[[], None]:
    """Makes spans of the events of agents and tools; model calls are recorded by their client's instrumentation.

    Handlers of the event bus run in other threads, where no span can be made active for the agent. So the bus itself is
    listened to, in the thread that emits.
    """
    _stay_home()
    recorder = _Recorder(otel.get_tracer("agentlightning.crewai", tracer_provider=tracer_provider))
    original = CrewAIEventsBus.emit

    def emit(self: CrewAIEventsBus, source: Any, event: BaseEvent) -> Any:
        result = original(self, source, event)  # gives the event its place among the others
        if get_active_trace() is not None:
            recorder.record(event)
        return result

    bus: Any = CrewAIEventsBus
    bus.emit = emit

    def undo() -> None:
        if bus.emit is emit:  # else somebody has wrapped it since
            bus.emit = original
        recorder.clear()

    return undo


class _Recorder:
    """Agents and tools as spans."""

    def __init__(self, tracer: otel.Tracer) -> None:
        self._spans = SpanTree(tracer)

    def clear(self) -> None:
        """Ends what was left open."""
        self._spans.clear()

    def record(self, event: BaseEvent) -> None:
        """Begins or ends a span."""
        parent = event.parent_event_id
        match event:
            case AgentExecutionStartedEvent():
                self._begin_agent(event.event_id, event.agent.role, event.task_prompt, parent)
            case LiteAgentExecutionStartedEvent():
                self._begin_agent(event.event_id, event.agent_info["role"], event.messages, parent)
            case AgentExecutionCompletedEvent() | LiteAgentExecutionCompletedEvent():
                self._spans.end(event.started_event_id, {OUTPUT: event.output})
            case AgentExecutionErrorEvent() | LiteAgentExecutionErrorEvent():
                self._spans.end(event.started_event_id, error=RuntimeError(event.error))
            case ToolUsageStartedEvent():
                attributes = {
                    OPERATION: "execute_tool",
                    TOOL_NAME: event.tool_name,
                    TOOL_ARGUMENTS: to_text(event.tool_args),
                }
                self._spans.begin(event.event_id, f"execute_tool {event.tool_name}", attributes, parent)
            case ToolUsageFinishedEvent():
                self._spans.end(event.started_event_id, {TOOL_RESULT: to_text(event.output)})
            case ToolUsageErrorEvent():
                self._spans.end(event.started_event_id, error=RuntimeError(str(event.error)))
            case _ if event.type.endswith("_started"):
                self._spans.pass_over(event.event_id, parent)

    def _begin_agent(self, key: str, role: str, given: Any, parent: str | None) -> None:
        attributes = {OPERATION: "invoke_agent", AGENT_NAME: role.strip(), INPUT: to_text(given)}
        self._spans.begin(key, f"invoke_agent {role.strip()}", attributes, parent)
