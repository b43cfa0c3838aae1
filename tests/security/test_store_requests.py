"""The cost of one request to a real store process."""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from collections.abc import Iterator

import pytest

from tests.security.store_process import AGL, TOKEN, Cost, StoreProcess, running_store

pytestmark = pytest.mark.serial

MIB = 2**20
SPAN = {"trace_id": "1" * 32, "span_id": "2" * 16, "name": "call"}
PROTOBUF = "content-type: application/x-protobuf\r\n"
GZIP = "content-encoding: gzip\r\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with running_store(tmp_path_factory.mktemp("store")) as process:
        yield process


BROTLI_SPACES = bytes.fromhex(
    "cbffff3ff82540e2b14020f7fe8fffff7ff04b00c4611180eefd1fffffffe0970088c30200ddfb3ffeffffc12f0110870500baf77f"
    "fcffff835f02200e0b0074effff8ffff07bf04401c1600e8defff1ffff0f7e0980382c00d0bdffe3ffff1ffc1200715800a07bff37"
)
"""64 MiB of spaces."""


def _many(unit: bytes, number: int) -> bytes:
    """Returns a gzip body of repeated bytes, without building the bytes in memory."""
    squeeze, block = zlib.compressobj(9, wbits=31), unit * 100_000
    return b"".join([squeeze.compress(block) for _ in range(number // 100_000)]) + squeeze.flush()


def _field(number: int, content: bytes) -> bytes:
    """Returns a field of a protobuf message."""
    size, varint = len(content), b""
    while size > 127:
        varint += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + varint + bytes([size]) + content


@pytest.mark.parametrize("token", [None, "wrong", "agl-forged.token", ""])
def test_a_request_without_a_token_costs_almost_no_cpu_and_less_than_10_mb(
    store: StoreProcess, token: str | None
) -> None:
    spaces = b" " * (64 * MIB)
    bodies = {
        "identity": b"[" * (64 * MIB),
        "gzip": gzip.compress(spaces, 1),
        "deflate": zlib.compress(spaces, 1),
        "br": BROTLI_SPACES,
        "zstd": b"\x28\xb5\x2f\xfd" + b"\x00" * 100,
    }
    for coding, body in bodies.items():
        for path in (AGL + "/spans/batch", "/v1/traces", "/nothing"):
            headers = f"content-encoding: {coding}\r\n"
            limit = Cost(2, 10 * MIB)
            answer, cost = store.measure("POST", path, body, token=token, headers=headers, limit=limit)
            assert answer.status == 401, (coding, path, answer)
            assert cost.cpu_units < limit.cpu_units, (coding, path, cost)
            assert cost.memory_bytes < limit.memory_bytes, (coding, path, cost)


def test_a_request_with_the_token_of_an_attempt_costs_little_cpu_and_less_than_200_mb(store: StoreProcess) -> None:
    rollout_id, attempt_id, token = store.claim()
    span = {"rollout_id": rollout_id, "attempt_id": attempt_id, **SPAN}
    start = json.dumps(span)[:-1].encode()
    attributes = start + b',"attributes":{"a":['
    otlp_span = _field(5, b"n") + _field(1, b"1" * 16) + _field(2, b"2" * 8)
    cases = {
        "bomb of 59 KB": (f"{AGL}/spans/batch", _many(b"1,", 30_000_000), GZIP, {413}),
        "many gzip members": (f"{AGL}/spans", gzip.compress(b"") * 500_000, GZIP, {413}),
        "lists": (f"{AGL}/spans/batch", b'{"spans":[' + b"[]," * (5 * MIB) + b"1]}", "", {413}),
        "brackets": (f"{AGL}/spans/batch", b"[" * (16 * MIB), "", {413}),
        "lists in an attribute": (f"{AGL}/spans", attributes + b"[]," * 95_000 + b"1]}}", "", {201}),
        "dicts in an attribute": (f"{AGL}/spans", attributes + b'{"a":1},' * 49_000 + b"1]}}", "", {201}),
        "long integers": (f"{AGL}/spans", attributes + (b"1" * 100 + b",") * 90_000 + b"1]}}", "", {413}),
        "unknown keys": (
            f"{AGL}/spans",
            start + b"".join([b',"k%d":1' % number for number in range(65_000)]) + b"}",
            "",
            {201, 422},
        ),
        "wrong spans": (
            f"{AGL}/spans/batch",
            b'{"spans":[' + b",".join([b'{"a":1,"b":1,"c":1,"d":1,"e":1}'] * 2000) + b"]}",
            "",
            {422},
        ),
        "large spans": (
            f"{AGL}/spans/batch",
            json.dumps(
                {
                    "spans": [
                        {**span, "span_id": f"{number:016x}", "attributes": {"a": "b" * 7500}} for number in range(2000)
                    ]
                }
            ).encode(),
            "",
            {201},
        ),
        "escapes": (
            f"{AGL}/spans",
            start + b',"attributes":{"a":"' + b"\\\\" * (8 * MIB - 999) + b'"}}',
            "",
            {201, 413},
        ),
        "protobuf messages": ("/v1/traces", b"\x0a\x00" * (8 * MIB - 1), PROTOBUF, {413}),
        "protobuf spans": ("/v1/traces", _field(1, _field(2, b"\x12\x00" * 49_000)), PROTOBUF, {413}),
        "protobuf links": (
            "/v1/traces",
            _field(1, _field(2, _field(2, otlp_span + _field(13, b"") * 49_000))),
            PROTOBUF,
            {200},
        ),
    }
    before = store.memory_bytes
    for name, (path, body, headers, statuses) in cases.items():
        limit = Cost(40, 200 * MIB)
        answer, cost = store.measure("POST", path, body, token=token, headers=headers, limit=limit)
        assert answer.status in statuses, (name, answer)
        assert cost.cpu_units < limit.cpu_units, (name, cost)
        assert cost.memory_bytes < limit.memory_bytes, (name, cost)
    assert store.memory_bytes - before < 200 * MIB


@pytest.mark.parametrize(("expect", "status"), [("\xff", 417), ("100-continue", 100), ("200-ok", 417)])
def test_an_expect_header_is_answered_or_refused(store: StoreProcess, expect: str, status: int) -> None:
    head = f"POST {AGL}/rollouts HTTP/1.1\r\nhost: 127.0.0.1\r\nexpect: {expect}\r\ncontent-length: 5\r\n\r\n"
    with store.connect() as connection:
        connection.sendall(head.encode("latin-1"))
        assert connection.recv(65536).startswith(f"HTTP/1.1 {status} ".encode())
    assert "Traceback" not in store.log.read_text()


def test_the_rest_of_a_refused_body_is_not_read(store: StoreProcess) -> None:
    _, _, token = store.claim()
    for path, shown, status in (("/spans/batch", None, 401), ("/rollouts/search", token, 403), ("/runs", TOKEN, 413)):
        head = f"POST {AGL}{path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {10**9}\r\n"
        shown = "" if shown is None else f"authorization: Bearer {shown}\r\n"
        with store.connect() as connection:
            connection.sendall((head + shown + "\r\n").encode() + b"[" * 1000)
            answer = b""
            while piece := connection.recv(65536):  # until the server closes the connection
                answer += piece
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
        assert b"connection: close" in answer.lower()


def test_health_is_answered_while_large_bodies_are_read(store: StoreProcess) -> None:
    rollout_id, attempt_id, token = store.claim()
    start = json.dumps({"rollout_id": rollout_id, "attempt_id": attempt_id, **SPAN})[:-1].encode()
    body = start + b',"attributes":{"a":[' + b'{"a":1},' * 49_000 + b"1]}}"
    senders = [
        threading.Thread(target=lambda: [store.ask("POST", AGL + "/spans", body, token=token) for _ in range(4)])
        for _ in range(3)
    ]
    for sender in senders:
        sender.start()
    answers = 0
    while any(sender.is_alive() for sender in senders):
        assert store.ask("GET", AGL + "/health").status == 200
        answers += 1
    assert answers > 13, "a server that reads twelve bodies in one go each answers between them only"
