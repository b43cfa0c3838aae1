"""LangChain and LangGraph: runnables, agents of ``create_agent`` or ``create_react_agent``, and graphs."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import BaseMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable
from wrapt import wrap_function_wrapper  # type: ignore[import-untyped] # wrapt has no types

from agentlightning.errors import ConfigError
from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM
from agentlightning_integrations.framework.agent import FrameworkAgent
from agentlightning_integrations.framework.object_copy import ModelCache
from agentlightning_integrations.framework.span_tree import detach_ended
from agentlightning_integrations.framework.task import read_input
from agentlightning_integrations.langchain.prebuilt import read_name, read_system_prompt
from agentlightning_integrations.langchain.trace import instrument as instrument

_MODEL_METHODS: Final = "generate agenerate stream astream _chat_model_stream_v3 _achat_model_stream_v3".split()
"""Every call of a chat model passes one of these."""


def wrap_agent(agent: Any, options: WrapOptions) -> LangChainAgent | None:
    if not isinstance(agent, Runnable):
        return None
    with contextlib.suppress(ImportError):  # models of other vendors do not need openai
        importlib.import_module("agentlightning_integrations.framework.openai_client")  # registers how it is pickled
    return LangChainAgent(agent, options)


class LangChainAgent(FrameworkAgent[Runnable[Any, Any]]):
    """Runs a runnable with ``ainvoke``; the output is what it returns.

    A graph may reach its models in any way, such as through a global, and cannot be copied with other models. So chat
    models are replaced on each call, according to the context of the rollout.
    """

    def texts(self) -> Mapping[str, str]:
        """System prompts of agents, as ``writer.system_prompt``, and the messages of prompt templates.

        An agent without a name has ``system_prompt``; a subgraph has the name of its node. Prompt templates outside
        graphs are ``prompt.system``, ``prompt.human`` or just ``prompt``, the next ones ``prompt2.system`` and so on.
        """
        return {path: text for path, (text, _) in _find_texts(self.agent).items()}

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        """Runs the runnable on the task; a text becomes the user's message of a graph that has ``messages``."""
        found = _find_texts(self.agent)
        tuned = [(*found[path], text) for path, text in texts.items()]
        graph = _graph_of(self.agent)
        if graph is not None and "messages" in graph.channels and not _is_state(task, graph):
            given = read_input(task, "a graph without such channels")
            task = {"messages": given if isinstance(given, list) else [("user", str(given))]}
        _patch_models()
        async with _open_clients(llm) as clients:
            token = _overrides.set(_Overrides(llm, clients, tuned))
            try:
                return await self.agent.ainvoke(task)
            finally:
                _overrides.reset(token)
                detach_ended()  # LangChain ends its runs in other tasks


def _open_clients(llm: LLM | None) -> contextlib.AbstractAsyncContextManager[Any]:
    if llm is None:
        return contextlib.nullcontext()
    from agentlightning_integrations.framework.openai_client import open_clients

    return open_clients(llm)


class _Overrides:
    """The models, sampling parameters and texts of one rollout."""

    def __init__(self, llm: LLM | None, clients: Any, texts: list[tuple[str, PromptTemplate | None, str]]) -> None:
        self.parameters: Mapping[str, Any] = {} if llm is None else llm.sampling_parameters
        self.models = ModelCache(lambda model: model if llm is None else _redirect(model, llm, clients))
        self._messages = {old: new for old, template, new in texts if template is None}
        self._templates = {id(template): new for _, template, new in texts if template is not None}
        self._tuned: dict[int, SystemMessage] = {}

    def messages(self, messages: list[BaseMessage]) -> list[BaseMessage]:
        """Replaces the object's system prompts by the tuned ones."""
        return [self._tune(message) if isinstance(message, SystemMessage) else message for message in messages]

    def _tune(self, message: SystemMessage) -> SystemMessage:
        if isinstance(message.content, str) and id(message) not in self._tuned:  # one call passes here several times
            for old, new in self._messages.items():
                if old in message.content:  # a middleware may have added to it
                    message = message.model_copy(update={"content": message.content.replace(old, new)})
                    self._tuned[id(message)] = message
                    break
        return message

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


def _find_texts(runnable: Runnable[Any, Any]) -> dict[str, tuple[str, PromptTemplate | None]]:
    """The tunable texts by path, each with its prompt template; None for a system prompt of ``create_agent``."""
    found: dict[str, tuple[str, PromptTemplate | None]] = {}
    graph = _graph_of(runnable)
    if graph is not None:
        _add_system_prompts(graph, "", found)
        return found
    prompts = [prompt for prompt in runnable.get_prompts() if isinstance(prompt, (ChatPromptTemplate, PromptTemplate))]
    for number, prompt in enumerate(prompts, start=1):
        path = "prompt" if number == 1 else f"prompt{number}"
        if isinstance(prompt, PromptTemplate):
            found[path] = prompt.template, prompt
            continue
        for message in prompt.messages:
            template = getattr(message, "prompt", None)
            if isinstance(template, PromptTemplate):
                role = type(message).__name__.removesuffix("MessagePromptTemplate").lower()
                key, again = f"{path}.{role}", 2
                while key in found:
                    key, again = f"{path}.{role}{again}", again + 1
                found[key] = template.template, template
    return found


def _add_system_prompts(graph: Any, prefix: str, found: dict[str, tuple[str, PromptTemplate | None]]) -> None:
    name = read_name(graph) or prefix
    text = read_system_prompt(graph)
    if text is not None:
        found[f"{name}.system_prompt" if name else "system_prompt"] = text, None
    for node_name, inner in graph.get_subgraphs():
        _add_system_prompts(inner, node_name, found)


def _graph_of(runnable: Any) -> Any:
    """The graph that a runnable is or has bound, else None."""
    while runnable is not None and not (hasattr(runnable, "nodes") and hasattr(runnable, "get_subgraphs")):
        runnable = getattr(runnable, "bound", None)
    return runnable


def _is_state(task: Any, graph: Any) -> bool:
    """Whether a task is the input of a graph: a mapping with channels of its state, or an object of its own."""
    if isinstance(task, Mapping):
        return any(name in graph.channels for name in task)
    return not isinstance(task, (str, list, int, float))
