"""Reads requests of untrusted clients: checks their senders, and limits their bodies and the JSON in them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import hmac
import ipaddress
import re
import socket
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from agentlightning.frozen import is_deep

_MALLOC_SETTINGS: Final = {-1: 8 * 2**20, -3: 512 * 1024, -8: 2}
"""glibc's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX. asyncio's reads of 256 KiB are below the second one."""
_TRIM_AFTER_S: Final = 1.0
_malloc_trim: Callable[[int], int] | None = None
_is_due = False


def return_freed_memory() -> None:
    """Returns the memory of large bodies to the system soon after their requests, in a process that only serves.

    By default glibc keeps blocks of up to 32 MiB once it has freed one of this size, in several pools.
    """
    global _malloc_trim
    with contextlib.suppress(AttributeError):  # the C library is not glibc
        library = ctypes.CDLL(None)
        for parameter, value in _MALLOC_SETTINGS.items():
            library.mallopt(parameter, value)
        _malloc_trim = library.malloc_trim


def trim_soon() -> None:
    """Returns freed memory a second from now, if this process only serves; further calls until then have no effect."""
    global _is_due
    if _malloc_trim is not None and not _is_due:
        _is_due = True
        loop = asyncio.get_running_loop()
        loop.call_later(_TRIM_AFTER_S, lambda: loop.run_in_executor(None, _trim))


def _trim() -> None:
    global _is_due
    _is_due = False
    assert _malloc_trim is not None
    _malloc_trim(0)


MAX_DEPTH: Final = 100
MAX_ITEMS: Final = 500_000
_EVERY_ADDRESS: Final = {
    "0.0.0.0": (socket.AF_INET, "192.0.2.1", "127.0.0.1"),  # noqa: S104 # compared with, not bound to
    "::": (socket.AF_INET6, "2001:db8::1", "::1"),
}
"""Addresses to listen on, each with a documentation address on another network, and the one of loopback."""
_ENCODINGS: Final = ("gzip", "x-gzip", "deflate")
_MAX_MEMBERS: Final = 64
"""Maximum number of members in a gzip file."""
_PIECE_BYTES: Final = 2**16
"""How much of a body zlib gets at a time: each member of a gzip file copies the rest of its piece."""
_QUOTE: Final = ord('"')
LARGE_BODY_BYTES: Final = 256 * 1024
"""Bodies of at least this size are parsed in a thread: parsing one takes about a millisecond."""
_THREADS: Final = ThreadPoolExecutor(2, thread_name_prefix="agl-bodies")
P = ParamSpec("P")
T = TypeVar("T")
_OUTSIDE_STRINGS: Final = re.compile(rb'[^"\[{,]*+')
_INSIDE_STRING: Final = re.compile(rb'(?:(?:\\.){1,100}+|[^"\\]++){0,200}+', re.DOTALL)
"""Matches in bounded steps, because other threads cannot run during a match."""


class RequestRefused(Exception):
    """A request that is refused, with the status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_body(request: web.BaseRequest, limit: int, inflated_limit: int) -> bytes:
    """Reads the body of an authorised request of at most ``limit`` bytes, inflating gzip and deflate.

    Raises RequestRefused: 413 for a larger body, also after inflating, 415 for another Content-Encoding, 400 for
    invalid compressed data.
    """
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity", *_ENCODINGS):
        raise RequestRefused(415, f"Content-Encoding {encoding!r} is not supported; send gzip, deflate or no encoding")
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    pieces, size = [], 0
    while piece := await request.content.readany():
        size += len(piece)
        if size > limit:
            trim_soon()
            raise _too_large(limit)
        pieces.append(piece)
    if size > LARGE_BODY_BYTES or encoding:
        trim_soon()
    body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if encoding not in _ENCODINGS or not body:
        return body
    return await in_thread(_inflate, body, inflated_limit, encoding == "deflate")


async def parse_json(
    data: bytes, *, max_depth: int = MAX_DEPTH, max_items: int = MAX_ITEMS, loads: Callable[[bytes], Any] = orjson.loads
) -> Any:
    """Parses JSON with limits, in a thread if it is large. The last value of a duplicate key counts.

    ``max_items`` is roughly the number of values, which bounds memory and time; ``loads`` raises ValueError. Raises
    RequestRefused: 400 for text that is not JSON or nested deeper than ``max_depth``, 413 for too many values.
    """
    return await run_if_large(data, _parse, data, max_depth, max_items, loads)


