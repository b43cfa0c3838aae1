"""LangChain and LangGraph: runnables, agents of ``create_agent`` or ``create_react_agent``, and graphs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import BaseMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable
from wrapt import wrap_function_wrapper  # type: ignore[import-untyped] # wrapt has no types

from agentlightning.errors import ConfigError
from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM
from agentlightning_integrations.langchain.trace import instrument as instrument
from agentlightning_integrations.langchain.trace import read_name, read_system_prompt
from agentlightning_integrations.shared.agent import FrameworkAgent, by_path, read_input
from agentlightning_integrations.shared.object_copy import ModelCache
from agentlightning_integrations.shared.span_tree import detach_ended

_MODEL_METHODS: Final = "generate agenerate stream astream _chat_model_stream_v3 _achat_model_stream_v3".split()
"""Every call of a chat model passes one of these."""


def wrap_agent(agent: Any, options: WrapOptions) -> LangChainAgent | None:
    if not isinstance(agent, Runnable):
        return None
    with contextlib.suppress(ImportError):  # models of other vendors do not need openai
        importlib.import_module("agentlightning_integrations.shared.openai_client")  # registers how to pickle them
    return LangChainAgent(agent, options)


class LangChainAgent(FrameworkAgent[Runnable[Any, Any]]):
    """Runs a runnable with ``ainvoke``; the output is what it returns.

    A graph may reach its models in any way, such as through a global, and cannot be copied with other models. So chat
    models are replaced on each call, according to the context of the rollout.
    """

    def texts(self) -> Mapping[str, str | None]:
        """System prompts of agents, as ``writer.system_prompt``, and the messages of prompt templates.

        An agent without a name has ``system_prompt``; a subgraph has the name of its node, and a sub-agent of Deep
        Agents its own. Prompt templates outside graphs are ``prompt.system``, ``prompt.human`` or just ``prompt``, the
        next ones ``prompt2.system`` and so on.
        """
        return by_path((found.path, found.text) for found in _find_texts(self.agent))

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        """Runs the runnable on the task; a text becomes the user's message of a graph that has ``messages``."""
        graph = _graph_of(self.agent)
        if graph is not None and "messages" in graph.channels and not _is_state(task, graph):
            given = read_input(task, "a graph without such channels")
            task = {"messages": given if isinstance(given, list) else [("user", str(given))]}
        _patch_models()
        async with _open_clients(llm) as clients:
            token = _overrides.set(_Overrides(llm, clients, _find_texts(self.agent) if texts else [], texts))
            try:
                return await self.agent.ainvoke(task)
            finally:
                _overrides.reset(token)
                detach_ended()  # LangChain ends its runs in other tasks


def _open_clients(llm: LLM | None) -> contextlib.AbstractAsyncContextManager[Any]:
    if llm is None:
        return contextlib.nullcontext()
    from agentlightning_integrations.shared.openai_client import open_clients

    return open_clients(llm)


class _Text(NamedTuple):
    """A tunable text, and the object that holds it; the holder of a system prompt given as plain text is None."""

    path: str
    text: str
    holder: PromptTemplate | SystemMessage | None


class _Overrides:
    """The models, sampling parameters and texts of one rollout.

    An agent's system prompt is found by the identity of its message, since several agents may have the same text. It
    is found by its text if the message is a different one: a middleware changed it, or LangChain is older than 1.1.
    """

    def __init__(self, llm: LLM | None, clients: Any, found: list[_Text], texts: Mapping[str, str]) -> None:
        self.parameters: Mapping[str, Any] = {} if llm is None else llm.sampling_parameters
        self.models = ModelCache(lambda model: model if llm is None else _redirect(model, llm, clients))
        self._texts = texts
        templates = [one for one in found if isinstance(one.holder, PromptTemplate) and one.path in texts]
        self._templates = {id(one.holder): texts[one.path] for one in templates}
        prompts = [one for one in found if not isinstance(one.holder, PromptTemplate)]
        places = {(id(one.holder), one.path) for one in prompts if one.holder is not None}
        uses = Counter(holder for holder, _ in places)
        self._path_of = {holder: path for holder, path in places if uses[holder] == 1}
        self._prompts = sorted((one for one in prompts if one.text), key=lambda one: -len(one.text))
        self._tuned: dict[int, SystemMessage] = {}

    def messages(self, messages: list[BaseMessage]) -> list[BaseMessage]:
        """Replaces the object's system prompts by the tuned ones."""
        return [self._tune(message) if isinstance(message, SystemMessage) else message for message in messages]

    def _tune(self, message: SystemMessage) -> SystemMessage:
        old = message.content
        if not isinstance(old, str) or id(message) in self._tuned:  # one call passes here several times
            return message
        new = self._texts.get(self._path_of[id(message)], old) if id(message) in self._path_of else self._replace(old)
        if new != old:
            message = message.model_copy(update={"content": new})
            self._tuned[id(message)] = message
        return message

    def _replace(self, content: str) -> str:
        """Replaces the longest text of an agent in the content of a message."""
        old = next((one.text for one in self._prompts if one.text in content), None)
        paths = sorted({one.path for one in self._prompts if one.text == old})
        if old is None or not self._texts.keys() & paths:
            return content
        if len(paths) > 1:
            raise ConfigError(
                f"{' and '.join(paths)} are the same text, so a message with it cannot be assigned to one of them: the "
                "agents share the message, a middleware has changed it, or LangChain is older than 1.1. Give each "
                "agent its own text"
            )
        return content.replace(old, self._texts[paths[0]], 1)

    def template(self, template: PromptTemplate) -> PromptTemplate:
        """The tuned form of a template, or the template itself."""
        new = self._templates.get(id(template))
        return template if new is None else template.model_copy(update={"template": new})


