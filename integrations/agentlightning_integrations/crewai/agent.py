"""CrewAI: crews, agents and flows."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

from crewai import Agent, Crew, Flow
from crewai.crews import CrewOutput
from crewai.events.base_events import BaseEvent
from crewai.events.event_bus import CrewAIEventsBus
from crewai.events.event_context import SCOPE_STARTING_EVENTS
from crewai.events.listeners.tracing import utils as tracing_module
from crewai.events.types import agent_events, tool_usage_events
from crewai.events.utils import console_formatter as console_module
from crewai.lite_agent_output import LiteAgentOutput
from crewai.llms.base_llm import BaseLLM
from crewai.llms.providers.openai.completion import OpenAICompletion
from crewai.memory.unified_memory import Memory
from opentelemetry import trace as otel
from wrapt import wrap_function_wrapper  # type: ignore[import-untyped] # wrapt has no types

from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM
from agentlightning.tracer.tracer import get_active_trace
from agentlightning_integrations.shared.agent import FrameworkAgent, by_path, read_input
from agentlightning_integrations.shared.object_copy import ModelCache, copy_except, register_reducer, walk
from agentlightning_integrations.shared.openai_client import Clients, open_clients
from agentlightning_integrations.shared.span_tree import OUTPUT, TOOL_RESULT, SpanTree, to_text
from agentlightning_plugins.shared.instrumentation import Patches

Runnable: TypeAlias = Crew | Agent

_LOCK: Final = type(threading.Lock())
_AGENT_TEXTS: Final = ("role", "goal", "backstory")
_TASK_TEXTS: Final = ("description", "expected_output")
_AGENT_MODELS: Final = ("llm", "function_calling_llm")
_KEPT_SETTINGS: Final = ("temperature", "top_p", "max_tokens", "stop", "seed")
_MODEL_METHODS: Final = ("call", "acall", "get_input_tokens_count")
"""The methods of a model that send a prompt to its server."""
_CREW_MODELS: Final = ("manager_llm", "function_calling_llm", "planning_llm", "chat_llm")


def wrap_agent(agent: Any, options: WrapOptions) -> FrameworkAgent[Any] | None:
    if not isinstance(agent, (Crew, Agent, Flow)):
        return None
    _disable_telemetry()
    # The memory of a flow is pickled by its settings, without the connection to its database.
    register_reducer(Memory, lambda memory: (functools.partial(Memory, **_settings_of(memory)), ()))
    return CrewAIFlow(agent, options) if isinstance(agent, Flow) else CrewAIAgent(agent, options)


class CrewAIAgent(FrameworkAgent[Runnable]):
    """Runs a copy of a crew or agent; the output is its ``CrewOutput`` or ``LiteAgentOutput``.

    A task with fields becomes the inputs of a crew; any other task becomes its input ``task``. Every rollout has
    its own agents and tasks; tools, memory and knowledge are shared by all rollouts.
    """

    def texts(self) -> Mapping[str, str | None]:
        """The texts of agents by their role, and of tasks by their name or number.

        These are ``writer.role``, ``.goal`` and ``.backstory``, and ``draft.description`` and ``.expected_output`` of a
        task with the name ``draft``; a task without a name has its number, such as ``task_1``.
        """
        return by_path(
            (f"{name}.{label}", text)
            for name, part, labels in _named_parts(self.agent)
            for label in labels
            if isinstance(text := _template(part, label), str)
        )

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> CrewOutput | LiteAgentOutput:
        result: Any
        async with open_clients(llm) as clients:
            copied = _copy(self.agent, functools.partial(_redirect, llm=llm, clients=clients))
            for name, part, labels in _named_parts(copied):
                for label in labels:
                    setattr(part, label, texts.get(f"{name}.{label}", getattr(part, label)))
            with _silenced(copied.verbose):
                if isinstance(copied, Agent):
                    given = read_input(task, "an agent of CrewAI")
                    result = await copied.akickoff(given if isinstance(given, list) else to_text(given) or "")
                else:
                    result = await copied.akickoff(inputs=_inputs(task))
        return result  # no stream: copies do not stream


class CrewAIFlow(FrameworkAgent[Flow[Any]]):
    """Runs a copy of a flow with ``kickoff_async``; the output is the result of that method.

    It takes a task in the same way as a crew. Its methods may create any agents and crews, which cannot be copied
    beforehand, so models are replaced on each call, according to the context of the rollout.
    """

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        _patch_models()
        async with open_clients(llm) as clients:
            redirect = functools.partial(_redirect, llm=llm, clients=clients)
            token = _models.set(None if llm is None else ModelCache(redirect))
            try:
                with _silenced(is_verbose=False):
                    return await _copy_flow(self.agent).kickoff_async(inputs=_inputs(task))
            finally:
                _models.reset(token)


_models: ContextVar[ModelCache | None] = ContextVar("agentlightning_crewai_models", default=None)


def _patch_models() -> None:
    """Patches every model class, including classes defined later, to call the rollout's replacement of a model.

    CrewAI imports the class of a provider when its first model is made. A pickled class gets its methods only after it
    is defined, so each rollout patches again. Outside rollouts of flows nothing changes.
    """
    _patch_new_models()
    classes = BaseLLM.__subclasses__()
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        _patch_model(cls)


@functools.cache
def _patch_new_models() -> None:
    def patch_new(wrapped: Callable[..., Any], cls: type[BaseLLM], args: Any, kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        _patch_model(cls)

    wrap_function_wrapper(BaseLLM, "__init_subclass__", patch_new)


def _patch_model(cls: type[BaseLLM]) -> None:
    def call(wrapped: Callable[..., Any], model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        models = _models.get()
        chosen = model if models is None else models.get(model)
        answer = wrapped if chosen is model else getattr(chosen, wrapped.__name__)
        return answer(*args, **kwargs)

    for name in _MODEL_METHODS:
        if type(vars(cls).get(name)) is types.FunctionType:  # not wrapped already
            wrap_function_wrapper(cls, name, call)


def _copy_flow(flow: Flow[Any]) -> Flow[Any]:
    """Copies a flow in the state in which it was given, and shares its memory and persistence."""
    shared = [flow.memory, flow.persistence, flow.input_provider]
    replacements: dict[int, Any] = {id(part): part for part in shared if part is not None}
    for lock in (value for value in (flow.__pydantic_private__ or {}).values() if isinstance(value, _LOCK)):
        replacements[id(lock)] = threading.Lock()
    for part in walk(flow, lambda part: vars(part).values() if part is flow else ()):
        if isinstance(part, (Crew, Agent)):
            replacements[id(part)] = _copy(part, lambda model: model)
        elif isinstance(part, BaseLLM):
            replacements[id(part)] = part
    copied = copy_except(flow, replacements, flow.name or type(flow).__name__)
    copied.stream = copied.tracing = False
    return copied


def _settings_of(memory: Memory) -> dict[str, Any]:
    return {name: getattr(memory, name) for name in memory.model_fields_set}


def _inputs(task: Any) -> dict[str, Any]:
    return dict(task) if isinstance(task, Mapping) else {"task": task}


def _named_parts(root: Runnable) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yields the name of each agent and task, the object, and the attributes that hold its texts."""
    if isinstance(root, Agent):
        yield _template(root, "role").strip(), root, _AGENT_TEXTS
        return
    manager = [] if root.manager_agent is None else [root.manager_agent]
    for agent in [*root.agents, *manager]:
        yield _template(agent, "role").strip(), agent, _AGENT_TEXTS
    for number, task in enumerate(root.tasks, start=1):
        yield task.name or f"task_{number}", task, _TASK_TEXTS


