"""The ``openai`` client: records its calls (chat, completions, responses and embeddings; sync, async and streamed).

A client can also be used as an agent, which makes one call for each task.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from openai import AsyncOpenAI, OpenAI
from wrapt import wrap_function_wrapper  # type: ignore[import-untyped] # wrapt has no types

from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM
from agentlightning_integrations.framework.agent import FrameworkAgent
from agentlightning_integrations.framework.openai_client import async_client, sync_client
from agentlightning_integrations.framework.task import read_input
from agentlightning_plugins.instrumentation import Patches, instrument_and_restore

logger = logging.getLogger("agentlightning")


def wrap_agent(agent: Any, options: WrapOptions) -> OpenAIClientAgent | None:
    return OpenAIClientAgent(agent, options) if isinstance(agent, (OpenAI, AsyncOpenAI)) else None


class OpenAIClientAgent(FrameworkAgent[OpenAI | AsyncOpenAI]):
    """Makes one call for each task; the output is the completion, or the response.

    A task is a question, a list of messages, or the arguments of ``chat.completions.create`` (with ``messages``) or
    ``responses.create`` (with ``input``). The client has no model, so the resource ``llm`` is needed unless the
    arguments name one.
    """

    def texts(self) -> Mapping[str, str]:
        """``instructions``: the system prompt, empty by default."""
        return {"instructions": ""}

    def is_async(self) -> bool:
        return isinstance(self.agent, AsyncOpenAI)

    def run(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        with sync_client(llm) if llm is not None else contextlib.nullcontext(self.agent) as client:
            return _call(client, task, llm, texts.get("instructions"))

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        async with async_client(llm) if llm is not None else contextlib.nullcontext(self.agent) as client:
            return await _call(client, task, llm, texts.get("instructions"))


def _call(client: Any, task: Any, llm: LLM | None, instructions: str | None) -> Any:
    if not isinstance(task, Mapping) or not task.keys() & {"messages", "input"}:
        task = read_input(task, "a client of OpenAI")
    if isinstance(task, str):
        task = [{"role": "user", "content": task}]
    arguments = dict(task) if isinstance(task, Mapping) else {"messages": task}
    if llm is not None:
        arguments.update(llm.sampling_parameters, model=llm.model)
    if "input" in arguments:
        if instructions:
            arguments["instructions"] = instructions
        return client.responses.create(**arguments)
    if instructions:
        arguments["messages"] = [{"role": "system", "content": instructions}, *arguments["messages"]]
    return client.chat.completions.create(**arguments)


def instrument(tracer_provider: Any) -> Callable[[], object]:
    """Has a provider record the calls of the client; returns what undoes it."""
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor
    from opentelemetry.instrumentation.openai.shared.config import Config
    from opentelemetry.metrics import NoOpMeterProvider

    streams = Patches()
    settings = {name: value for name, value in vars(Config).items() if not name.startswith("_")}

    def restore_settings() -> None:
        """Undoes what the constructor of the instrumentor, a singleton, has changed."""
        for name, value in settings.items():
            setattr(Config, name, value)

    # Images stay in the messages: with the default uploader the whole prompt is dropped.
    instrumentor = OpenAIInstrumentor(upload_base64_image=None)
    if instrumentor.is_instrumented_by_opentelemetry:
        restore_settings()
        logger.info("openai is instrumented already; its spans are recorded if they use the global provider")
        return lambda: None

    def begin() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of pydantic, about the instrumentation
            instrumentor.instrument(tracer_provider=tracer_provider, meter_provider=NoOpMeterProvider())
            from opentelemetry.instrumentation.openai.v1.responses_wrappers import ResponseStream

        for module, method, wrapper in _COPIES:
            for name in (method, f"Async{method}"):
                with contextlib.suppress(ImportError, AttributeError):  # this version of openai does not have it
                    wrap_function_wrapper(f"openai.resources.{module}", name, _record_parsed)
                    wrap_function_wrapper(f"openai.resources.{module}", name, wrapper)
        streams.wrap(ResponseStream, "_ensure_cleanup", _finish_stream)

    def end() -> None:
        instrumentor.uninstrument()  # misses some methods, and removes wrappers of other code around ours
        streams.undo()
        restore_settings()

    return instrument_and_restore("openai.resources", begin, end)


def _record_parsed(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Records a call of ``with_streaming_response`` or a stream of ``with_raw_response`` when its answer is parsed.

    OpenAI Agents streams like that. The instrumentation records calls that return an answer or a stream of events, but
    these return an HTTP response, whose ``parse`` returns either. So it gets a call that returns what ``parse`` does.
    """
    record = getattr(wrapped, "_self_wrapper", None)
    raw = (kwargs.get("extra_headers") or {}).get("X-Stainless-Raw-Response")
    if record is None or not (raw == "stream" or (raw and kwargs.get("stream"))):
        return wrapped(*args, **kwargs)

    made = wrapped.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined] # by the instrumentation
    is_async = inspect.isawaitable(made)

    def record_parse(response: Any) -> Any:
        parse = response.parse

        def recorded(**settings: Any) -> Any:
            response.parse = parse  # once
            answer = parse(**settings)
            if inspect.isawaitable(answer) or not is_async:
                return record(lambda *_, **__: answer, instance, args, kwargs)
            return _result_of(record(lambda *_, **__: _returning(answer), instance, args, kwargs))

        response.parse = recorded
        return response

    async def call() -> Any:
        return record_parse(await made)

    return call() if is_async else record_parse(made)


async def _returning(value: Any) -> Any:
    return value


def _result_of(coroutine: Any) -> Any:
    """Returns the result of a coroutine that does not wait for anything."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the coroutine waits")


def _finish_stream(wrapped: Callable[..., Any], stream: Any, args: Any, kwargs: Any) -> Any:
    """Records the answer of a stream that is closed after its last event, without asking for one more."""
    if stream._complete_response_data is not None:
        stream._process_complete_response()
    return wrapped(*args, **kwargs)


def _copy_headers(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Gives each call its own headers: callers share one dict among threads, and may pass None.

    Drops arguments marked as not given, because the instrumentation would log a warning about them.
    """
    kwargs = {name: value for name, value in kwargs.items() if type(value).__name__ not in ("Omit", "NotGiven")}
    kwargs["extra_headers"] = dict(kwargs.get("extra_headers") or {})
    return wrapped(*args, **kwargs)


def _copy_input(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Gives each call its own input."""
    if isinstance(kwargs.get("input"), list):
        kwargs = {**kwargs, "input": [dict(item) if isinstance(item, dict) else item for item in kwargs["input"]]}
    return wrapped(*args, **kwargs)


_COPIES: Final = (
    ("chat.completions", "Completions.create", _copy_headers),
    ("chat.completions", "Completions.parse", _copy_headers),
    ("completions", "Completions.create", _copy_headers),
    ("embeddings", "Embeddings.create", _copy_headers),
    ("responses", "Responses.create", _copy_input),
    ("responses", "Responses.parse", _copy_input),
)
"""Methods whose instrumentation writes into the caller's ``extra_headers`` or ``input``."""
