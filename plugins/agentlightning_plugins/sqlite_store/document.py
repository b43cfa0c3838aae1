"""Records as JSON text: what is written is what will be read, or it is refused."""

from __future__ import annotations

from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError

from agentlightning.errors import ConfigError, StoreError
from agentlightning.event import Event
from agentlightning.frozen import freeze
from agentlightning.resources import ResourcesUpdate
from agentlightning.store.backend import key_of
from agentlightning.types import Record

R = TypeVar("R", bound=Record)

_SCALARS: Final = frozenset({str, int, float, bool, NoneType})
_events: TypeAdapter[list[Event]] = TypeAdapter(list[Event])


def encode(record: Record) -> str:
    """The JSON of a record.

    Raises:
        ConfigError: something in it is not JSON and would not come back as it is.
    """
    try:
        if isinstance(record, ResourcesUpdate):  # its resources are of any class, with serializers of their own
            text = record.model_dump_json()
            lost = None if ResourcesUpdate.model_validate_json(text) == record else "resources"
        else:
            encoded = orjson.dumps(record.__dict__, default=_plain)
            text = encoded.decode()
            fields = document_fields(type(record))
            lost = _first_lost(record, orjson.loads(encoded), fields) if fields else None
    except (TypeError, ValueError) as error:
        raise _refuse(record, str(error)) from error
    if lost is not None:
        raise _refuse(record, f"{lost} has a value that JSON cannot hold, such as NaN, a set or a date")
    return text


def decode(kind: type[R], text: str) -> R:
    """The record that ``encode`` made this text of."""
    try:
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
def document_fields(kind: type[BaseModel]) -> frozenset[str]:
    """The fields of a record that may hold more than a string or a number."""
    return frozenset(name for name, field in kind.model_fields.items() if not _is_scalar(field.annotation))


def _is_scalar(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return True
    if get_origin(annotation) in (Union, UnionType):
        return all(map(_is_scalar, get_args(annotation)))
    return annotation in _SCALARS


def _plain(value: object) -> Any:
    if isinstance(value, BaseModel):
        return value.__dict__
    raise TypeError(f"a {type(value).__qualname__} is not JSON")


def _first_lost(record: BaseModel, plain: dict[str, Any], fields: frozenset[str]) -> str | None:
    """The first of these fields that JSON does not give back; None if there is none."""
    for field in fields:
        value, back = getattr(record, field), plain[field]
        if isinstance(value, BaseModel):
            lost = _first_lost(value, back, document_fields(value.__class__))
            if lost is not None:
                return f"{field}.{lost}"
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for item, item_back in zip(value, back, strict=True):
                lost = _first_lost(item, item_back, document_fields(type(item)))
                if lost is not None:
                    return f"{field}.{lost}"
        elif back != value and back != freeze(value):  # a tuple comes back as a list, and that is meant
            return field
    return None


def _refuse(record: Record, reason: str) -> ConfigError:
    return ConfigError(
        f"{type(record).__name__} {'/'.join(map(str, key_of(record)))} cannot be stored: {reason}. A durable store "
        "holds JSON: strings, finite numbers below 2**63, booleans, None, lists, and dicts with string keys. Convert "
        "the value, or use memory://"
    )