def _template(part: Any, label: str) -> Any:
    """Returns the text of an agent or task with its variables, which a run fills in after it saves the template."""
    original = getattr(part, f"_original_{label}", None)
    return getattr(part, label) if original is None else original


def _copy(root: Runnable, redirect: Callable[[Any], Any]) -> Runnable:
    """Copies with CrewAI's own method, replaces models by ``redirect``, and restores the original texts."""
    pairs: list[tuple[Any, Any]]
    if isinstance(root, Agent):
        copied: Any = root.copy()
        pairs = [(root, copied)]
    else:
        copied = root.model_copy(update=dict.fromkeys(_CREW_MODELS[1:])).copy()  # copy() would convert these to dicts
        copied.stream = copied.tracing = False
        agents = list(zip(root.agents, copied.agents, strict=True))
        tasks = list(zip(root.tasks, copied.tasks, strict=True))
        for task, task_copy in tasks:  # copy() finds the agent by its role, which others may have too
            task_copy.agent = next((copy for agent, copy in agents if agent is task.agent), task_copy.agent)
        pairs = [(root, copied), *agents, (root.manager_agent, copied.manager_agent)]
        _restore_texts(tasks)
    _restore_texts(pairs)
    for part, part_copy in pairs:
        for name in _CREW_MODELS if part is root and isinstance(root, Crew) else _AGENT_MODELS:
            model = None if part_copy is None else vars(part).get(name)  # reading a deprecated attribute warns
            if model is not None:
                setattr(part_copy, name, redirect(model))
    return copied


