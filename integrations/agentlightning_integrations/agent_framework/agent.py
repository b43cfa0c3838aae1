"""Microsoft Agent Framework: agents and workflows."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import agent_framework.observability as observability_module
from agent_framework import (
    AgentResponse,
    BaseAgent,
    BaseChatClient,
    Executor,
    FunctionTool,
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
from agentlightning_integrations.framework.agent import FrameworkAgent
from agentlightning_integrations.framework.object_copy import copy_except, walk
from agentlightning_integrations.framework.openai_client import carry_clients, optional_client
from agentlightning_integrations.framework.span_tree import to_text

Runnable: TypeAlias = BaseAgent | Workflow


def wrap_agent(agent: Any, options: WrapOptions) -> AgentFrameworkAgent | None:
    """See the hook of this name."""
    if not isinstance(agent, (BaseAgent, Workflow)):
        return None
    carry_clients()
    return AgentFrameworkAgent(agent, options)


class AgentFrameworkAgent(FrameworkAgent[Runnable]):
    """Runs a copy of an agent or workflow on a task; the output is its ``AgentResponse`` or ``WorkflowRunResult``.

    Every rollout has agents and executors of its own, in the state that the object was given in. Tools, middleware and
    context providers are shared by all rollouts. Model calls are Chat Completions, whatever client the object has.
    """

    def texts(self) -> Mapping[str, str]:
        """Of each agent by its name: ``writer.instructions`` and ``writer.description``."""
        texts = {}
        for agent in _agents(self.agent):
            instructions = getattr(agent, "default_options", {}).get("instructions")
            for label, text in (("instructions", instructions), ("description", agent.description)):
                if isinstance(text, str):
                    texts[f"{_name(agent)}.{label}"] = text
        return texts

    async def run_async(
        self, task: Any, llm: LLM | None, texts: Mapping[str, str]
    ) -> AgentResponse[Any] | WorkflowRunResult:
        """Runs the copy on what it takes as input; anything else becomes JSON."""
        async with optional_client(llm) as client:
            copied = _Copier(llm, client, texts).copy(self.agent)
            if isinstance(copied, Workflow):
                takes = tuple(kind for kind in copied.input_types if isinstance(kind, type))
                return await copied.run(task if isinstance(task, takes) else to_text(task))
            run: Any = copied.run
            response: AgentResponse[Any] = await run(to_text(task) if isinstance(task, Mapping) else task)
            return response


class _Copier:
    """Copies agents and workflows for one rollout, each that is found twice once."""

    def __init__(self, llm: LLM | None, client: AsyncOpenAI | None, texts: Mapping[str, str]) -> None:
        self._llm = llm
        self._client = client
        self._texts = texts
        self._copies: dict[int, Any] = {}

    def copy(self, part: Any) -> Any:
        """The copy of an agent, workflow, chat client or tool; anything else is shared."""
        if id(part) not in self._copies:
            make = next((make for cls, make in self._ways() if isinstance(part, cls)), None)
            if make is None:
                return part
            make(part)
        return self._copies[id(part)]

    def _ways(self) -> tuple[tuple[type[Any], Callable[[Any], None]], ...]:
        return (
            (BaseAgent, self._copy_agent),
            (Workflow, self._copy_workflow),
            (BaseChatClient, self._redirect),
            (FunctionTool, self._copy_tool),
        )

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
        exchanged = {}
        for part in walk(workflow, _is_open):
            if part is not workflow and isinstance(part, (BaseAgent, Workflow, BaseChatClient)):
                exchanged[id(part)] = self.copy(part)
        self._copies[id(workflow)] = copy_except(workflow, exchanged, workflow.name or workflow.id)

    def _copy_tool(self, tool: FunctionTool) -> None:
        """A tool counts its calls, and one that is an agent holds it in its function's closure."""
        copied = self._copies[id(tool)] = copy.copy(tool)
        function: Any = copied.func
        if isinstance(function, types.FunctionType) and _agents_in(function):
            cells = tuple(types.CellType(self.copy(cell.cell_contents)) for cell in function.__closure__ or ())
            bound = types.FunctionType(
                function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
            )
            bound.__dict__.update(vars(function))
            bound.__kwdefaults__, bound.__annotations__ = function.__kwdefaults__, function.__annotations__
            copied.func = bound

    def _redirect(self, client: BaseChatClient[Any]) -> None:
        """The same chat client for the rollout's endpoint."""
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
    contents = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    return [content for content in contents if isinstance(content, BaseAgent)]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 # an empty cell says so by raising
    except ValueError:
        return False
    return True


def _is_open(part: Any) -> bool:
    """Whether agents may be found inside."""
    return isinstance(part, (BaseAgent, Executor, Workflow))


def _agents(root: Runnable) -> Iterator[BaseAgent]:
    """The agents that have a name or instructions of their own, tools that are agents included."""
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        for part in walk(waiting.pop(0), _is_open):
            if id(part) in seen:
                continue
            seen.add(id(part))
            if isinstance(part, BaseAgent) and not isinstance(part, WorkflowAgent):
                yield part
            if isinstance(part, FunctionTool) and isinstance(part.func, types.FunctionType):
                waiting.extend(_agents_in(part.func))


def _name(agent: BaseAgent) -> str:
    return agent.name or agent.id


def instrument(tracer_provider: Any) -> Callable[[], None]:
    """Has the framework's own spans recorded by the provider, with their contents, inside attempts.

    By itself it takes OpenTelemetry's global provider, and leaves contents out so that they do not reach exporters.
    """
    tracer = otel.get_tracer("agentlightning.agent_framework", tracer_provider=tracer_provider)
    original_get_tracer = observability_module.get_tracer

    def get_tracer(*args: Any, **kwargs: Any) -> otel.Tracer:
        return original_get_tracer(*args, **kwargs) if get_active_trace() is None else tracer

    replaced: list[tuple[Any, str, Any, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, vars(owner)[name], value))
        setattr(owner, name, value)

    replace(observability_module, "get_tracer", get_tracer)
    for name in ("enable_instrumentation", "enable_sensitive_data"):
        replace(ObservabilitySettings, name, _on_in_attempts(vars(ObservabilitySettings)[name]))

    def undo() -> None:
        for owner, name, original, value in reversed(replaced):
            if vars(owner).get(name) is value:  # else somebody has wrapped it since
                setattr(owner, name, original)

    return undo


def _on_in_attempts(setting: property) -> property:
    """A switch of the framework that is on inside attempts, and elsewhere what the user says."""
    assert setting.fget is not None
    read = setting.fget

    def is_on(self: Any) -> bool:
        return get_active_trace() is not None or bool(read(self))

    return property(is_on, setting.fset)
