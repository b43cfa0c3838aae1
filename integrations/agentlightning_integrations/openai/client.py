"""The ``openai`` client: its calls are recorded, in chat, completions and responses, sync, async and streamed.

A client is an agent by itself too: one that makes one call for each task.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from openai import AsyncOpenAI, OpenAI
from wrapt import FunctionWrapper, wrap_function_wrapper  # type: ignore[import-untyped] # wrapt has no types

from agentlightning.errors import ConfigError
from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM
from agentlightning_integrations.framework.agent import FrameworkAgent
from agentlightning_integrations.framework.openai_client import async_client, carry_clients, sync_client

logger = logging.getLogger("agentlightning")

_WITH_HEADERS: Final = (
    ("openai.resources.chat.completions", "Completions.create"),
    ("openai.resources.chat.completions", "Completions.parse"),
    ("openai.resources.chat.completions", "AsyncCompletions.create"),
    ("openai.resources.chat.completions", "AsyncCompletions.parse"),
    ("openai.resources.completions", "Completions.create"),
    ("openai.resources.completions", "AsyncCompletions.create"),
    ("openai.resources.embeddings", "Embeddings.create"),
    ("openai.resources.embeddings", "AsyncEmbeddings.create"),
)
"""Methods whose instrumentation writes ``traceparent`` into the caller's ``extra_headers``."""
_WITH_INPUT: Final = (
    ("openai.resources.responses", "Responses.create"),
    ("openai.resources.responses", "Responses.parse"),
    ("openai.resources.responses", "AsyncResponses.create"),
    ("openai.resources.responses", "AsyncResponses.parse"),
)
"""Methods whose instrumentation writes into the caller's ``input``."""


def wrap_agent(agent: Any, options: WrapOptions) -> OpenAIClientAgent | None:
    """See the hook of this name."""
    if not isinstance(agent, (OpenAI, AsyncOpenAI)):
        return None
    carry_clients()
    return OpenAIClientAgent(agent, options)