def _restore_texts(pairs: list[tuple[Any, Any]]) -> None:
    for part, part_copy in pairs:
        for label in (*_AGENT_TEXTS, *_TASK_TEXTS, "output_file"):
            if getattr(part, f"_original_{label}", None) is not None:
                setattr(part_copy, label, _template(part, label))


def _redirect(model: Any, llm: LLM | None, clients: Clients | None) -> Any:
    """Copies a model for another endpoint and model; a model may be given by its name only."""
    if llm is None or clients is None:
        return model
    known = {name: value for name, value in llm.sampling_parameters.items() if name in OpenAICompletion.model_fields}
    others = {name: value for name, value in llm.sampling_parameters.items() if name not in known}
    settings = {
        **known,
        "model": llm.model,
        "base_url": llm.get_base_url(),
        "api_key": llm.api_key or "unused",
        "custom_openai": True,  # not OpenAI's own server, which has further endpoints
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
def _silenced(is_verbose: bool) -> Iterator[None]:
    """Disables CrewAI's offer to upload traces, its check for new versions and its output, in this context only."""
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


def _disable_telemetry() -> None:
    """Switches anonymous usage reports off, here and in child processes."""
    os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")


def instrument(tracer_provider: Any) -> Callable[[], None]:
    """Records the events of agents and tools as spans; model calls are recorded by their client's instrumentation.

    Handlers of the event bus run in other threads, where a span cannot be made active for the agent. So the bus itself
    is patched: it is called in the thread that emits the event.
    """
    _disable_telemetry()
    spans = SpanTree(otel.get_tracer("agentlightning.crewai", tracer_provider=tracer_provider))
    original = CrewAIEventsBus.emit

    def emit(self: CrewAIEventsBus, source: Any, event: BaseEvent) -> Any:
        result = original(self, source, event)  # assigns the event's ids
        if get_active_trace() is not None:
            _record(spans, event)
        return result

    patches = Patches()
    patches.replace(CrewAIEventsBus, "emit", emit)

    def undo() -> None:
        patches.undo()
        spans.clear()

    return undo


def _record(spans: SpanTree, event: BaseEvent) -> None:
    """Begins or ends the span of an event."""
    key, started, parent = event.event_id, event.started_event_id, event.parent_event_id
    match event:
        case agent_events.AgentExecutionStartedEvent():
            spans.begin_agent(key, event.agent.role.strip(), parent, event.task_prompt)
        case agent_events.LiteAgentExecutionStartedEvent():
            spans.begin_agent(key, event.agent_info["role"].strip(), parent, event.messages)
        case agent_events.AgentExecutionCompletedEvent() | agent_events.LiteAgentExecutionCompletedEvent():
            spans.end(started, {OUTPUT: event.output})
        case agent_events.AgentExecutionErrorEvent() | agent_events.LiteAgentExecutionErrorEvent():
            spans.end(started, error=RuntimeError(event.error))
        case tool_usage_events.ToolUsageStartedEvent():
            spans.begin_tool(key, event.tool_name, parent, event.tool_args)
        case tool_usage_events.ToolUsageFinishedEvent():
            spans.end(started, {TOOL_RESULT: to_text(event.output)})
        case tool_usage_events.ToolUsageErrorEvent():
            spans.end(started, error=RuntimeError(str(event.error)))
        case _ if event.type in SCOPE_STARTING_EVENTS:
            spans.omit(key, parent)
        case _ if started is not None:
            spans.forget(started)  # not end: a surplus event has the id of an enclosing span
