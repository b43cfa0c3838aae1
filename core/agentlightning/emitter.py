"""Emitters: record rewards, feedback, messages, objects, exceptions, annotations and operations of an agent.

Each emitter records a span in the caller's attempt and returns it. Outside a rollout it only returns the span, so that
an agent also runs without Lightning.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar, cast, overload

from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.frozen import to_number
from agentlightning.records import Span, TraceStatus
from agentlightning.tracer.tracer import OpenSpan, exception_attributes, flatten, get_active_tracer, running, to_json

P = ParamSpec("P")
R = TypeVar("R")

_MAX_ITEMS: Final = 1000  # recorded items of a generator


class Operation:
    """Records the spans of an operation; users create it with ``agentlightning.emitter.operation``."""

    def __init__(self, name: str | None, propagate: bool, attributes: Mapping[str, Any]) -> None:
        self._name = name
        self._propagate = propagate
        self._attributes = flatten(attributes)
        self._span: OpenSpan | None = None
        self._is_started = False
        self._running: contextlib.AbstractContextManager[OpenSpan | None] | None = None

    def __enter__(self) -> Operation:
        if self._running is not None:
            raise ConfigError("this operation is already running; create one for each `with`")
        self._span = self._start(self._name or "operation")
        self._running = contextlib.nullcontext() if self._span is None else running(self._span)
        self._running.__enter__()
        self._is_started = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered, self._running = self._running, None
        if entered is not None:
            entered.__exit__(kind, error, traceback)

    def set_input(self, *args: Any, **kwargs: Any) -> None:
        """Records the input: one value, or arguments as in a call."""
        value = args[0] if len(args) == 1 and not kwargs else {**({"args": args} if args else {}), **kwargs}
        self._set(semconv.OPERATION_INPUT, value)

    def set_output(self, value: Any) -> None:
        """Records the output."""
        self._set(semconv.OPERATION_OUTPUT, value)

    def _set(self, key: str, value: Any) -> None:
        if not self._is_started:
            raise ConfigError("the operation has not started; use it as `with operation(...) as op:`")
        if self._span is not None:
            self._span.set_attributes({key: to_json(value)})

    def _start(self, name: str) -> OpenSpan | None:
        tracer = get_active_tracer() if self._propagate else None
        if tracer is None:
            return None
        return tracer.start_span(semconv.SPAN_OPERATION, {semconv.OPERATION_NAME: name, **self._attributes})

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorates a function or generator function, sync or async."""
        if not callable(function):
            raise ConfigError(f"operation decorates a function, not {function!r}")
        name = self._name or str(getattr(function, "__qualname__", type(function).__qualname__))
        signature = inspect.signature(function)

        def begin(args: Any, kwargs: Any) -> OpenSpan | None:
            span = self._start(name)
            if span is not None:
                try:
                    given = dict(signature.bind(*args, **kwargs).arguments)
                except TypeError:  # the call itself will raise
                    given = {}
                given.pop("self", None)
                span.set_attributes({semconv.OPERATION_INPUT: to_json(given)})
            return span

        return cast(Callable[P, R], functools.wraps(function)(_make_wrapper(function, begin)))


def _make_wrapper(function: Any, begin: Callable[[Any, Any], OpenSpan | None]) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        follow: Callable[..., Any] = _follow if inspect.isgeneratorfunction(function) else _follow_async

        def call_generator(*args: Any, **kwargs: Any) -> Any:
            items = function(*args, **kwargs)
            span = begin(args, kwargs)
            return items if span is None else follow(items, span)

        return call_generator

    if inspect.iscoroutinefunction(function):

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            span = begin(args, kwargs)
            if span is None:
                return await function(*args, **kwargs)
            with running(span):
                result = await function(*args, **kwargs)
                span.set_attributes({semconv.OPERATION_OUTPUT: to_json(result)})
            return result

        return call_async

    def call(*args: Any, **kwargs: Any) -> Any:
        span = begin(args, kwargs)
        if span is None:
            return function(*args, **kwargs)
        with running(span):
            result = function(*args, **kwargs)
            span.set_attributes({semconv.OPERATION_OUTPUT: to_json(result)})
        return result

    return call


