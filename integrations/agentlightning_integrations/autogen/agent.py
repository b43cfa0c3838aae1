"""AutoGen: AgentChat's agents and teams."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import autogen_agentchat.agents as agents_module
import autogen_agentchat.agents._base_chat_agent as agent_module
import autogen_agentchat.teams._group_chat._chat_agent_container as container_module
import autogen_core.tools._base as tools_module
from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.base import ChatAgent, Response, TaskResult, Team
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.tools._task_runner_tool import TaskRunnerTool
from autogen_core import CancellationToken, ComponentBase, SingleThreadedAgentRuntime
from autogen_core.code_executor import CodeExecutor
from autogen_core.memory import ListMemory, Memory
from autogen_core.models import ChatCompletionClient, RequestUsage, SystemMessage
from autogen_core.tools import BaseStreamTool, BaseTool, StaticWorkbench, Workbench
from autogen_ext.models.openai import BaseOpenAIChatCompletionClient
from openai import AsyncOpenAI
from opentelemetry import trace as otel

from agentlightning.errors import ConfigError
from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM
from agentlightning.tracer.tracer import get_active_trace
from agentlightning_integrations.shared.agent import FrameworkAgent, by_path, message_text, read_input
from agentlightning_integrations.shared.object_copy import copy_except, register_reducer, walk
from agentlightning_integrations.shared.openai_client import async_client
from agentlightning_integrations.shared.span_tree import INPUT, OPERATION, OUTPUT, TOOL_RESULT, to_text, tool_attributes
from agentlightning_plugins.shared.instrumentation import Patches

Runnable: TypeAlias = ChatAgent | Team

_TEXTS: Final = {
    "_description": "description",
    "_instruction": "instruction",
    "_response_prompt": "response_prompt",
    "_selector_prompt": "selector_prompt",
    "_final_answer_prompt": "final_answer_prompt",
}
"""Attributes that hold a text, and the text's name for users."""


def wrap_agent(agent: Any, options: WrapOptions) -> AutoGenAgent | None:
    if not isinstance(agent, (ChatAgent, Team)):
        return None
    for part in _named_parts(agent):
        if not getattr(part, "_embedded_runtime", True):
            raise ConfigError(f"team {part.name!r} has its own runtime; create it without one: each rollout gets one")
    register_reducer(SingleThreadedAgentRuntime, lambda runtime: (SingleThreadedAgentRuntime, ()))
    return AutoGenAgent(agent, options)


class AutoGenAgent(FrameworkAgent[Runnable]):
    """Runs a copy of an agent or team on a task; the output is its ``TaskResult``.

    Every rollout has its own agents, model contexts, memories and termination conditions, in the state of the given
    object. Tools, code executors and memories other than ``ListMemory`` are shared by all rollouts.
    """

    def texts(self) -> Mapping[str, str | None]:
        """The texts of each agent and team by its name, such as ``writer.system_message``."""
        return by_path(item for part in _named_parts(self.agent) for item in _read_texts(part))

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> TaskResult:
        """Runs a copy on a text, a message or messages, of AutoGen or in OpenAI's format."""
        task = _to_messages(read_input(task, "an agent of AutoGen"))
        async with async_client(llm) if llm is not None else contextlib.nullcontext() as client:
            copied = _copy(self.agent, llm, client)
            for part in _named_parts(copied):
                _write_texts(part, texts)
            return await _run(copied, task)


def _to_messages(given: Any) -> Any:
    if isinstance(given, BaseChatMessage):
        return given
    if not isinstance(given, Sequence) or isinstance(given, str):
        return to_text(given)
    messages = (message if isinstance(message, BaseChatMessage) else message_text(message) for message in given)
    return [TextMessage(source=m[0], content=m[1]) if isinstance(m, tuple) else m for m in messages]


async def _run(agent: Runnable, task: Any) -> TaskResult:
    """Runs an agent and stops it on cancellation; a team would otherwise continue to the end of its conversation."""
    token = CancellationToken()
    work = asyncio.ensure_future(agent.run(task=task, cancellation_token=token))
    try:
        await asyncio.wait({work})
    except asyncio.CancelledError:
        token.cancel()
        for runtime in [part for part in walk(agent, _children) if isinstance(part, SingleThreadedAgentRuntime)]:
            for message in list(runtime._background_tasks):  # its agent may ignore the token
                message.cancel()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        raise
    return work.result()


def _copy(agent: Runnable, llm: LLM | None, client: AsyncOpenAI | None) -> Runnable:
    """Copies the parts that have state, with models for the rollout's endpoint."""
    memo: dict[int, Any] = {}
    for part in walk(agent, _children):
        if isinstance(part, ChatCompletionClient):
            memo[id(part)] = part if llm is None or client is None else _redirect(part, llm, client)
        elif isinstance(part, SingleThreadedAgentRuntime):
            memo[id(part)] = SingleThreadedAgentRuntime(
                ignore_unhandled_exceptions=False, tracer_provider=otel.NoOpTracerProvider()
            )
        elif _is_shared(part):
            memo[id(part)] = part
    return copy_except(agent, memo, agent.name)


def _redirect(model: ChatCompletionClient, llm: LLM, client: AsyncOpenAI) -> ChatCompletionClient:
    """Copies a model client for another endpoint and model, with the sampling parameters of both."""
    own = {"model": llm.model, **llm.sampling_parameters}
    if not isinstance(model, BaseOpenAIChatCompletionClient):
        return BaseOpenAIChatCompletionClient(client, create_args=own, model_info=model.model_info)
    copied = object.__new__(type(model))  # the constructor, and therefore copy(), would create another client
    copied.__dict__.update(
        model.__dict__,
        _client=client,
        _create_args={**model._create_args, **own},
        _resolved_model=None,
        _total_usage=RequestUsage(prompt_tokens=0, completion_tokens=0),
        _actual_usage=RequestUsage(prompt_tokens=0, completion_tokens=0),
    )
    return copied


