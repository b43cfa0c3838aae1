"""Operations: record a function or a ``with`` block as one span."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar, cast

from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.tracer.attribute import flatten, to_json
from agentlightning.tracer.tracer import OpenSpan, get_active_tracer, running

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