async def run_if_large(body: bytes, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs work on a body: in a thread if the body is large, so that other requests need not wait."""
    return work(*args, **kwargs) if len(body) < LARGE_BODY_BYTES else await in_thread(work, *args, **kwargs)


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs work on a large body in one of a few threads, because the C library keeps freed memory for each thread."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, functools.partial(work, *args, **kwargs))


def _too_large(limit: int) -> RequestRefused:
    return RequestRefused(413, f"the request is larger than {limit} bytes")


def _inflate(body: bytes, limit: int, is_deflate: bool) -> bytes:
    """Inflates a body: the members of a gzip file, a zlib stream, or deflate without a header, as some clients send."""
    bits = zlib.MAX_WBITS if is_deflate and body[0] & 0x0F == zlib.DEFLATED else -zlib.MAX_WBITS
    bits = bits if is_deflate else 16 + zlib.MAX_WBITS
    inflated, position = bytearray(), 0
    try:
        for _ in range(_MAX_MEMBERS):
            member = zlib.decompressobj(wbits=bits)
            while not member.eof and position < len(body):
                piece = body[position : position + _PIECE_BYTES]
                inflated += member.decompress(piece, limit + 1 - len(inflated))
                if len(inflated) > limit:
                    raise RequestRefused(413, f"the request is larger than {limit} bytes after inflating")
                position += len(piece) - len(member.unused_data)
            if not member.eof:
                raise RequestRefused(400, "the compressed body is not complete")
            if position == len(body) or (body[position] == 0 and not body[position:].strip(b"\0")):
                break  # a gzip file may be padded
        else:
            raise RequestRefused(413, f"the compressed body has more than {_MAX_MEMBERS} members")
    except zlib.error as error:
        raise RequestRefused(400, f"the body is not what its Content-Encoding says: {error}") from error
    return bytes(inflated)


def _parse(data: bytes, max_depth: int, max_items: int, loads: Callable[[bytes], Any]) -> Any:
    if len(data) > max_items:  # a value takes at least a byte
        _check_items(data, max_items)
    try:
        value = loads(data)
    except ValueError as error:
        raise RequestRefused(400, f"the request is not JSON: {error}") from error
    if data.count(b"[") + data.count(b"{") > max_depth and is_deep(value, max_depth):
        raise RequestRefused(400, f"the JSON is nested more than {max_depth} levels deep")
    return value


def _check_items(data: bytes, max_items: int) -> None:
    """Counts strings, and the brackets and commas outside strings, before the JSON is parsed."""
    position, is_inside = 0, False
    for _ in range(max_items):
        match = (_INSIDE_STRING if is_inside else _OUTSIDE_STRINGS).match(data, position)
        position = match.end()  # type: ignore[union-attr] # both match anything
        if position == len(data):
            return
        is_quote = data[position] == _QUOTE
        is_inside = is_inside != is_quote
        position += is_quote or not is_inside
    raise RequestRefused(413, f"the JSON has more than {max_items} values")


def check_local(request: web.BaseRequest, server: str) -> None:
    """Checks that a request to a server on loopback without keys comes from a program, not from a web page.

    Raises RequestRefused with status 403 and a message that begins with ``server``.
    """
    headers = request.headers
    if not is_local_request(headers.get("Host", "localhost"), headers.get("Origin")):
        raise RequestRefused(403, f"{server} answers programs on this machine only, not web pages")


@functools.lru_cache(maxsize=64)
def is_local_request(host: str, origin: str | None) -> bool:
    """Whether the Host and Origin of a request to a loopback server show that it comes from a program on this machine.

    Requests from other sites' web pages do not qualify, whether they are cross-site or use DNS rebinding.
    """
    return is_loopback(_host_name(host)) and (not origin or origin.partition("://")[2] == host)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback one."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def client_url(host: str, port: int) -> str:
    """Returns the URL of a server for its clients: if it listens on every address, one that other machines reach."""
    if host in _EVERY_ADDRESS:
        family, elsewhere, host = _EVERY_ADDRESS[host]
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # selects the interface, sends nothing
            host = probe.getsockname()[0]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _host_name(host: str) -> str:
    try:
        return urlsplit("//" + host).hostname or ""
    except ValueError:  # an IPv6 address without its closing bracket
        return ""


def is_among(shown: str, secrets: Iterable[str]) -> bool:
    """Whether a key or header that a client sent is one of these, compared in constant time."""
    given = shown.encode(errors="surrogateescape")
    return any(hmac.compare_digest(given, secret.encode(errors="surrogateescape")) for secret in secrets)
