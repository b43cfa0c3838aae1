"""AutoGen: AgentChat's agents and teams."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import autogen_agentchat.agents as agents_module
import autogen_agentchat.agents._base_chat_agent as agent_module
import autogen_agentchat.teams._group_chat._chat_agent_container as container_module
import autogen_core.tools._base as tools_module
from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.base import ChatAgent, Response, TaskResult, Team
from autogen_agentchat.messages import BaseChatMessage
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
from agentlightning_integrations.framework.agent import FrameworkAgent
from agentlightning_integrations.framework.object_copy import copy_except, walk
from agentlightning_integrations.framework.openai_client import carry_clients, optional_client
from agentlightning_integrations.framework.pickling import register_reducer
from agentlightning_integrations.framework.span_tree import (
    INPUT,
    OPERATION,
    OUTPUT,
    TOOL_ARGUMENTS,
    TOOL_CALL_ID,
    TOOL_NAME,
    TOOL_RESULT,
    to_text,
)

Runnable: TypeAlias = ChatAgent | Team

_TEXTS: Final = {
    "_description": "description",
    "_instruction": "instruction",
    "_response_prompt": "response_prompt",
    "_selector_prompt": "selector_prompt",
    "_final_answer_prompt": "final_answer_prompt",
}
"""Attributes that hold a text, and what users call it."""


def wrap_agent(agent: Any, options: WrapOptions) -> AutoGenAgent | None:
    """See the hook of this name."""
    if not isinstance(agent, (ChatAgent, Team)):
        return None
    for part in _named_parts(agent):
        if not getattr(part, "_embedded_runtime", True):
            raise ConfigError(f"team {part.name!r} has a runtime of its own; make it without: each rollout gets one")
    carry_clients()
    register_reducer(SingleThreadedAgentRuntime, lambda runtime: (SingleThreadedAgentRuntime, ()))
    return AutoGenAgent(agent, options)


class AutoGenAgent(FrameworkAgent[Runnable]):
    """Runs a copy of an agent or team on a task; the output is its ``TaskResult``.

    Every rollout has agents, model contexts, memories and termination conditions of its own, in the state that the
    object was given in. Tools, code executors and memories other than ``ListMemory`` are shared by all rollouts.
    """

    def texts(self) -> Mapping[str, str]:
        """Of each agent and team by its name: ``writer.system_message``, ``writer.description``, and so on."""
        return {path: text for part in _named_parts(self.agent) for path, text in _read_texts(part)}

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> TaskResult:
        """Runs the copy on a text, a message or messages; anything else becomes JSON."""
        is_message = isinstance(task, BaseChatMessage) or (
            isinstance(task, Sequence) and all(isinstance(item, BaseChatMessage) for item in task)
        )
        async with optional_client(llm) as client:
            copied = _copy(self.agent, llm, client)
            for part in _named_parts(copied):
                _write_texts(part, texts)
            return await _run(copied, task if is_message else to_text(task))


async def _run(agent: Runnable, task: Any) -> TaskResult:
    """Runs it so that cancelling us stops it: a team alone would go on until its conversation is over."""
    token = CancellationToken()
    work = asyncio.ensure_future(agent.run(task=task, cancellation_token=token))
    try:
        await asyncio.wait({work})
    except asyncio.CancelledError:
        token.cancel()
        for runtime in [part for part in _walk(agent) if isinstance(part, SingleThreadedAgentRuntime)]:
            for message in list(runtime._background_tasks):  # of agents that do not heed the token
                message.cancel()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        raise
    return work.result()


def _copy(agent: Runnable, llm: LLM | None, client: AsyncOpenAI | None) -> Runnable:
    """Copies what has state; gives the copy's models the rollout's endpoint."""
    memo: dict[int, Any] = {}
    for part in _walk(agent):
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
    """The same model client for another endpoint and model, with the sampling parameters of both."""
    own = {"model": llm.model, **llm.sampling_parameters}
    if not isinstance(model, BaseOpenAIChatCompletionClient):
        return BaseOpenAIChatCompletionClient(client, create_args=own, model_info=model.model_info)
    copied = object.__new__(type(model))  # its constructor, and so copy(), makes a client of its own
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
    """Whether all rollouts use the same object: what may hold connections, and what holds no conversation."""
    if isinstance(part, Memory):
        return not isinstance(part, ListMemory)
    if isinstance(part, BaseTool):
        return not isinstance(part, TaskRunnerTool)
    if isinstance(part, Workbench):
        return not isinstance(part, StaticWorkbench)
    if isinstance(part, types.MethodType):  # copied, it would take its object along
        return not isinstance(part.__self__, ComponentBase)
    return isinstance(part, CodeExecutor)


def _walk(agent: Runnable) -> Iterator[Any]:
    return walk(agent, _is_open)


def _is_open(part: Any) -> bool:
    """Whether agents may be found inside."""
    if isinstance(part, (SingleThreadedAgentRuntime, ChatCompletionClient)) or _is_shared(part):
        return False
    return isinstance(part, ComponentBase) or type(part).__module__.startswith("autogen_")


def _named_parts(agent: Runnable) -> Iterator[Any]:
    """The agents and teams, in the order in which they are reached."""
    return (part for part in _walk(agent) if isinstance(part, (ChatAgent, Team)))


def _read_texts(part: Any) -> Iterator[tuple[str, str]]:
    for message in getattr(part, "_system_messages", ())[:1]:
        yield f"{part.name}.system_message", message.content
    for attribute, label in _TEXTS.items():
        text = getattr(part, attribute, None)
        if isinstance(text, str):
            yield f"{part.name}.{label}", text


def _write_texts(part: Any, texts: Mapping[str, str]) -> None:
    text = texts.get(f"{part.name}.system_message")
    if text is not None:
        part._system_messages = [SystemMessage(content=text)]
    for attribute, label in _TEXTS.items():
        text = texts.get(f"{part.name}.{label}")
        if text is not None:
            setattr(part, attribute, text)
    if hasattr(part, "_participants"):  # a team keeps its own list of what its members say of themselves
        part._participant_descriptions = [participant.description for participant in part._participants]


def instrument(tracer_provider: Any) -> Callable[[], None]:
    """Has AutoGen's spans of agents and tools recorded by the provider, with what goes in and comes out.

    By itself it opens them with OpenTelemetry's global provider and says no more than names.
    """
    tracer = otel.get_tracer("agentlightning.autogen", tracer_provider=tracer_provider)
    replaced: list[tuple[Any, str, Any, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, vars(owner)[name], value))
        setattr(owner, name, value)

    for module in (agent_module, container_module):
        replace(module, "trace_invoke_agent_span", _with_tracer(tracer, module.trace_invoke_agent_span))
    replace(tools_module, "trace_tool_span", _unless_traced(vars(tools_module)["trace_tool_span"]))
    replace(BaseTool, "run_json", _record_tool(tracer, BaseTool.run_json))
    replace(BaseStreamTool, "run_json_stream", _record_stream_tool(tracer, BaseStreamTool.run_json_stream))
    for cls in [
        cls for cls in vars(agents_module).values() if isinstance(cls, type) and issubclass(cls, BaseChatAgent)
    ]:
        if "on_messages_stream" in vars(cls):
            replace(cls, "on_messages_stream", _describe_turn(vars(cls)["on_messages_stream"]))

    def undo() -> None:
        for owner, name, original, value in reversed(replaced):
            if vars(owner).get(name) is value:  # else somebody has wrapped it since
                setattr(owner, name, original)

    return undo


def _with_tracer(tracer: otel.Tracer, original: Callable[..., Any]) -> Callable[..., Any]:
    """AutoGen's own span of an agent's turn, ours inside an attempt."""

    def trace_invoke_agent_span(**arguments: Any) -> contextlib.AbstractContextManager[Any]:
        own = {} if get_active_trace() is None else {"tracer": tracer}
        opened: contextlib.AbstractContextManager[Any] = original(**arguments, **own)
        return opened

    return trace_invoke_agent_span


def _unless_traced(original: Callable[..., Any]) -> Callable[..., Any]:
    """AutoGen's own span of a tool; inside an attempt there is ours instead."""

    def trace_tool_span(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[Any]:
        opened: contextlib.AbstractContextManager[Any]
        opened = contextlib.nullcontext() if get_active_trace() is not None else original(*args, **kwargs)
        return opened

    return trace_tool_span


def _record_tool(tracer: otel.Tracer, original: Callable[..., Any]) -> Callable[..., Any]:
    async def run_json(self: Any, args: Any, cancellation_token: Any, call_id: str | None = None) -> Any:
        if get_active_trace() is None:
            return await original(self, args, cancellation_token, call_id)
        with _tool_span(tracer, self, args, call_id) as span:
            result = await original(self, args, cancellation_token, call_id)
            span.set_attribute(TOOL_RESULT, self.return_value_as_string(result))
        return result

    return run_json


def _record_stream_tool(tracer: otel.Tracer, original: Callable[..., Any]) -> Callable[..., Any]:
    async def run_json_stream(
        self: Any, args: Any, cancellation_token: Any, call_id: str | None = None
    ) -> AsyncGenerator[Any, None]:
        if get_active_trace() is None:
            async for item in original(self, args, cancellation_token, call_id):
                yield item
            return
        with _tool_span(tracer, self, args, call_id) as span:
            item = None
            async for item in original(self, args, cancellation_token, call_id):
                yield item
            span.set_attribute(TOOL_RESULT, self.return_value_as_string(item))

    return run_json_stream


def _tool_span(
    tracer: otel.Tracer, tool: Any, arguments: Any, call_id: str | None
) -> contextlib.AbstractContextManager[otel.Span]:
    attributes = {
        OPERATION: "execute_tool",
        TOOL_NAME: tool.name,
        TOOL_ARGUMENTS: to_text(arguments) or "{}",
        **({} if call_id is None else {TOOL_CALL_ID: call_id}),
    }
    return tracer.start_as_current_span(f"execute_tool {tool.name}", attributes=attributes)


def _describe_turn(original: Callable[..., Any]) -> Callable[..., Any]:
    """Says on the agent's span, which is open while it takes its turn, what it was given and what it gave."""

    async def on_messages_stream(self: Any, messages: Any, cancellation_token: Any) -> AsyncGenerator[Any, None]:
        span: Any = otel.get_current_span()
        is_agent = getattr(span, "attributes", {}).get(OPERATION) == "invoke_agent"
        if is_agent:
            span.set_attribute(INPUT, "\n".join(message.to_text() for message in messages))
        async for item in original(self, messages, cancellation_token):
            if is_agent and isinstance(item, Response):
                span.set_attribute(OUTPUT, item.chat_message.to_text())
            yield item

    return on_messages_stream
