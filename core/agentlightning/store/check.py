"""Checks of the arguments that stores take."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from agentlightning.errors import ConfigError, suggest
from agentlightning.records import MAX_INT, MAX_SEQUENCE_ID, Record, Span

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


def check_fields(kind: type[Record], values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts new values of some fields of a record to the fields' types; raises ConfigError for a wrong value."""
    checked = {}
    for name, value in values.items():
        try:
            checked[name] = _field(kind, name).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"{name}={value!r:.200}: {error.errors()[0]['msg']}") from None
    return checked


@cache
def _field(kind: type[Record], name: str) -> TypeAdapter[Any]:
    field = kind.model_fields[name]
    return TypeAdapter(Annotated[field.annotation, field])


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