def _is_shared(part: Any) -> bool:
    """Whether rollouts share a part: it may have connections, which cannot be copied, but never a conversation."""
    if isinstance(part, Memory):
        return not isinstance(part, ListMemory)
    if isinstance(part, BaseTool):
        return not isinstance(part, TaskRunnerTool)
    if isinstance(part, Workbench):
        return not isinstance(part, StaticWorkbench)
    if isinstance(part, types.MethodType):  # a copy would copy its object
        return not isinstance(part.__self__, ComponentBase)
    return isinstance(part, CodeExecutor)


def _children(part: Any) -> Iterable[Any]:
    """The attributes of objects that may contain agents."""
    if isinstance(part, (SingleThreadedAgentRuntime, ChatCompletionClient)) or _is_shared(part):
        return ()
    if isinstance(part, ComponentBase) or type(part).__module__.startswith("autogen_"):
        return getattr(part, "__dict__", {}).values()
    return ()


def _named_parts(agent: Runnable) -> Iterator[Any]:
    """The agents and teams, breadth first."""
    return (part for part in walk(agent, _children) if isinstance(part, (ChatAgent, Team)))


def _read_texts(part: Any) -> Iterator[tuple[str, str | None]]:
    if hasattr(part, "_system_messages"):
        yield f"{part.name}.system_message", next((message.content for message in part._system_messages), None)
    for attribute, label in _TEXTS.items():
        if hasattr(part, attribute):
            text = getattr(part, attribute)
            yield f"{part.name}.{label}", text if isinstance(text, str) else None


def _write_texts(part: Any, texts: Mapping[str, str]) -> None:
    text = texts.get(f"{part.name}.system_message")
    if text is not None:
        part._system_messages = [SystemMessage(content=text)]
    for attribute, label in _TEXTS.items():
        text = texts.get(f"{part.name}.{label}")
        if text is not None:
            setattr(part, attribute, text)
    if hasattr(part, "_participants"):  # a team keeps its own list of them
        part._participant_descriptions = [participant.description for participant in part._participants]


def instrument(tracer_provider: Any) -> Callable[[], None]:
    """Has the provider record AutoGen's spans of agents and tools inside attempts, with inputs and outputs.

    By default AutoGen uses OpenTelemetry's global provider, and records only names.
    """
    tracer = otel.get_tracer("agentlightning.autogen", tracer_provider=tracer_provider)

    def trace_agent(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **kwargs, **({} if get_active_trace() is None else {"tracer": tracer}))

    def trace_tool(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **kwargs) if get_active_trace() is None else contextlib.nullcontext()  # ours replaces it

    async def run_tool(wrapped: Callable[..., Any], tool: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with _tool_span(tracer, tool, *args, **kwargs) as span:
            result = await wrapped(*args, **kwargs)
            if span.is_recording():
                span.set_attribute(TOOL_RESULT, tool.return_value_as_string(result))
        return result

    async def run_stream_tool(wrapped: Callable[..., Any], tool: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with _tool_span(tracer, tool, *args, **kwargs) as span:
            item = None
            async for item in wrapped(*args, **kwargs):
                yield item
            if span.is_recording():
                span.set_attribute(TOOL_RESULT, tool.return_value_as_string(item))

    patches = Patches()
    for module in (agent_module, container_module):
        patches.wrap(module, "trace_invoke_agent_span", trace_agent)
    patches.wrap(tools_module, "trace_tool_span", trace_tool)
    patches.wrap(BaseTool, "run_json", run_tool)
    patches.wrap(BaseStreamTool, "run_json_stream", run_stream_tool)
    for cls in vars(agents_module).values():
        if isinstance(cls, type) and issubclass(cls, BaseChatAgent) and "on_messages_stream" in vars(cls):
            patches.wrap(cls, "on_messages_stream", _describe_turn)
    return patches.undo


def _tool_span(
    tracer: otel.Tracer, tool: Any, args: Any, cancellation_token: Any, call_id: str | None = None
) -> contextlib.AbstractContextManager[otel.Span]:
    """The span of a call of ``run_json(args, cancellation_token, call_id=None)``; not recorded outside attempts."""
    if get_active_trace() is None:
        return contextlib.nullcontext(otel.INVALID_SPAN)
    attributes = tool_attributes(tool.name, to_text(args) or "{}", call_id)
    known = {key: value for key, value in attributes.items() if value is not None}
    return tracer.start_as_current_span(f"execute_tool {tool.name}", attributes=known)


async def _describe_turn(
    wrapped: Callable[..., Any], agent: Any, args: Any, kwargs: dict[str, Any]
) -> AsyncGenerator[Any, None]:
    """Wraps ``on_messages_stream(messages, cancellation_token)``: adds input and output to the agent's open span."""
    span: Any = otel.get_current_span()
    is_agent = getattr(span, "attributes", {}).get(OPERATION) == "invoke_agent"
    if is_agent:
        messages = args[0] if args else kwargs["messages"]
        span.set_attribute(INPUT, "\n".join(message.to_text() for message in messages))
    async for item in wrapped(*args, **kwargs):
        if is_agent and isinstance(item, Response):
            span.set_attribute(OUTPUT, item.chat_message.to_text())
        yield item