_overrides: ContextVar[_Overrides | None] = ContextVar("agentlightning_langchain_overrides", default=None)


def _redirect(model: BaseChatModel, llm: LLM, clients: Any) -> BaseChatModel:
    """Copies a model for the rollout's endpoint."""
    from langchain_openai.chat_models.base import BaseChatOpenAI

    if not isinstance(model, BaseChatOpenAI):
        raise ConfigError(
            f"the graph calls {type(model).__name__}, which does not use OpenAI's API, so its calls cannot go to "
            f"{llm.model!r} of this rollout; use ChatOpenAI, or give no LLM resource to tune prompts only"
        )
    return model.model_copy(
        update={
            "client": clients.blocking.chat.completions,
            "async_client": clients.awaited.chat.completions,
            "root_client": clients.blocking,
            "root_async_client": clients.awaited,
            "model_name": llm.model,
            "cache": False,  # every rollout needs its own samples
        }
    )


@functools.cache
def _patch_models() -> None:
    """Has chat models and prompt templates look up the overrides of their rollout; outside rollouts nothing changes."""

    def call_model(wrapped: Callable[..., Any], model: BaseChatModel, args: Any, kwargs: dict[str, Any]) -> Any:
        overrides = _overrides.get()
        if overrides is None:
            return wrapped(*args, **kwargs)
        name = "messages" if wrapped.__name__ in ("generate", "agenerate") else "input"
        given = args[0] if args else kwargs.pop(name)
        if name == "messages":
            given = [overrides.messages(messages) for messages in given]
        else:
            given = overrides.messages(model._convert_input(given).to_messages())
        chosen = overrides.models.get(model)
        call = wrapped if chosen is model else getattr(chosen, wrapped.__name__)
        return call(given, *args[1:], **{**kwargs, **overrides.parameters})

    def format_template(wrapped: Callable[..., Any], template: PromptTemplate, args: Any, kwargs: Any) -> Any:
        overrides = _overrides.get()
        chosen = template if overrides is None else overrides.template(template)
        return wrapped(*args, **kwargs) if chosen is template else chosen.format(*args, **kwargs)

    for name in _MODEL_METHODS:
        if hasattr(BaseChatModel, name):
            wrap_function_wrapper(BaseChatModel, name, call_model)
    wrap_function_wrapper(PromptTemplate, "format", format_template)


def _find_texts(runnable: Runnable[Any, Any]) -> list[_Text]:
    """The tunable texts."""
    graph = _graph_of(runnable)
    if graph is not None:
        return list(_system_prompts(graph, ""))
    found: dict[str, _Text] = {}
    prompts = [prompt for prompt in runnable.get_prompts() if isinstance(prompt, (ChatPromptTemplate, PromptTemplate))]
    for number, prompt in enumerate(prompts, start=1):
        path = "prompt" if number == 1 else f"prompt{number}"
        if isinstance(prompt, PromptTemplate):
            found[path] = _Text(path, prompt.template, prompt)
            continue
        for message in prompt.messages:
            template = getattr(message, "prompt", None)
            if isinstance(template, PromptTemplate):
                role = type(message).__name__.removesuffix("MessagePromptTemplate").lower()
                key, again = f"{path}.{role}", 2
                while key in found:
                    key, again = f"{path}.{role}{again}", again + 1
                found[key] = _Text(key, template.template, template)
    return list(found.values())


def _system_prompts(graph: Any, prefix: str) -> Iterator[_Text]:
    name = read_name(graph) or prefix
    prompt = read_system_prompt(graph)
    message = prompt if isinstance(prompt, SystemMessage) else None
    text = prompt if message is None else message.content
    if isinstance(text, str):
        yield _Text(f"{name}.system_prompt" if name else "system_prompt", text, message)
    for inner_name, inner in _inner_graphs(graph):
        yield from _system_prompts(inner, inner_name)


def _inner_graphs(graph: Any) -> Iterator[tuple[str, Any]]:
    """Yields the graphs in a graph with their names: subgraphs, and sub-agents, which a tool of Deep Agents runs."""
    yield from graph.get_subgraphs()
    for node in graph.nodes.values():
        for tool in getattr(getattr(node, "bound", None), "tools_by_name", {}).values():
            function = getattr(tool, "func", None)
            if callable(function) and function.__module__.startswith("deepagents."):
                agents = inspect.getclosurevars(function).nonlocals.get("subagent_graphs", {})
                yield from ((name, graph) for name, agent in agents.items() if (graph := _graph_of(agent)) is not None)


def _graph_of(runnable: Any) -> Any:
    """Returns the graph that a runnable is or has bound, or None."""
    while runnable is not None and not (hasattr(runnable, "nodes") and hasattr(runnable, "get_subgraphs")):
        runnable = getattr(runnable, "bound", None)
    return runnable


def _is_state(task: Any, graph: Any) -> bool:
    """Whether a task is the input of a graph: a mapping with channels of its state, or a custom object."""
    if isinstance(task, Mapping):
        return any(name in graph.channels for name in task)
    return not isinstance(task, (str, list, int, float))
