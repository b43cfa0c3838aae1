"""Microsoft Agent Framework: agents and workflows."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, nullcontext, suppress
from typing import Any, TypeAlias

import agent_framework.observability as observability_module
from agent_framework import (
    AgentResponse,
    BaseAgent,
    BaseChatClient,
    Executor,
    FunctionTool,
    Message,
    RawAgent,
    Workflow,
    WorkflowAgent,
    WorkflowRunResult,
)
from agent_framework.observability import ObservabilitySettings
from agent_framework_openai import OpenAIChatCompletionClient
from openai import AsyncOpenAI
from opentelemetry import trace as otel

from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM
from agentlightning.tracer.tracer import get_active_trace
from agentlightning_integrations.shared.agent import FrameworkAgent, by_path, message_text, read_input
from agentlightning_integrations.shared.object_copy import copy_except, walk
from agentlightning_integrations.shared.openai_client import async_client
from agentlightning_integrations.shared.span_tree import to_text
from agentlightning_plugins.shared.instrumentation import Patches

Runnable: TypeAlias = BaseAgent | Workflow


def wrap_agent(agent: Any, options: WrapOptions) -> AgentFrameworkAgent | None:
    return AgentFrameworkAgent(agent, options) if isinstance(agent, (BaseAgent, Workflow)) else None


class AgentFrameworkAgent(FrameworkAgent[Runnable]):
    """Runs a copy of an agent or workflow on a task; the output is its ``AgentResponse`` or ``WorkflowRunResult``.

    Every rollout has its own agents and executors, in the state of the given object. Tools, middleware and
    context providers are shared by all rollouts. Model calls use Chat Completions, whatever client the object has.
    """

    def texts(self) -> Mapping[str, str | None]:
        """The texts of each agent by its name: ``writer.instructions`` and ``writer.description``."""
        texts = []
        for agent in _agents(self.agent):
            instructions = getattr(agent, "default_options", {}).get("instructions")
            for label, text in (("instructions", instructions), ("description", agent.description)):
                texts.append((f"{_name(agent)}.{label}", text if isinstance(text, str) else None))
        return by_path(texts)

    async def run_async(
        self, task: Any, llm: LLM | None, texts: Mapping[str, str]
    ) -> AgentResponse[Any] | WorkflowRunResult:
        """Runs a copy on a text or messages, or on another input that a workflow accepts."""
        async with async_client(llm) if llm is not None else nullcontext() as client:
            copied = _Copier(llm, client, texts).copy(self.agent)
            if isinstance(copied, Workflow):
                takes = tuple(kind for kind in copied.input_types if isinstance(kind, type))
                return await copied.run(task if isinstance(task, takes) else _to_messages(task))
            run: Any = copied.run
            response: AgentResponse[Any] = await run(_to_messages(task))
            return response


def _to_messages(task: Any) -> Any:
    given = read_input(task, "an agent of Agent Framework")
    if not isinstance(given, list):
        return given if isinstance(given, Message) else to_text(given)
    found = [item if isinstance(item, (str, Message)) else message_text(item) for item in given]
    return [Message(item[0], [item[1]]) if isinstance(item, tuple) else item for item in found]


class _Copier:
    """Copies agents and workflows for one rollout; an object that is found twice is copied once."""

    def __init__(self, llm: LLM | None, client: AsyncOpenAI | None, texts: Mapping[str, str]) -> None:
        self._llm = llm
        self._client = client
        self._texts = texts
        self._copies: dict[int, Any] = {}

    def copy(self, part: Any) -> Any:
        """The copy of an agent, workflow, chat client or tool; anything else is shared."""
        if id(part) in self._copies:
            return self._copies[id(part)]
        if isinstance(part, BaseAgent):
            self._copy_agent(part)
        elif isinstance(part, Workflow):
            self._copy_workflow(part)
        elif isinstance(part, BaseChatClient):
            self._redirect(part)
        elif isinstance(part, FunctionTool):
            self._copy_tool(part)
        return self._copies.get(id(part), part)

    def _copy_agent(self, agent: BaseAgent) -> None:
        copied = self._copies[id(agent)] = copy.copy(agent)
        for name, value in list(vars(copied).items()):
            setattr(copied, name, self.copy(value))
        copied.description = self._texts.get(f"{_name(agent)}.description", agent.description)
        if not isinstance(copied, RawAgent):
            return
        copied._async_exit_stack = AsyncExitStack()
        options = copied.default_options = dict(copied.default_options)
        options["tools"] = [self.copy(tool) for tool in options.get("tools", ())]
        if self._llm is not None:
            options.update(self._llm.sampling_parameters, model=self._llm.model)
        instructions = self._texts.get(f"{_name(agent)}.instructions")
        if instructions is not None:
            options["instructions"] = instructions

    def _copy_workflow(self, workflow: Workflow) -> None:
        replacements = {
            id(part): self.copy(part)
            for part in walk(workflow, _children)
            if part is not workflow and isinstance(part, (BaseAgent, Workflow, BaseChatClient))
        }
        self._copies[id(workflow)] = copy_except(workflow, replacements, workflow.name or workflow.id)

    def _copy_tool(self, tool: FunctionTool) -> None:
        """Copies a tool, because it counts its calls; a tool made from an agent has it in its function's closure."""
        copied = self._copies[id(tool)] = copy.copy(tool)
        function: Any = copied.func
        if isinstance(function, types.FunctionType) and _agents_in(function):
            cells = tuple(map(self._copy_cell, function.__closure__ or ()))
            bound = types.FunctionType(
                function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
            )
            bound.__dict__.update(vars(function))
            bound.__kwdefaults__, bound.__annotations__ = function.__kwdefaults__, function.__annotations__
            copied.func = bound

    def _copy_cell(self, cell: types.CellType) -> types.CellType:
        """Returns a cell with a copy of the content, or the cell itself if its content is shared or missing."""
        try:
            content = cell.cell_contents
        except ValueError:
            return cell
        copied = self.copy(content)
        return cell if copied is content else types.CellType(copied)

    def _redirect(self, client: BaseChatClient[Any]) -> None:
        """Copies a chat client for the rollout's endpoint."""
        if self._llm is None or self._client is None:
            self._copies[id(client)] = client
        elif isinstance(client, OpenAIChatCompletionClient):
            copied = copy.copy(client)
            copied.client, copied.model = self._client, self._llm.model
            self._copies[id(client)] = copied
        else:
            chat = self._copies[id(client)] = OpenAIChatCompletionClient(
                self._llm.model,
                async_client=self._client,
                middleware=[*getattr(client, "chat_middleware", ()), *getattr(client, "function_middleware", ())],
                function_invocation_configuration=getattr(client, "function_invocation_configuration", None),
            )
            chat.compaction_strategy, chat.tokenizer = client.compaction_strategy, client.tokenizer


