"""The ``openai`` client: records its calls (chat, completions, responses and embeddings; sync, async and streamed).

A client can also be used as an agent, which makes one call for each task.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from openai import AsyncOpenAI, OpenAI
from openai import BaseModel as OpenAIModel
from pydantic import BaseModel
from wrapt import ObjectProxy, wrap_function_wrapper  # type: ignore[import-untyped] # wrapt has no types

from agentlightning.errors import PluginImportError
from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM
from agentlightning_integrations.shared.agent import FrameworkAgent, read_input
from agentlightning_integrations.shared.openai_client import async_client, http_package, sync_client
from agentlightning_plugins.shared.instrumentation import Patches, instrument_and_restore

logger = logging.getLogger("agentlightning")
_MAX_RESPONSES: Final = 1000
_completing: Final = threading.Lock()


def wrap_agent(agent: Any, options: WrapOptions) -> OpenAIClientAgent | None:
    return OpenAIClientAgent(agent, options) if isinstance(agent, (OpenAI, AsyncOpenAI)) else None


class OpenAIClientAgent(FrameworkAgent[OpenAI | AsyncOpenAI]):
    """Makes one call for each task; the output is the completion, or the response.

    A task is a question, a list of messages, or the arguments of ``chat.completions.create`` (with ``messages``) or
    ``responses.create`` (with ``input``); other fields are for the reward function. The client has no model, so the
    resource ``llm`` is needed unless the arguments name a model.
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
    if not isinstance(task, Mapping) or task.keys() & {"question", "messages", "input"} not in (
        {"messages"},
        {"input"},
    ):
        task = read_input(task, "a client of OpenAI")
    if isinstance(task, str):
        task = [{"role": "user", "content": task}]
    given = task if isinstance(task, Mapping) else {"messages": task}
    create = client.responses.create if "input" in given else client.chat.completions.create
    known = inspect.signature(create).parameters
    arguments = {name: value for name, value in given.items() if name in known}
    if llm is not None:
        arguments.update(llm.sampling_parameters, model=llm.model)
    if instructions and "input" in arguments:
        arguments["instructions"] = instructions
    elif instructions:
        arguments["messages"] = [{"role": "system", "content": instructions}, *arguments["messages"]]
    return create(**arguments)


def instrument(tracer_provider: Any) -> Callable[[], object]:
    """Makes a provider record the calls of the client; returns a function that undoes it.

    Raises:
        PluginImportError: the instrumentation needs another version of OpenTelemetry.
    """
    try:
        from opentelemetry.instrumentation.openai import OpenAIInstrumentor
        from opentelemetry.instrumentation.openai.shared.config import Config
        from opentelemetry.metrics import NoOpMeterProvider
    except ImportError as error:  # 0.48.0 and 0.48.1 import a module that opentelemetry-api 1.44 has removed
        installed = ("opentelemetry-instrumentation-openai", "opentelemetry-api")
        both = " and ".join(f"{name} {importlib.metadata.version(name)}" for name in installed)
        raise PluginImportError(
            f"{both} do not work together ({error}). Install with: pip install --upgrade {' '.join(installed)}"
        ) from error

    patches = Patches()
    settings = {name: value for name, value in vars(Config).items() if not name.startswith("_")}

    def restore_settings() -> None:
        """Restores the settings that the constructor of the instrumentor, a singleton, has changed."""
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
            warnings.simplefilter("ignore", DeprecationWarning)  # pydantic warns about the instrumentation
            instrumentor.instrument(tracer_provider=tracer_provider, meter_provider=NoOpMeterProvider())
            from opentelemetry.instrumentation.openai.v1 import responses_wrappers

            patches.replace(responses_wrappers, "responses", _RecentResponses())
            _wrap_parse(tracer_provider)
        for module, method, wrapper in _COPIES:
            for name in (method, f"Async{method}"):
                with contextlib.suppress(ImportError, AttributeError):  # this version of openai does not have it
                    wrap_function_wrapper(f"openai.resources.{module}", name, _record_parsed)
                    wrap_function_wrapper(f"openai.resources.{module}", name, wrapper)
        patches.wrap(responses_wrappers.ResponseStream, "_ensure_cleanup", _finish_stream)
        patches.wrap(OpenAIModel, "construct", _complete_first)
        _make_cheap(patches)
        transports = importlib.import_module(f"{http_package()}._transports.default")
        if "create_ssl_context" in vars(transports):
            patches.wrap(transports, "create_ssl_context", _share_context)

    def end() -> None:
        instrumentor.uninstrument()  # misses some methods, and removes wrappers of other code around ours
        patches.undo()
        restore_settings()

    return instrument_and_restore("openai.resources", begin, end)


class _RecentResponses(dict[str, Any]):
    """Keeps the last responses for the instrumentation, because a program may retrieve one again.

    The instrumentation's own dict grows with each response. Older versions fail on stored responses without tools, and
    pydantic warns about parsed answers.
    """

    def __setitem__(self, response_id: str, data: Any) -> None:
        data.tools = data.tools or []
        blocks = (data.output_blocks or {}).items()
        data.output_blocks = {key: _dump(block) if isinstance(block, BaseModel) else block for key, block in blocks}
        super().__setitem__(response_id, data)
        with contextlib.suppress(KeyError, StopIteration, RuntimeError):  # another thread was faster
            if len(self) > _MAX_RESPONSES:
                del self[next(iter(self))]