# A generator shares its context variables with its consumer, so the span is active only while the generator runs.


def _follow(generator: Generator[Any, Any, Any], span: OpenSpan) -> Generator[Any, Any, Any]:
    items: list[Any] = []
    resume: Callable[[], Any] = functools.partial(next, generator)
    with _ending(span, items):
        while True:
            with span.active():
                try:
                    item = resume()
                except StopIteration as stop:
                    return stop.value
            if len(items) < _MAX_ITEMS:
                items.append(item)
            try:
                resume = functools.partial(generator.send, (yield item))
            except BaseException as error:  # thrown in by the consumer: the generator decides
                resume = functools.partial(generator.throw, error)


async def _follow_async(generator: AsyncGenerator[Any, Any], span: OpenSpan) -> AsyncGenerator[Any, Any]:
    items: list[Any] = []
    resume: Callable[[], Any] = functools.partial(anext, generator)
    with _ending(span, items):
        while True:
            with span.active():
                try:
                    item = await resume()
                except StopAsyncIteration:
                    return
            if len(items) < _MAX_ITEMS:
                items.append(item)
            try:
                resume = functools.partial(generator.asend, (yield item))
            except BaseException as error:  # thrown in by the consumer: the generator decides
                resume = functools.partial(generator.athrow, error)


@contextlib.contextmanager
def _ending(span: OpenSpan, items: list[Any]) -> Generator[None]:
    try:
        yield
    except GeneratorExit:  # the consumer stopped iterating
        raise
    except BaseException as error:
        span.record_exception(error)
        raise
    finally:
        span.set_attributes({semconv.OPERATION_OUTPUT: to_json(items)})
        span.end()


logger = logging.getLogger("agentlightning")

_warned_untraced: Final = threading.Event()


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> Span:
    """Records a reward; the last reward of an attempt is its final reward.

    Args:
        reward: a number, or several by name. Decimals, fractions, and arrays or tensors of one element are numbers.
        primary_key: the name of the main reward; required if there are several.
        attributes: further attributes, such as ``semconv.link_attributes`` of the rewarded model call.
        propagate: False returns the span without recording it, for an agent that returns its spans.

    Raises:
        ConfigError: the reward is not a number from -1e30 to 1e30, the mapping is empty, or ``primary_key`` is unknown.
    """
    if isinstance(reward, Mapping):
        values = {str(name): _to_number(value, f"reward {name!r}") for name, value in reward.items()}
        if primary_key is None and len(values) == 1:
            (primary_key,) = values
        if primary_key is None or primary_key not in values:
            known = ", ".join(values) or "none given"
            raise ConfigError(f"primary_key = {primary_key!r}: give the name of the main reward, one of: {known}")
        values = {primary_key: values.pop(primary_key), **values}
    else:
        values = {primary_key or "primary": _to_number(reward, "reward")}
    content: dict[str, Any] = {}
    for i, (name, value) in enumerate(values.items()):
        content[f"{semconv.REWARD}.{i}.name"] = name
        content[f"{semconv.REWARD}.{i}.value"] = value
    return _emit(semconv.SPAN_REWARD, content, attributes, propagate)


def emit_feedback(text: str, *, prompt: str | None = None) -> Span:
    """Records why a result is good or bad, for the models that improve the agent's prompts.

    Args:
        text: such as a test's output, or what the right answer is.
        prompt: the name of the prompt that the feedback is about; None: all prompts of the agent.

    Raises:
        ConfigError: the text or the name is not a text, or is empty.
    """
    for name, value in {"text": text, "prompt": prompt}.items():
        if not (isinstance(value, str) and value.strip()) and (name == "text" or value is not None):
            raise ConfigError(f"emit_feedback: {name} = {value!r}: a text that is not empty is needed")
    about = {} if prompt is None else {semconv.FEEDBACK_PROMPT: prompt}
    return _emit(semconv.SPAN_FEEDBACK, {semconv.FEEDBACK_TEXT: text, **about}, None, True)


def emit_state(**variables: Any) -> Span:
    """Records a snapshot of the agent's semantic variables, such as the question, the documents found and the draft.

    Variables that a later call does not name keep their values. Critics of prompts, the dashboard and the adapter
    ``transition`` read them. Values are recorded as by ``emit_object``.
    """
    if not variables:
        raise ConfigError("emit_state: name at least one variable, as in emit_state(question=question, draft=draft)")
    return _emit(semconv.SPAN_STATE, {semconv.STATE: to_json(variables)}, None, True)


