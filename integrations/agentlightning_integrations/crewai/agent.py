"""CrewAI: crews, agents and flows."""

from __future__ import annotations

import contextlib
import os
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

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
from crewai.llms.base_llm import BaseLLM
from crewai.llms.providers.openai.completion import OpenAICompletion
from crewai.memory.unified_memory import Memory
from openai import AsyncOpenAI, OpenAI
from opentelemetry import trace as otel
from wrapt import wrap_function_wrapper  # type: ignore[import-untyped] # wrapt has no types

from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM
from agentlightning.tracer.tracer import get_active_trace
from agentlightning_integrations.framework.agent import FrameworkAgent
from agentlightning_integrations.framework.object_copy import copy_except, walk
from agentlightning_integrations.framework.openai_client import async_client, carry_clients, sync_client
from agentlightning_integrations.framework.pickling import register_reducer
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

Runnable: TypeAlias = Crew | Agent
A = TypeVar("A")

_LOCK: Final = type(threading.Lock())
_AGENT_TEXTS: Final = ("role", "goal", "backstory")
_TASK_TEXTS: Final = ("description", "expected_output")
_AGENT_MODELS: Final = ("llm", "function_calling_llm")
_KEPT_SETTINGS: Final = ("temperature", "top_p", "max_tokens", "stop", "seed")
_CREW_MODELS: Final = ("manager_llm", "function_calling_llm", "planning_llm", "chat_llm")


def wrap_agent(agent: Any, options: WrapOptions) -> FrameworkAgent[Any] | None:
    """See the hook of this name."""
    if not isinstance(agent, (Crew, Agent, Flow)):
        return None
    carry_clients()
    _stay_home()
    if not isinstance(agent, Flow):
        return CrewAIAgent(agent, options)
    register_reducer(Memory, _reduce_memory)
    return CrewAIFlow(agent, options)


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
        async with _open_clients(llm) as clients:
            copied = _copy(self.agent, llm, clients)
            for name, part, labels in _named_parts(copied):
                for label in labels:
                    setattr(part, label, texts.get(f"{name}.{label}", getattr(part, label)))
            with _quietly(copied.verbose):
                if isinstance(copied, Agent):
                    result = await copied.akickoff(task if isinstance(task, (str, list)) else to_text(task) or "")
                else:
                    result = await copied.akickoff(inputs=_inputs(task))
        return result  # type: ignore[no-any-return] # no stream: copies do not stream


class CrewAIFlow(FrameworkAgent[Flow[Any]]):
    """Runs a copy of a flow, with ``kickoff_async``; the output is what that returns.

    A flow takes a task as a crew does. Its methods make agents and crews as they like, so the endpoint of a rollout is
    not put into a copy of those: models ask on each call, in the context of the rollout, whether another one answers.
    """

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        """Runs the copy on a task."""
        _ask_on_each_call()
        async with _open_clients(llm) as clients:
            token = _current.set(None if llm is None else _Models(llm, clients))
            try:
                with _quietly(is_verbose=False):
                    return await _copy_flow(self.agent).kickoff_async(inputs=_inputs(task))
            finally:
                _current.reset(token)


class _Clients(NamedTuple):
    """What the models of one rollout call with; the framework awaits, or calls in threads."""

    awaited: AsyncOpenAI
    blocking: OpenAI


@contextlib.asynccontextmanager
async def _open_clients(llm: LLM | None) -> AsyncIterator[_Clients | None]:
    if llm is None:
        yield None
        return
    with sync_client(llm) as blocking:
        async with async_client(llm) as awaited:
            yield _Clients(awaited, blocking)


class _Models:
    """The models that answer in one rollout, by those that they answer for."""

    def __init__(self, llm: LLM, clients: _Clients | None) -> None:
        self._llm = llm
        self._clients = clients
        self._found: dict[int, tuple[Any, Any]] = {}

    def answering_for(self, model: Any) -> Any:
        """The model that calls the rollout's endpoint."""
        _, found = self._found.get(id(model), (None, None))
        if found is None:
            found = _redirect(model, self._llm, self._clients)
            self._found[id(model)] = model, found  # both are kept, so that their ids stay theirs
            self._found[id(found)] = found, found
        return found


_current: ContextVar[_Models | None] = ContextVar("agentlightning_crewai_models", default=None)


def _ask_on_each_call() -> None:
    """Has the models that are known by now ask who answers; outside rollouts of flows nothing changes."""

    def call(wrapped: Callable[..., Any], model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        models = _current.get()
        chosen = model if models is None else models.answering_for(model)
        answer = wrapped if chosen is model else getattr(chosen, wrapped.__name__)
        return answer(*args, **kwargs)

    classes = BaseLLM.__subclasses__()
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        for name in ("call", "acall"):
            if type(vars(cls).get(name)) is types.FunctionType:  # and no wrapper of ours
                wrap_function_wrapper(cls, name, call)


def _copy_flow(flow: Flow[Any]) -> Flow[Any]:
    """A flow in the state that this one was given in; what it remembers and stores is shared."""
    shared = [flow.memory, flow.persistence, flow.input_provider]
    exchanged: dict[int, Any] = {id(part): part for part in shared if part is not None}
    for lock in (value for value in (flow.__pydantic_private__ or {}).values() if isinstance(value, _LOCK)):
        exchanged[id(lock)] = threading.Lock()
    for part in walk(flow, lambda part: part is flow):
        if isinstance(part, (Crew, Agent)):
            exchanged[id(part)] = _copy(part, None, None)
        elif isinstance(part, BaseLLM):
            exchanged[id(part)] = part
    copied = copy_except(flow, exchanged, flow.name or type(flow).__name__)
    copied.stream = copied.tracing = False
    return copied


def _reduce_memory(memory: Memory) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A memory that is opened anew: every flow has one, with the connection to its database."""
    return _make_memory, ({name: getattr(memory, name) for name in memory.model_fields_set},)


def _make_memory(settings: dict[str, Any]) -> Memory:
    return Memory(**settings)


def _inputs(task: Any) -> dict[str, Any]:
    return dict(task) if isinstance(task, Mapping) else {"task": task}


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


def _copy(root: Runnable, llm: LLM | None, clients: _Clients | None) -> Runnable:
    """CrewAI's own copy, with models that call the rollout's endpoint."""
    if isinstance(root, Agent):
        return _copy_agent(root, root.copy(), llm, clients)
    models = {name: vars(root).get(name) for name in _CREW_MODELS}
    bare = root.model_copy(update=dict.fromkeys(_CREW_MODELS[1:]))  # copying a crew makes dicts of these
    copied = bare.copy()
    copied.stream = copied.tracing = False
    for name, model in models.items():
        if model is not None:
            setattr(copied, name, _redirect(model, llm, clients))
    for agent, made in zip(root.agents, copied.agents, strict=True):
        _copy_agent(agent, made, llm, clients)
    if root.manager_agent is not None and copied.manager_agent is not None:
        _copy_agent(root.manager_agent, copied.manager_agent, llm, clients)
    return copied


def _copy_agent(agent: Any, copied: A, llm: LLM | None, clients: _Clients | None) -> A:
    for name in _AGENT_MODELS:
        model = vars(agent).get(name)  # asked as an attribute, a deprecated one warns
        if model is not None:
            setattr(copied, name, _redirect(model, llm, clients))
    return copied


def _redirect(model: Any, llm: LLM | None, clients: _Clients | None) -> Any:
    """The same model settings for another endpoint and model; a model may be no more than its name."""
    if llm is None or clients is None:
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
    copied._async_client, copied._client = clients
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
