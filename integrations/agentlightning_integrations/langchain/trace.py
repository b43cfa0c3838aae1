"""LangChain's callbacks as spans: graphs, their nodes, tools and model calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage, SystemMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.tracers import context as langchain_context
from opentelemetry import trace as otel

from agentlightning import semconv
from agentlightning.tracer.tracer import to_json
from agentlightning_integrations.shared.span_tree import OPERATION, TOOL_RESULT, SpanTree, to_text
from agentlightning_plugins.shared.instrumentation import OnImport, Patches

_AGENT_NAME: Final = "lc_agent_name"
_INTEGRATION: Final = "ls_integration"
_CREATE_AGENT: Final = "langchain_create_agent"
"""The metadata that ``create_agent`` gives its runs since LangChain 1.2."""
_AGENTS: Final = (_CREATE_AGENT, "deepagents")


def read_name(graph: Any) -> str | None:
    """The name that an agent was given; None for a graph of another kind."""
    if _model_node(graph) is None or graph.name == "LangGraph":  # the default name
        return None
    return str(graph.name)


def read_system_prompt(graph: Any) -> SystemMessage | str | None:
    """An agent's system prompt; None if it has none, or if a function makes it.

    A message is the very object that the agent sends, unless a middleware replaces it; a text becomes a new message.
    """
    function = _model_node(graph)
    if function is None:
        return None
    variables: Mapping[str, Any] = inspect.getclosurevars(function).nonlocals
    found = variables.get("system_message", variables.get("system_prompt"))  # a text before LangChain 1.1
    sequence = variables.get("static_model", variables.get("model_runnable"))  # of create_react_agent
    if (make_messages := getattr(getattr(sequence, "first", None), "func", None)) is not None:
        variables = inspect.getclosurevars(make_messages).nonlocals
        found = variables.get("_system_message", variables.get("prompt"))
    return found if isinstance(found, (SystemMessage, str)) else None


def _model_node(graph: Any) -> Callable[..., Any] | None:
    """The function that calls the model of an agent."""
    for name in ("model", "agent"):
        function = getattr(getattr(graph.nodes.get(name), "bound", None), "func", None)
        if inspect.isfunction(function) and function.__qualname__.startswith(("create_agent.", "create_react_agent.")):
            return function
    return None


def _mark_agents() -> Callable[[], None]:
    """Adds the metadata of ``create_agent`` to the runs of every agent, whichever version built the agent."""
    from langgraph.pregel import Pregel

    def mark(wrapped: Callable[..., Any], graph: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if _model_node(graph) is None or _INTEGRATION in ((graph.config or {}).get("metadata") or {}):
            return wrapped(*args, **kwargs)
        given, config, *rest = args if len(args) > 1 else (args[0] if args else kwargs.pop("input"), None)
        config = kwargs.pop("config", None) or config or {}
        name = read_name(graph)
        mine = {_INTEGRATION: _CREATE_AGENT, **({} if name is None else {_AGENT_NAME: name})}
        return wrapped(given, {**config, "metadata": {**(config.get("metadata") or {}), **mine}}, *rest, **kwargs)

    patches = Patches()
    for name in ("stream", "astream"):
        patches.wrap(Pregel, name, mark)
    return patches.undo


def instrument(tracer_provider: Any) -> Callable[[], None]:
    """Attaches a handler to every run of a runnable by a hook of LangChain; returns a function that detaches it."""
    handler = handler_of(tracer_provider)
    everywhere: ContextVar[Any] = ContextVar("agentlightning_langchain_handler", default=handler)
    langchain_context.register_configure_hook(everywhere, inheritable=True)
    agents = OnImport("langgraph.pregel", _mark_agents)

    def undo() -> None:
        agents.undo()
        hooks = langchain_context._configure_hooks
        hooks[:] = [hook for hook in hooks if hook[0] is not everywhere]
        handler.clear()

    return undo


@functools.cache
def handler_of(tracer_provider: Any) -> SpanHandler:
    """Returns a provider's handler, always the same one: LangChain attaches the same handler only once to a run."""
    return SpanHandler(otel.get_tracer("agentlightning.langchain", tracer_provider=tracer_provider))