def emit_message(text: str, *, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> Span:
    """Records a text message."""
    if not isinstance(text, str):
        raise ConfigError(f"emit_message takes a str, not {text!r}; use emit_object for anything else")
    return _emit(semconv.SPAN_MESSAGE, {semconv.MESSAGE_BODY: text}, attributes, propagate)


def emit_object(obj: Any, *, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> Span:
    """Records a value: scalars unchanged, bytes as base64, anything else as JSON, or as its ``repr`` if that fails."""
    content: dict[str, Any] = {semconv.OBJECT_TYPE: type(obj).__qualname__}
    if isinstance(obj, (str, int, float)):
        content[semconv.OBJECT_LITERAL] = obj
    elif isinstance(obj, (bytes, bytearray, memoryview)):
        content[semconv.OBJECT_LITERAL] = base64.b64encode(obj).decode()
    else:
        content[semconv.OBJECT_JSON] = to_json(obj)
    return _emit(semconv.SPAN_OBJECT, content, attributes, propagate)


def emit_exception(
    error: BaseException, *, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> Span:
    """Records an exception that the agent handled, with its traceback."""
    if not isinstance(error, BaseException):
        raise ConfigError(f"emit_exception takes an exception, not {error!r}")
    status = TraceStatus(status_code="ERROR", description=f"{type(error).__name__}: {error}")
    return _emit(semconv.SPAN_EXCEPTION, exception_attributes(error), attributes, propagate, status)


def emit_annotation(annotation: Mapping[str, Any], *, propagate: bool = True) -> Span:
    """Records attributes; nested mappings get dotted names."""
    return _emit(semconv.SPAN_ANNOTATION, {}, annotation, propagate)


@overload
def operation(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def operation(*, name: str | None = None, propagate: bool = True, **attributes: Any) -> Operation: ...
def operation(
    fn: Callable[P, R] | None = None, /, *, name: str | None = None, propagate: bool = True, **attributes: Any
) -> Callable[P, R] | Operation:
    """Records a function or a ``with`` block as one span with name, input, output and exception.

        @operation
        def search(query: str) -> list[str]: ...

        with operation(name="search", index="wiki") as op:
            op.set_input(query)
            op.set_output(results)

    Supports functions and generators, sync and async. Outside a rollout, or with ``propagate=False``, nothing is
    recorded. The name is the function's by default; ``attributes`` are added to every span.
    """
    described = Operation(name, propagate, attributes)
    return described if fn is None else described(fn)


def agent(name: str) -> Operation:
    """Names the agent of all model calls and tools of a ``with`` block or a function, as ``agent_match`` selects it.

        with agent("writer"):
            draft = write(task)

    An agent inside, as a framework may record it, keeps its own name.
    """
    if not str(name).strip():
        raise ConfigError(f"agent: name = {name!r}: a text that is not empty is needed")
    return Operation(name, True, {semconv.GEN_AI_OPERATION_NAME: "invoke_agent", semconv.GEN_AI_AGENT_NAME: name})


def _emit(
    name: str,
    content: Mapping[str, Any],
    attributes: Mapping[str, Any] | None,
    propagate: bool,
    status: TraceStatus | None = None,
) -> Span:
    content = {**flatten(attributes or {}), **content}
    tracer = get_active_tracer() if propagate else None
    if tracer is not None:
        return tracer.create_span(name, content, status=status)
    if propagate and not _warned_untraced.is_set():
        _warned_untraced.set()
        logger.warning("%s was emitted outside a rollout, so it is not recorded (warned once)", name)
    return Span.from_attributes(name=name, attributes=content, status=status)


def _to_number(value: Any, what: str) -> float:
    number = to_number(value)
    if number is None:
        raise ConfigError(f"{what} = {value!r} is not a number")
    if not abs(number) <= semconv.MAX_REWARD:  # also refuses NaN
        raise ConfigError(f"{what} = {number!r}: a reward is a finite number, from -1e30 to 1e30")
    return number