def _agents_in(function: types.FunctionType) -> list[BaseAgent]:
    contents = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            contents.append(cell.cell_contents)
    return [content for content in contents if isinstance(content, BaseAgent)]


def _children(part: Any) -> Iterable[Any]:
    if isinstance(part, FunctionTool) and isinstance(part.func, types.FunctionType):
        return _agents_in(part.func)
    return vars(part).values() if isinstance(part, (BaseAgent, Executor, Workflow)) else ()


def _agents(root: Runnable) -> Iterator[BaseAgent]:
    """The agents with their own name or instructions, including agents used as tools."""
    agents = (part for part in walk(root, _children) if isinstance(part, BaseAgent))
    return (agent for agent in agents if not isinstance(agent, WorkflowAgent))


def _name(agent: BaseAgent) -> str:
    return agent.name or agent.id


def instrument(tracer_provider: Any) -> Callable[[], None]:
    """Has the provider record the framework's own spans inside attempts, with prompts and answers.

    By default the framework uses OpenTelemetry's global provider, and omits contents to keep them from exporters.
    """
    tracer = otel.get_tracer("agentlightning.agent_framework", tracer_provider=tracer_provider)

    def get_tracer(wrapped: Callable[..., otel.Tracer], instance: Any, args: Any, kwargs: Any) -> otel.Tracer:
        return wrapped(*args, **kwargs) if get_active_trace() is None else tracer

    patches = Patches()
    patches.wrap(observability_module, "get_tracer", get_tracer)
    for name in ("enable_instrumentation", "enable_sensitive_data"):
        patches.replace(ObservabilitySettings, name, _on_in_attempts(vars(ObservabilitySettings)[name]))
    return patches.undo


def _on_in_attempts(setting: property) -> property:
    """A setting of the framework that is always on inside attempts."""
    assert setting.fget is not None
    read = setting.fget

    def is_on(self: Any) -> bool:
        return get_active_trace() is not None or bool(read(self))

    return property(is_on, setting.fset)