class SpanHandler(BaseCallbackHandler):
    """Records LangChain's runs as spans, except for prompts, parsers and sequences.

    An agent is a named ``create_agent`` or ``create_react_agent``, a node of any other graph, or else the graph itself.
    """

    run_inline = True  # in the caller's context, so that inner spans become children

    def __init__(self, tracer: otel.Tracer) -> None:
        self._spans = SpanTree(tracer)

    def clear(self) -> None:
        self._spans.clear()

    def on_chain_start(
        self, serialized: dict[str, Any], inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **info: Any
    ) -> None:
        name, metadata = str(info.get("name") or ""), info.get("metadata") or {}
        is_node = any(tag.startswith("graph:step:") for tag in info.get("tags") or ())
        if name in ("__start__", "__end__"):
            self._spans.omit(run_id, parent_run_id)
        elif is_node and metadata.get("langgraph_node") == name:
            is_agent = metadata.get(_INTEGRATION) not in _AGENTS
            attributes = {"langchain.chain.type": name} if is_agent else {}
            if isinstance(inputs, Mapping) and (state := {key: inputs[key] for key in inputs if key != "messages"}):
                attributes[semconv.STATE] = to_json(state)  # the model is given the messages
            self._spans.begin(run_id, f"node {name}", attributes, parent_run_id)
        elif name and name in (metadata.get(_AGENT_NAME), "LangGraph"):
            self._spans.begin_agent(run_id, name, parent_run_id)
        else:
            self._spans.omit(run_id, parent_run_id)

    def on_tool_start(
        self,
        serialized: dict[str, Any],
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **info: Any,
    ) -> None:
        name = str((serialized or {}).get("name") or info.get("name") or "tool")
        inputs = info.get("inputs")
        arguments = input_str if inputs is None else to_json(inputs)
        self._spans.begin_tool(run_id, name, parent_run_id, arguments, info.get("tool_call_id"))

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **info: Any,
    ) -> None:
        attributes = {
            OPERATION: "chat",
            semconv.GEN_AI_REQUEST_MODEL: (info.get("metadata") or {}).get("ls_model_name"),
            semconv.GEN_AI_INPUT_MESSAGES: to_json(_to_messages(messages[0] if messages else ())),
        }
        self._spans.begin(run_id, "chat", attributes, parent_run_id)

    def on_llm_start(
        self,
        serialized: dict[str, Any],
        prompts: list[str],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **info: Any,
    ) -> None:
        messages = [{"role": "user", "content": prompt} for prompt in prompts]
        attributes = {OPERATION: "text_completion", semconv.GEN_AI_INPUT_MESSAGES: to_json(messages)}
        self._spans.begin(run_id, "text_completion", attributes, parent_run_id)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **info: Any) -> None:
        self._spans.end(run_id)

    def on_tool_end(self, output: Any, *, run_id: UUID, **info: Any) -> None:
        self._spans.end(run_id, {TOOL_RESULT: to_text(getattr(output, "content", output))})

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **info: Any) -> None:
        self._spans.end(run_id, _answer_attributes(response))

    def _on_error(self, error: BaseException, *, run_id: UUID, **info: Any) -> None:
        self._spans.end(run_id, error=error)

    on_chain_error = on_tool_error = on_llm_error = _on_error


def _answer_attributes(response: LLMResult) -> Mapping[str, Any]:
    generations = response.generations[0] if response.generations else []
    messages = [generation.message for generation in generations if isinstance(generation, ChatGeneration)]
    completions = [{"role": "assistant", "content": generation.text} for generation in generations]
    about = dict(messages[0].response_metadata) if messages else dict(response.llm_output or {})
    usage = getattr(messages[0], "usage_metadata", None) or {} if messages else {}
    reasons = [message.response_metadata.get("finish_reason") for message in messages]
    return {
        semconv.GEN_AI_OUTPUT_MESSAGES: to_json(_to_messages(messages) if messages else completions),
        semconv.GEN_AI_RESPONSE_ID: about.get("id"),
        semconv.GEN_AI_RESPONSE_MODEL: about.get("model_name"),
        semconv.GEN_AI_FINISH_REASONS: [reason for reason in reasons if reason] or None,
        semconv.GEN_AI_INPUT_TOKENS: usage.get("input_tokens"),
        semconv.GEN_AI_OUTPUT_TOKENS: usage.get("output_tokens"),
    }


def _to_messages(messages: Sequence[BaseMessage]) -> list[Any]:
    return [convert_to_openai_messages(message) for message in messages]
