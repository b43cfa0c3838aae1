"""Checks of the arguments that stores take."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from operator import or_
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    Strict,
    ValidationError,
    validate_call,
)

from agentlightning.errors import ConfigError, suggest
from agentlightning.frozen import freeze
from agentlightning.records import MAX_INT, MAX_SEQUENCE_ID, Span, keep_finite
from agentlightning.resources import AnyResource, Resource, hide_secrets

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=str)

RUN_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,200}")  # run ids are parts of URLs, headers and file names


def check_run_id(run_id: Any) -> str:
    """Returns ``run_id``; raises ConfigError unless it has 1 to 200 of the allowed characters."""
    if not isinstance(run_id, str) or not RUN_ID.fullmatch(run_id):
        raise ConfigError(f"run_id={run_id!r:.220}: 1 to 200 of the characters A-Z a-z 0-9 . _ : - are allowed")
    return run_id


def check_int(name: str, value: Any, minimum: int) -> int:
    """Returns ``value``; raises ConfigError unless it is a 64-bit integer of at least ``minimum``."""
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= MAX_INT:
        least = "-1 (all), 0" if minimum == -1 else minimum
        raise ConfigError(f"{name}={value!r:.50}; it can be a 64-bit integer: {least} or more")
    return value


def check_choice(name: str, value: C, choices: Sequence[C]) -> C:
    """Returns ``value``; raises ConfigError unless it is one of the choices."""
    if value not in choices:
        raise ConfigError(
            f"{name}={value!r} is unknown.{suggest(str(value), map(str, choices))} "
            f"It can be: {', '.join(map(str, choices))}."
        )
    return value


def checked(method: F, declared: Callable[..., Any]) -> F:
    """Wraps a method of a store: it gets its arguments by name, valid and frozen, as the declared signature has them.

    So every store, also a remote one, refuses the same arguments with the same ConfigError before it does anything.
    """

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            return _validator(declared)(*args, **kwargs)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
        signature = inspect.signature(declared)
        signature.bind(None, *args, **kwargs)  # raises TypeError for a missing or unexpected argument
        first, value = problem["loc"][0], problem["input"]
        name = [*signature.parameters][first + 1] if isinstance(first, int) else str(first)
        context = problem.get("ctx", {})
        if isinstance(context.get("error"), ConfigError):
            raise context["error"]
        if problem["type"] == "literal_error":
            check_choice(name, value, re.findall(r"'([^']+)'", context["expected"]))
        given = args[first] if isinstance(first, int) else kwargs[name]
        place = name if value is given else f"{name}.{problem['loc'][-1]}"
        raise ConfigError(f"{place}={hide_secrets(value)!r:.200}: {problem['msg'].removeprefix('Value error, ')}")

    if inspect.iscoroutinefunction(method):

        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await method(self, **check(args, kwargs))

        return cast("F", functools.wraps(method)(call))

    def call_now(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, **check(args, kwargs))

    return cast("F", functools.wraps(method)(call_now))


@functools.cache
def _validator(declared: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Returns the function that takes the arguments of a method and returns them valid, built at the first call."""
    hints = get_type_hints(declared, include_extras=True)
    _, *parameters = inspect.signature(declared).parameters.values()
    types = {parameter.name: argument_type(parameter.name, hints[parameter.name]) for parameter in parameters}

    def collect(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**dict(zip(types, args, strict=False)), **kwargs}

    collect.__annotations__ = types
    collect.__dict__["__signature__"] = inspect.Signature(
        [parameter.replace(annotation=types[parameter.name]) for parameter in parameters]
    )
    return validate_call(config=ConfigDict(strict=True))(collect)


def argument_type(name: str, annotation: Any) -> Any:
    """Returns the pydantic type of a store method's parameter, in Python and in messages.

    Ids are not empty, text is valid Unicode, numbers are finite and have 64 bits, and JSON is frozen.
    """
    arguments, origin = get_args(annotation), get_origin(annotation)
    if origin in (Union, UnionType):
        ignored = (Literal,) if str in arguments else ()  # ``str | Literal["latest"]`` is a str
        members = [member for member in arguments if get_origin(member) not in ignored]
        return functools.reduce(or_, [argument_type(name, member) for member in members])
    if origin is Sequence:
        items: Any = list[argument_type(name, arguments[0])]  # type: ignore[misc] # exists only at run time
        return Annotated[items, Strict(False)]
    if origin is tuple:
        pair: Any = tuple[tuple(argument_type(name, each) for each in arguments)]  # type: ignore[misc] # as above
        to_tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
        return Annotated[pair, to_tuple]  # JSON has no tuples
    if annotation is Any or annotation == Mapping[str, Any]:
        json: Any = Any if annotation is Any else Annotated[dict[str, Any], Strict(False)]
        return Annotated[json, AfterValidator(functools.partial(freeze, name=name))]
    if annotation == Mapping[str, float]:
        return Annotated[dict[str, Annotated[float, Strict(False)]], Strict(False), AfterValidator(keep_finite)]
    if annotation == Mapping[str, Resource | str]:
        return Annotated[dict[str, AnyResource], Strict(False)]
    if annotation is float:
        return float if name == "timeout" else FiniteFloat  # a timeout may be infinite
    if annotation is int:
        return Annotated[int, Field(ge=_LEAST.get(name, -MAX_INT - 1), le=MAX_INT)]
    if annotation is str:
        text = Field(pattern=rf"^{RUN_ID.pattern}$") if name == "run_id" else Field(min_length=int(name in _IDS))
        return Annotated[str, text]  # with a constraint, pydantic refuses text that is not valid Unicode
    return annotation


_LEAST: Final = {"limit": -1, "offset": 0, "keep": 0, "spans_dropped": 0, "version": 0}
"""The least values of integer parameters that have one."""
_IDS: Final = frozenset({"rollout_id", "attempt_id", "worker_id", "resources_id"})


def check_span(span: Span) -> None:
    """Raises ConfigError for wrong values of fields that stores compare or index: hot paths do not validate spans."""
    number = span.sequence_id
    if type(number) is not int or not 0 <= number <= MAX_SEQUENCE_ID:
        raise ConfigError(f"sequence_id={number!r:.50} of span {span.span_id!r:.50}; it can be 0 to {MAX_SEQUENCE_ID}")
    for name in ("start_time", "end_time"):
        moment = getattr(span, name)
        if moment is not None and not (isinstance(moment, (int, float)) and math.isfinite(moment)):
            raise ConfigError(f"{name}={moment!r:.50} of span {span.span_id!r:.50}; it is a Unix time in seconds")
    for name in ("rollout_id", "attempt_id", "trace_id", "span_id", "name"):
        if type(getattr(span, name)) is not str:
            raise ConfigError(f"{name}={getattr(span, name)!r:.50} of a span; it is a string")
