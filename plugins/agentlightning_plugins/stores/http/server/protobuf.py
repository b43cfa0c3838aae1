"""Counts the messages in a protobuf body before it is decoded."""

from __future__ import annotations

import functools
from typing import Any

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
"""Wire types."""


def has_more_messages(body: bytes, kind: Any, limit: int) -> bool:
    """Whether a body has more than ``limit`` nested messages; an empty one takes 2 bytes, but much memory when decoded.

    Args:
        body: the encoded message.
        kind: the message's descriptor.
        limit: the number of messages at which counting ends.

    Raises:
        ValueError: the body is not protobuf.
    """
    if len(body) <= 2 * limit:
        return False
    count = 0
    parts = [(0, len(body), _inner(kind))]
    try:
        while parts:
            position, end, inner = parts.pop()
            while position < end:
                tag, position = _read_varint(body, position)
                wire_type = tag & 7
                if wire_type == _BYTES:
                    size, position = _read_varint(body, position)
                    if tag >> 3 in inner:
                        count += 1
                        if count > limit:
                            return True
                        parts.append((position, position + size, _inner(inner[tag >> 3])))
                    position += size
                elif wire_type == _VARINT:
                    _, position = _read_varint(body, position)
                elif wire_type in (_FIXED_64, _FIXED_32):
                    position += 8 if wire_type == _FIXED_64 else 4
                else:
                    raise ValueError(f"wire type {wire_type}")
            if position > end:
                raise ValueError("a field is longer than its message")
    except IndexError:
        raise ValueError("it is cut off") from None
    return False


@functools.cache
def _inner(kind: Any) -> dict[int, Any]:
    """Returns the descriptors of the fields that are messages, by number."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


def _read_varint(body: bytes, position: int) -> tuple[int, int]:
    byte = body[position]
    value, shift = byte & 0x7F, 7
    position += 1
    while byte & 0x80:
        if shift > 63:
            raise ValueError("an integer of more than 64 bits")
        byte = body[position]
        value |= (byte & 0x7F) << shift
        shift += 7
        position += 1
    return value, position
