"""Reads requests from untrusted clients: limits bodies and JSON, and recognizes clients on this machine.

Servers that use it pass ``SERVER_SETTINGS`` to aiohttp, so that aiohttp neither inflates bodies nor reads refused ones.
A process that only serves also calls ``return_freed_memory``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import ipaddress
import logging
import re
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar
from urllib.parse import urlsplit

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

SERVER_SETTINGS: Final[dict[str, Any]] = {"auto_decompress": False, "lingering_time": 0.02}
"""Keyword arguments of ``aiohttp.web.Server`` and ``AppRunner``.

After a refusal the connection is closed. The short wait lets a client read the answer before a reset.
"""
MAX_DEPTH: Final = 100
MAX_ITEMS: Final = 500_000
_ENCODINGS: Final = ("gzip", "x-gzip", "deflate")
_MAX_MEMBERS: Final = 64
"""Maximum number of members in a gzip file: inflating a member copies the rest of the file."""
_QUOTE: Final = ord('"')
_THREAD_BYTES: Final = 256 * 1024
"""Bodies of at least this size are parsed in a thread: parsing one takes about a millisecond."""
_THREADS: Final = ThreadPoolExecutor(2, thread_name_prefix="agl-bodies")
_MALLOC_SETTINGS: Final = {-1: 8 * 2**20, -3: 512 * 1024, -8: 2}
"""glibc's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX. asyncio's reads of 256 KiB are below the second one."""
_TRIM_AFTER_S: Final = 1.0
P = ParamSpec("P")
T = TypeVar("T")
_OUTSIDE_STRINGS: Final = re.compile(rb'[^"\[{,]*+')
_INSIDE_STRING: Final = re.compile(rb'(?:[^"\\]++|\\.){0,10000}+', re.DOTALL)
"""Matches in bounded steps, because other threads cannot run during a match."""


class RequestError(Exception):
    """A request that is refused, with the status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestLog(logging.Logger):
    """The logger for aiohttp's ``logger`` argument, which drops two kinds of records.

    It drops records about requests that cannot be parsed, whose text may contain a key, and about disconnections.
    """

    def __init__(self) -> None:
        super().__init__("agentlightning.http", logging.WARNING)
        self.parent = logging.getLogger("agentlightning")

    def handle(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, (HttpProcessingError, ConnectionResetError)):
            super().handle(record)


class _Allocator:
    """The allocator of the C library, which may keep freed memory for the process."""

    def __init__(self) -> None:
        self._trim: Callable[[int], int] | None = None
        self._is_due = False

    def configure(self) -> None:
        with contextlib.suppress(AttributeError):  # the C library is not glibc
            library = ctypes.CDLL(None)
            for parameter, value in _MALLOC_SETTINGS.items():
                library.mallopt(parameter, value)
            self._trim = library.malloc_trim

    def trim_soon(self) -> None:
        """Returns freed memory to the system a second from now; further calls until then have no effect."""
        if self._trim is not None and not self._is_due:
            self._is_due = True
            loop = asyncio.get_running_loop()
            loop.call_later(_TRIM_AFTER_S, lambda: loop.run_in_executor(_THREADS, self._trim_now))

    def _trim_now(self) -> None:
        self._is_due = False
        assert self._trim is not None
        self._trim(0)


_ALLOCATOR: Final = _Allocator()


def return_freed_memory() -> None:
    """Returns the memory of large bodies to the system soon after their requests, in a process that only serves.

    By default glibc keeps blocks of up to 32 MiB once it has freed one of this size, in several pools.
    """
    _ALLOCATOR.configure()


