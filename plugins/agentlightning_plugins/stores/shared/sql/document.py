"""Records as JSON text; a record that JSON would change is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

import orjson
from pydantic import TypeAdapter, ValidationError

from agentlightning.errors import ConfigError, StoreError
from agentlightning.event import Event
from agentlightning.frozen import FrozenDict, FrozenList, freeze
from agentlightning.resources import ResourcesUpdate
from agentlightning.store.backend import key_of
from agentlightning.types import (
    Attempt,
    AttemptFailure,
    Record,
    Rollout,
    RolloutConfig,
    Span,
    SpanContext,
    SpanEvent,
    SpanLink,
    SpanResource,
    TraceStatus,
    Worker,
)

R = TypeVar("R", bound=Record)

_SCALARS: Final = frozenset({str, int, float, bool, NoneType})
_events: TypeAdapter[list[Event]] = TypeAdapter(list[Event])


def encode(record: Record) -> str:
    """Encodes a record as JSON.

    Raises:
        ConfigError: a value in it is not JSON and would not be read back unchanged.
    """
    try:
        if isinstance(record, ResourcesUpdate):  # its resources are of any class, with their own serializers
            text = record.model_dump_json()
            lost = None if ResourcesUpdate.model_validate_json(text) == record else "resources"
        else:
            encoded = orjson.dumps(record.__dict__, default=_plain)
            text = encoded.decode()
            lost = None if _is_frozen(record) else _first_lost(record, orjson.loads(encoded))
    except (TypeError, ValueError) as error:
        raise _refuse(record, str(error)) from error
    if lost is not None:
        raise _refuse(record, f"{lost} has a value that JSON cannot hold, such as NaN, a set or a date")
    return text


def decode(kind: type[R], text: str) -> R:
    """Decodes the text that ``encode`` made."""
    try:
        readers = _READERS.get(kind)
        if readers is not None:
            values = orjson.loads(text)
            if values.keys() == _FIELDS[kind]:  # not one that an older version wrote
                for field, read in readers:
                    values[field] = read(values[field])
                return kind.from_valid(values)  # it was validated before it was written
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise StoreError(
            f"a stored {kind.__name__} cannot be read; is the plugin that it came from installed? {error}"
        ) from error


def encode_events(events: list[Event]) -> str:
    return orjson.dumps([event.__dict__ for event in events], default=_plain).decode()


def decode_events(text: str) -> list[Event]:
    return _events.validate_json(text)


@cache
def document_fields(kind: type[Record]) -> frozenset[str]:
    """Returns the fields of a record that may hold more than a string or a number."""
    return frozenset(name for name, field in kind.model_fields.items() if not _is_scalar(field.annotation))


def _is_scalar(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return True
    if get_origin(annotation) in (Union, UnionType):
        return all(map(_is_scalar, get_args(annotation)))
    return annotation in _SCALARS


def _plain(value: object) -> Any:
    if isinstance(value, Record):
        return value.__dict__
    raise TypeError(f"a {type(value).__qualname__} is not JSON")


def _is_frozen(record: Record) -> bool:
    """Whether a record is known to be JSON, so that it need not be decoded to find out."""
    for field, default in _defaults(type(record)):
        value = record.__dict__[field]
        kind = type(value)
        if value is None or value is default or kind is FrozenDict or kind is str:
            continue
        if isinstance(value, Record):
            if _is_frozen(value):
                continue
        elif kind is FrozenList and all(_is_frozen(item) for item in value if isinstance(item, Record)):
            continue
        return False
    return True


def _first_lost(record: Record, plain: dict[str, Any]) -> str | None:
    """Returns the first field that does not survive JSON; None if there is none."""
    for field, default in _defaults(type(record)):
        value, back = getattr(record, field), plain[field]
        if value is None or value is default:
            continue
        parts: Sequence[tuple[object, Any]] = ()
        if field == "input":  # the user's own: a record in it would come back as a dict
            pass
        elif isinstance(value, Record):
            parts = [(value, back)]
        elif isinstance(value, list) and value and isinstance(value[0], Record):
            parts = list(zip(value, back, strict=True))
        for part, part_back in parts:
            lost = _first_lost(part, part_back) if isinstance(part, Record) else "value"
            if lost is not None:
                return f"{field}.{lost}"
        if not parts and back != value and back != freeze(value):  # a tuple comes back as a list, as intended
            return field
    return None


@cache
def _defaults(kind: type[Record]) -> list[tuple[str, object]]:
    """Returns the fields to check, each with its default, which needs no check."""
    return [(field, kind.model_fields[field].default) for field in sorted(document_fields(kind))]


def _part(kind: type[Record], common: Record | None = None) -> Callable[[Any], Any]:
    """Returns a reader of a record inside a record; ``common`` is its most frequent value."""
    plain = None if common is None else orjson.loads(orjson.dumps(common.__dict__, default=_plain))
    return lambda value: common if value == plain else kind.model_validate(value)


def _parts(kind: type[Record]) -> Callable[[Any], Any]:
    return lambda values: FrozenList([kind.model_validate(value) for value in values])


def _refreeze(value: Any) -> Any:
    """Freezes decoded JSON that was frozen when it was written."""
    kind = type(value)
    if kind is dict:
        items = value.items()
        return FrozenDict({key: item if type(item) in _SCALARS else _refreeze(item) for key, item in items})
    if kind is list:
        return FrozenList(value if _SCALARS.issuperset(map(type, value)) else map(_refreeze, value))
    return value


_READERS: Final[dict[type[Record], list[tuple[str, Callable[[Any], Any]]]]] = {
    Rollout: [("input", _refreeze), ("metadata", _refreeze), ("config", _part(RolloutConfig, RolloutConfig()))],
    Attempt: [("metadata", _refreeze), ("error", _part(AttemptFailure))],
    Worker: [("heartbeat_stats", _refreeze), ("attempt_ids", _refreeze)],
    Span: [
        ("attributes", _refreeze),
        ("status", _part(TraceStatus, TraceStatus())),
        ("resource", _part(SpanResource, SpanResource())),
        ("events", _parts(SpanEvent)),
        ("links", _parts(SpanLink)),
        ("context", _part(SpanContext)),
        ("parent", _part(SpanContext)),
    ],
}
"""Readers of the fields that may hold more than a string or a number, for the kinds that are read most."""
_FIELDS: Final = {kind: frozenset(kind.model_fields) for kind in _READERS}


def _refuse(record: Record, reason: str) -> ConfigError:
    return ConfigError(
        f"{type(record).__name__} {'/'.join(map(str, key_of(record)))} cannot be stored: {reason}. A durable store "
        "holds JSON: strings, finite numbers below 2**63, booleans, None, lists, and dicts with string keys. Convert "
        "the value, or use memory://"
    )