def _wrap_parse(tracer_provider: Any) -> None:
    """Records ``responses.parse``, which older versions of the instrumentation do not record."""
    from openai.resources import responses as resources
    from opentelemetry import trace as otel
    from opentelemetry.instrumentation.openai.v1 import responses_wrappers as wrappers

    tracer = otel.get_tracer("opentelemetry.instrumentation.openai.v1", tracer_provider=tracer_provider)
    kinds = (
        (resources.Responses, wrappers.responses_get_or_create_wrapper),
        (resources.AsyncResponses, wrappers.async_responses_get_or_create_wrapper),
    )
    for cls, make_wrapper in kinds:
        if not isinstance(vars(cls)["parse"], ObjectProxy):
            wrap_function_wrapper(cls, "parse", make_wrapper(tracer))


def _make_cheap(patches: Patches) -> None:
    """Replaces helpers of the instrumentation that take as long as a call of the client itself, or that warn.

    The instrumentation starts an event loop, with sockets, for each synchronous call, and parses the version of
    ``openai`` many times; pydantic warns about each parsed answer that the instrumentation reads.
    """
    from opentelemetry.instrumentation.openai import shared, utils

    cheap: dict[Any, Any] = {utils.run_async: _result_of}
    for name in ("is_openai_v1", "is_reasoning_supported"):
        if (function := getattr(utils, name, None)) is not None:
            cheap[function] = functools.cache(function)
    if (to_dict := getattr(shared, "model_as_dict", None)) is not None:
        cheap[to_dict] = functools.partial(_to_dict, to_dict)
    package = utils.__name__.rpartition(".")[0]
    for module in [module for name, module in list(sys.modules.items()) if name.startswith(package)]:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value in cheap:
                patches.replace(module, name, cheap[value])


_contexts: dict[tuple[Any, ...], Any] = {}


def _share_context(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Gives clients with default settings one TLS context.

    A client takes 20 ms to read all certificates of authorities, also for an http address, and many agents make a
    client in each rollout.
    """
    chosen = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    if chosen.get("verify", True) is not True or chosen.get("cert") is not None:
        return wrapped(*args, **kwargs)
    key = chosen.get("trust_env", True), os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    if key not in _contexts:
        _contexts[key] = wrapped(*args, **kwargs)
    return _contexts[key]


def _record_parsed(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Records a call of ``with_streaming_response`` or a stream of ``with_raw_response`` when its answer is parsed.

    OpenAI Agents streams in this way. The instrumentation records calls that return an answer or a stream of events,
    but these calls return an HTTP response whose ``parse`` returns one of them. So it is given ``parse``.
    """
    record = getattr(wrapped, "_self_wrapper", None)
    raw = (kwargs.get("extra_headers") or {}).get("X-Stainless-Raw-Response")
    if record is None or not (raw == "stream" or (raw and kwargs.get("stream"))):
        return wrapped(*args, **kwargs)

    made = wrapped.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined] # set by the instrumentation
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


def _to_dict(original: Callable[[Any], Any], model: Any) -> Any:
    if not isinstance(model, BaseModel):
        return original(model)
    content = _dump(model)
    if isinstance(usage := content.get("usage"), dict):  # the instrumentation fails on details that are None
        content["usage"] = {name: value for name, value in usage.items() if value is not None}
    return content


def _dump(model: BaseModel) -> dict[str, Any]:
    """Returns the content of a model, without warnings."""
    _complete(type(model))
    return model.model_dump(warnings=False)


def _complete_first(wrapped: Callable[..., Any], cls: type[BaseModel], args: Any, kwargs: dict[str, Any]) -> Any:
    _complete(cls)
    return wrapped(*args, **kwargs)


def _complete(cls: type[BaseModel]) -> None:
    """Completes a model before its first use, which several threads may make at the same time.

    Models of openai are completed at their first use (openai/openai-python#3079). Until then, other threads find a
    model without fields, or one that raises a PydanticUserError.
    """
    if not cls.__pydantic_complete__:
        with _completing:
            cls.model_rebuild(raise_errors=False)


async def _returning(value: Any) -> Any:
    return value


def _result_of(coroutine: Any) -> Any:
    """Returns the result of a coroutine that does not wait for anything; the instrumentation waits only for uploads."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the coroutine waits")


def _finish_stream(wrapped: Callable[..., Any], stream: Any, args: Any, kwargs: Any) -> Any:
    """Records the answer of a stream that is closed after its last event, without requesting another event."""
    if stream._complete_response_data is not None:
        stream._process_complete_response()
    return wrapped(*args, **kwargs)


def _copy_headers(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Gives each call its own headers: callers share one dict among threads, and may pass None."""
    kwargs = _drop_not_given(kwargs)
    kwargs["extra_headers"] = dict(kwargs.get("extra_headers") or {})
    return wrapped(*args, **kwargs)


def _copy_input(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Gives each call its own input."""
    kwargs = _drop_not_given(kwargs)
    if isinstance(kwargs.get("input"), list):
        kwargs["input"] = [dict(item) if isinstance(item, dict) else item for item in kwargs["input"]]
    return wrapped(*args, **kwargs)


def _drop_not_given(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Removes arguments marked as not given: the instrumentation logs a warning about them, or fails."""
    return {name: value for name, value in kwargs.items() if type(value).__name__ not in ("Omit", "NotGiven")}


_COPIES: Final = (
    ("chat.completions", "Completions.create", _copy_headers),
    ("chat.completions", "Completions.parse", _copy_headers),
    ("completions", "Completions.create", _copy_headers),
    ("embeddings", "Embeddings.create", _copy_headers),
    ("responses", "Responses.create", _copy_input),
    ("responses", "Responses.parse", _copy_input),
)
"""Methods whose instrumentation writes into the caller's ``extra_headers`` or ``input``."""