async def answer_expect(request: web.Request) -> None:
    """The ``expect_handler`` of routes: unlike aiohttp's, it survives a header that is not UTF-8."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="only 'Expect: 100-continue' is supported")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the head of the answer is not sent yet


async def read_body(request: web.BaseRequest, limit: int, inflated_limit: int) -> bytes:
    """Reads the body of a request, inflating gzip and deflate. The server must have ``SERVER_SETTINGS``.

    Args:
        request: the request, already authorised.
        limit: maximum number of bytes that are sent.
        inflated_limit: maximum number of bytes after inflating.

    Raises:
        RequestError: 413 for a larger body, 415 for another Content-Encoding, 400 for invalid compressed data.
    """
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity", *_ENCODINGS):
        raise RequestError(415, f"Content-Encoding {encoding!r} is not supported; send gzip, deflate or no encoding")
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    pieces, size = [], 0
    while piece := await request.content.readany():
        size += len(piece)
        if size > limit:
            _ALLOCATOR.trim_soon()
            raise _too_large(limit)
        pieces.append(piece)
    if size > _THREAD_BYTES or encoding:
        _ALLOCATOR.trim_soon()
    body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if encoding not in _ENCODINGS or not body:
        return body
    return await in_thread(_inflate, body, inflated_limit, encoding == "deflate")


async def parse_json(
    data: bytes,
    *,
    max_depth: int = MAX_DEPTH,
    max_items: int = MAX_ITEMS,
    loads: Callable[[bytes], Any] = orjson.loads,
) -> Any:
    """Parses JSON with limits, in a thread if it is large. The last value of a duplicate key counts.

    Args:
        data: the JSON.
        max_depth: how deep lists and objects may be nested.
        max_items: roughly how many values there may be, which bounds memory and time.
        loads: the parser; it raises ValueError.

    Raises:
        RequestError: 400 for text that is not JSON, 413 for too many values.
    """
    if len(data) < _THREAD_BYTES:
        return _parse(data, max_depth, max_items, loads)
    return await in_thread(_parse, data, max_depth, max_items, loads)


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs work on a large body in one of a few threads, because the C library keeps freed memory for each thread."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, functools.partial(work, *args, **kwargs))


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


def _host_name(host: str) -> str:
    try:
        return urlsplit("//" + host).hostname or ""
    except ValueError:  # an IPv6 address without its closing bracket
        return ""


def _too_large(limit: int) -> RequestError:
    return RequestError(413, f"the request is larger than {limit} bytes")


def _inflate(body: bytes, limit: int, is_deflate: bool) -> bytes:
    """Inflates a body: the members of a gzip file, a zlib stream, or deflate without a header, as some clients send."""
    bits = zlib.MAX_WBITS if is_deflate and body[0] & 0x0F == zlib.DEFLATED else -zlib.MAX_WBITS
    bits = bits if is_deflate else 16 + zlib.MAX_WBITS
    inflated = bytearray()
    try:
        for _ in range(_MAX_MEMBERS):
            member = zlib.decompressobj(wbits=bits)
            inflated += member.decompress(body, limit + 1 - len(inflated))
            if len(inflated) > limit:
                raise RequestError(413, f"the request is larger than {limit} bytes after inflating")
            if not member.eof:
                raise RequestError(400, "the compressed body is not complete")
            body = member.unused_data.lstrip(b"\0")  # gzip files may be padded
            if not body:
                break
        else:
            raise RequestError(413, f"the compressed body has more than {_MAX_MEMBERS} members")
    except zlib.error as error:
        raise RequestError(400, f"the body is not what its Content-Encoding says: {error}") from error
    return bytes(inflated)


def _parse(data: bytes, max_depth: int, max_items: int, loads: Callable[[bytes], Any]) -> Any:
    if len(data) > max_items:  # a value takes at least a byte
        _check_items(data, max_items)
    try:
        value = loads(data)
    except ValueError as error:
        raise RequestError(400, f"the request is not JSON: {error}") from error
    if data.count(b"[") + data.count(b"{") > max_depth:
        _check_depth(value, max_depth)
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
    raise RequestError(413, f"the JSON has more than {max_items} values")


def _check_depth(value: Any, max_depth: int) -> None:
    level = [value]
    for _ in range(max_depth):
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise RequestError(400, f"the JSON is nested more than {max_depth} levels deep")
