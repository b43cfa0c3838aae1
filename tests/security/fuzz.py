"""Sends random requests of a grammar to a server and observes its answers, memory and health."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import random
import re
import statistics
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.waiting import LIMIT_S

MIB = 2**20
_TEXTS = ["", "x", "hello", "\ud800", "é\0\x1b[2J", "[{," * 50, "../../etc/passwd", "x" * 70_000, "agl-x.y", "NaN"]
_NUMBERS = [0, 1, -1, 3.5, 2**31, 2**63, -(2**63) - 1, 10**400, 1e308, -0.0, float("nan"), float("inf")]
_RAW = [b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"{}" * 9, b'{"model":' * 5000, b"1" * 5000, b"[" * 90_000]


@dataclass
class Grammar:
    """Parts from which requests to a server are made."""

    paths: Sequence[str]
    bodies: Sequence[Mapping[str, Any]]
    """Valid request bodies, which are then changed."""
    tokens: Sequence[str]
    """Values of the header Authorization."""
    port: int
    big: bool = True
    """Whether bodies of many MiB are also sent."""
    health: str = "/health"
    """A path that is answered with 200 at any time."""


@dataclass
class Findings:
    """Answers and costs that were observed while fuzzing."""

    statuses: dict[int, int] = field(default_factory=dict)
    """Number of answers by status; status 0 means no answer."""
    bad: list[str] = field(default_factory=list)
    """Requests that got an answer that no request may get."""
    health_s: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    """Resident memory of the server in bytes, at even intervals."""

    @property
    def memory_growth(self) -> float:
        """Growth of resident memory in bytes from the first to the last quarter of the time, by their medians.

        Medians exclude short peaks, such as while a request of many MiB is answered.
        """
        quarter = len(self.resident) // 4
        return statistics.median(self.resident[-quarter:]) - statistics.median(self.resident[:quarter])


async def fuzz(
    grammar: Grammar, pid: int, seconds: float, seed: int, *, wanted: set[int], clients: int = 6
) -> Findings:
    """Sends random requests for some time, after requests that need much memory.

    A slow machine takes longer: until each ``wanted`` status was answered.
    """
    chance, findings, done = random.Random(seed), Findings(), asyncio.Event()
    end = 0.0

    async def attack() -> None:
        while time.monotonic() < end or not wanted <= findings.statuses.keys():
            request, is_whole = make_request(grammar, chance)
            status = await send(grammar.port, request, LIMIT_S if is_whole else 0.5)
            status = 0 if status == -1 and not is_whole else status
            findings.statuses[status] = findings.statuses.get(status, 0) + 1
            if status >= 500 or status < 0:
                findings.bad.append(f"{status} for {request[:300]!r}")

    async def watch() -> None:
        while not done.is_set():
            asked = time.monotonic()
            head = f"GET {grammar.health} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
            status = await send(grammar.port, head.encode())
            findings.health_s.append(time.monotonic() - asked)
            findings.resident.append(resident_bytes(pid))
            if status != 200:
                findings.bad.append(f"{status} for {grammar.health}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), 0.05)

    for request in heavy_requests(grammar):  # the allocator keeps some memory that was once used
        await asyncio.gather(*(send(grammar.port, request) for _ in range(clients)))
    end = time.monotonic() + seconds
    watcher = asyncio.create_task(watch())
    attackers = [asyncio.create_task(attack()) for _ in range(clients)]
    await asyncio.gather(*attackers)
    done.set()
    await watcher
    return findings


def resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


async def send(port: int, request: bytes, limit_s: float = LIMIT_S) -> int:
    """Returns the status of the answer; 0: the server closed the connection; -1: it was silent; -2: not HTTP."""
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(request)
                answer = asyncio.create_task(reader.read(MIB))
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                line = (await answer).partition(b"\r\n")[0]
            finally:
                writer.transport.abort()
    except ConnectionError:
        return 0
    except TimeoutError:
        return -1
    if not line:
        return 0
    found = re.fullmatch(rb"HTTP/1\.[01] (\d{3})( .*)?", line)
    return int(found[1]) if found else -2


def make_request(grammar: Grammar, chance: random.Random) -> tuple[bytes, bool]:
    """Returns a request, which may be malformed at any level, and whether its whole body is sent."""
    method = chance.choices(["POST", "GET", "PUT", "OPTIONS", "DELETE", "HEAD", "B\x7fD"], [30, 6, 1, 1, 1, 1, 1])[0]
    path = chance.choice(grammar.paths)
    if chance.random() < 0.1:
        path = change_text(path, chance)
    if chance.random() < 0.05:
        path += chance.choice(["?beta=true", "?api-version=%00", "?" + "a=b&" * 2000, "/", "#x", "%2e%2e/", "?x=\xe9"])
    body = make_body(grammar, chance)
    headers = [("Host", chance.choices(["127.0.0.1", "localhost:1", "evil.example", "[::1", ""], [40, 2, 1, 1, 1])[0])]
    headers += [("Authorization", chance.choice(grammar.tokens))] if chance.random() < 0.8 else []
    headers += [
        ("Connection", "close"),
        ("Content-Type", chance.choice(["application/json"] * 4 + ["text/plain", "x"])),
    ]
    if chance.random() < 0.1:
        headers.append(("Origin", chance.choice(["http://evil.example", "null", f"http://127.0.0.1:{grammar.port}"])))
    if chance.random() < 0.1:
        names = ("traceparent", "x-api-key", "Expect", "X-Strange", "Cookie", "Upgrade", "Content-Encoding", "Accept")
        headers.append((chance.choice(names), chance.choice(["x", "100-continue", "\xff", "gzip", "x" * 9000, "a, b"])))
    encoding = chance.choices(["", "gzip", "deflate", "br", "zstd", "bomb"], [30, 2, 2, 1, 1, 1])[0]
    if encoding:
        body = bomb(chance) if encoding == "bomb" else compress(body, encoding)
        headers.append(("Content-Encoding", "gzip" if encoding == "bomb" else encoding))
    framing = chance.choices(["length", "chunked", "wrong", "none"], [30, 6, 1, 1])[0]
    if framing == "chunked":
        headers.append(("Transfer-Encoding", "chunked"))
        cut = len(body) // 2
        pieces = [piece for piece in (body[:cut], body[cut:]) if piece]
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    elif framing != "none":
        length = len(body) if framing == "length" else chance.choice([len(body) // 2, 2**64, -1])
        headers.append(("Content-Length", str(length)))
    is_whole = framing != "wrong" and (framing != "chunked" or chance.random() < 0.95)
    if framing == "chunked" and not is_whole:
        body = body[: chance.randrange(len(body))]
    text = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"{method} {path} HTTP/1.1\r\n{text}\r\n".encode("latin-1", errors="replace") + body, is_whole


def heavy_requests(grammar: Grammar) -> list[bytes]:
    """Returns the valid requests that need the most memory."""
    head = f"Host: 127.0.0.1\r\nAuthorization: {grammar.tokens[0]}\r\nConnection: close\r\n"
    requests = []
    for body, encoding in [
        *((body, "") for body in _big()),
        *((body, "Content-Encoding: gzip\r\n") for body in _bombs()),
    ]:
        line = f"POST {grammar.paths[0]} HTTP/1.1\r\n{head}{encoding}Content-Length: {len(body)}\r\n\r\n"
        requests.append(line.encode() + body)
    return requests


def make_body(grammar: Grammar, chance: random.Random) -> bytes:
    kind = chance.choices(["valid", "changed", "raw", "big"], [6, 20, 4, 1 if grammar.big else 0])[0]
    if kind == "raw":
        return chance.choice(_RAW)
    body: Any = dict(chance.choice(grammar.bodies))
    if kind == "big":
        return chance.choice(_big())
    if kind == "changed":
        for _ in range(chance.randint(1, 3)):
            body = change(body, chance)
    text = json.dumps(body)
    if chance.random() < 0.1:
        text = text.replace("{", '{"model": 1, "model": "m", ', 1)
    return text.encode()


def change(value: Any, chance: random.Random) -> Any:
    """Returns a JSON value with a change in one place."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {other: child for other, child in value.items() if other != key}
        return {**value, key: change(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.7:
        place = chance.randrange(len(value))
        return [*value[:place], change(value[place], chance), *value[place + 1 :]]
    if isinstance(value, str) and chance.random() < 0.3:
        return change_text(value, chance)
    deep: Any = "x"
    for _ in range(chance.choice([3, 90, 300])):
        deep = [deep] if chance.random() < 0.5 else {"a": deep}
    return chance.choice(
        [*_TEXTS, *_NUMBERS, None, True, [], {}, [None], {"type": "text"}, [[]], [{}], [1, "x"], deep, [value] * 50]
    )


def change_text(text: str, chance: random.Random) -> str:
    place = chance.randrange(len(text) + 1)
    return text[:place] + chance.choice(["", "x", "/", "%00", "\x7f", "..", "é", " "]) + text[place + 1 :]


def compress(body: bytes, encoding: str) -> bytes:
    return gzip.compress(body, 1) if encoding == "gzip" else zlib.compress(body, 1) if encoding == "deflate" else body


def bomb(chance: random.Random) -> bytes:
    """Returns a few dozen KB that inflate to 32 MiB or more."""
    return chance.choice(_bombs())


@functools.cache
def _big() -> list[bytes]:
    return [b"[" + b"{}," * 2 * MIB + b"0]", b'{"model":"m","messages":"' + b"x" * 9 * MIB + b'"}', b" " * 34 * MIB]


@functools.cache
def _bombs() -> list[bytes]:
    return [
        gzip.compress(b" " * 40 * MIB),
        gzip.compress(b"[" * 33 * MIB),
        gzip.compress(b'{"model":"m"}' + b" " * 20 * MIB),
    ]