class OpenAIClientAgent(FrameworkAgent[OpenAI | AsyncOpenAI]):
    """Makes one call for each task; the output is the completion, or the response.

    A task is a question, a list of messages, or the arguments of ``chat.completions.create`` (with ``messages``) or
    ``responses.create`` (with ``input``). The client has no model, so the resource ``llm`` is needed unless the
    arguments name one.
    """

    def texts(self) -> Mapping[str, str]:
        """``instructions``: what the model is told before the task, nothing to begin with."""
        return {"instructions": ""}

    def is_async(self) -> bool:
        """Whether the client is."""
        return isinstance(self.agent, AsyncOpenAI)

    def run(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        """Makes the call with the synchronous client."""
        with sync_client(llm) if llm is not None else contextlib.nullcontext(self.agent) as client:
            return _call(client, task, llm, texts.get("instructions"))

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        """Makes the call with the asynchronous client."""
        async with async_client(llm) if llm is not None else contextlib.nullcontext(self.agent) as client:
            return await _call(client, task, llm, texts.get("instructions"))


def _call(client: Any, task: Any, llm: LLM | None, instructions: str | None) -> Any:
    if isinstance(task, str):
        task = [{"role": "user", "content": task}]
    arguments = dict(task) if isinstance(task, Mapping) else {"messages": task}
    if not arguments.keys() & {"messages", "input"}:
        raise ConfigError(
            f"task {str(task)[:200]!r} has neither messages nor input; give a text, messages or the arguments of a "
            "call, or make it so with task_to_input"
        )
    if llm is not None:
        arguments.update(llm.sampling_parameters, model=llm.model)
    if "input" in arguments:
        if instructions:
            arguments["instructions"] = instructions
        return client.responses.create(**arguments)
    if instructions:
        arguments["messages"] = [{"role": "system", "content": instructions}, *arguments["messages"]]
    return client.chat.completions.create(**arguments)


def instrument(tracer_provider: Any) -> Callable[[], None]:
    """Has calls of the client recorded by a provider; returns what undoes it."""
    instrumentation = _Instrumentation()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of pydantic, about the instrumentation
        instrumentation.begin(tracer_provider)
    return instrumentation.undo


class _Instrumentation:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._original: dict[tuple[type, str], Any] = {}
        self._installed: dict[tuple[type, str], Any] = {}
        self._settings: dict[str, Any] = {}

    def undo(self) -> None:
        """Puts back every method that is still as we left it."""
        with self._lock:
            if not self._installed:
                return
            from opentelemetry.instrumentation.openai import OpenAIInstrumentor

            now = {place: vars(place[0]).get(place[1]) for place in self._installed}
            OpenAIInstrumentor().uninstrument()  # forgets some methods, and strips other people's wrappers off ours
            for (owner, name), wrapper in self._installed.items():
                value = now[owner, name]
                setattr(owner, name, self._original[owner, name] if value is wrapper else value)
            self._installed = {}
            self._restore_settings()

    def begin(self, tracer_provider: Any) -> None:
        """Wraps the client's methods."""
        from opentelemetry.instrumentation.openai import OpenAIInstrumentor
        from opentelemetry.instrumentation.openai.shared.config import Config
        from opentelemetry.metrics import NoOpMeterProvider

        self._settings = {name: value for name, value in vars(Config).items() if not name.startswith("_")}
        # Images stay in the messages: the default uploader makes it drop the whole prompt.
        instrumentor = OpenAIInstrumentor(upload_base64_image=None)
        if instrumentor.is_instrumented_by_opentelemetry:
            self._restore_settings()
            logger.info("openai is instrumented already; its spans are recorded if they use the global provider")
            return
        before = dict(_methods())
        instrumentor.instrument(tracer_provider=tracer_provider, meter_provider=NoOpMeterProvider())
        wrappers = {**dict.fromkeys(_WITH_HEADERS, _own_headers), **dict.fromkeys(_WITH_INPUT, _own_input)}
        for (module, method), wrapper in wrappers.items():
            try:
                wrap_function_wrapper(module, method, wrapper)
            except (ImportError, AttributeError):  # this version of openai does not have it
                continue
        for place, value in _methods():
            original = before[place] if place in before else _unwrap(value)  # the instrumentation imports some
            if original is not value:
                self._original[place], self._installed[place] = original, value

    def _restore_settings(self) -> None:
        """Making an instrumentor, of which there is one in a process, has changed its settings."""
        from opentelemetry.instrumentation.openai.shared.config import Config

        for name, value in self._settings.items():
            setattr(Config, name, value)


def _own_headers(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Gives each call headers of its own: callers share one dict among threads, and may pass None.

    What they say is not given is left out, because the instrumentation would complain about it.
    """
    kwargs = {name: value for name, value in kwargs.items() if type(value).__name__ not in ("Omit", "NotGiven")}
    kwargs["extra_headers"] = dict(kwargs.get("extra_headers") or {})
    return wrapped(*args, **kwargs)


def _own_input(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Gives each call an input of its own."""
    if isinstance(kwargs.get("input"), list):
        kwargs = {**kwargs, "input": [dict(item) if isinstance(item, dict) else item for item in kwargs["input"]]}
    return wrapped(*args, **kwargs)


def _unwrap(value: Any) -> Any:
    while isinstance(value, FunctionWrapper):
        value = value.__wrapped__
    return value


def _methods() -> Iterator[tuple[tuple[type, str], Any]]:
    """Every attribute of every class of the client's resources that are imported by now."""
    for name, module in sys.modules.copy().items():  # other threads import meanwhile
        if name.startswith("openai.resources"):
            for owner in list(vars(module).values()):
                if isinstance(owner, type) and owner.__module__ == name:
                    for attribute, value in list(vars(owner).items()):
                        yield (owner, attribute), value
