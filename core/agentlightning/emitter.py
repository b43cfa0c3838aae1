"""Emitters: record rewards, messages, objects, exceptions, annotations and operations of an agent.

Each emitter records a span in the caller's attempt and returns it. Outside a rollout it only returns the span, so that
an agent also runs without Lightning.
"""

from __future__ import annotations

import base64
import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, ParamSpec, TypeVar, overload

from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.records import Span, TraceStatus
from agentlightning.tracer.attribute import exception_attributes, flatten, to_json
from agentlightning.tracer.operation import Operation
from agentlightning.tracer.tracer import get_active_tracer

P = ParamSpec("P")
R = TypeVar("R")
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
        reward: a number, or several by name. Scalars of numpy and torch are numbers too.
        primary_key: the name of the main reward; required if there are several.
        attributes: further attributes, such as ``semconv.link_attributes`` of the rewarded model call.
        propagate: False returns the span without recording it, for an agent that returns its spans.

    Raises:
        ConfigError: the reward is not a finite number, the mapping is empty, or ``primary_key`` is unknown.
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
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("text")
        number = float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{what} = {value!r} is not a number") from error
    if not math.isfinite(number):
        raise ConfigError(f"{what} = {number!r}: a reward is a finite number")
    return number
