"""The cost of one request to the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agentlightning.run import attempt_token
from agentlightning_plugins.shared.scripted_model.reply import Answer
from agentlightning_plugins.shared.scripted_model.server import ScriptedOpenAI
from agentlightning_plugins.stores.http.server import LightningStoreServer
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.process import cpu_unit_s
from tests.security.fuzz import MIB, send
from tests.security.gateway_process import port_of, process

pytestmark = pytest.mark.serial

TOKEN = "the-token-of-this-store"
PATH = "/v1/chat/completions"
HOSTILE: dict[str, tuple[Callable[[], bytes], str, set[int]]] = {
    "large": (lambda: b"x" * 40 * MIB, "", {413}),
    "inflates to much": (lambda: gzip.compress(b" " * 200 * MIB), "gzip", {413}),
    "inflates a little": (lambda: gzip.compress(b"[" + b"{}," * 10 * MIB + b"0]"), "gzip", {413}),
    "of many members": (lambda: gzip.compress(b" ") * 200_000, "gzip", {413}),
    "many values": (lambda: b"[" + b"{}," * 10 * MIB + b"0]", "", {413}),
    "many strings": (lambda: b"[" + b'"",' * 10 * MIB + b"0]", "", {413}),
    "deep": (lambda: b"[" * 5 * MIB, "", {400, 413}),
    "escapes": (lambda: b'["' + rb"\n" * 15 * MIB + b'"]', "", {400}),
    "in brotli": (lambda: b"\x00" * 2000, "br", {415}),
}
"""Bodies, which are made when they are sent, encodings and the statuses that are right."""


@functools.cache
def body_of(name: str) -> bytes:
    return HOSTILE[name][0]()


def request_of(name: str, token: str) -> tuple[bytes, set[int]]:
    _, encoding, statuses = HOSTILE[name]
    body = body_of(name)
    shown = f"Content-Encoding: {encoding}\r\n" if encoding else ""
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n{shown}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body, statuses


def memory_of(pid: int, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")


async def measure(port: int, pid: int, request: bytes) -> tuple[int, float, int]:
    """Returns the status of the answer, and the CPU time, in units of ``cpu_unit_s``, and the memory that it took."""
    reset_peak(pid)
    clock = (~pid << 3) | 2  # Linux' clock of a process
    before, began = memory_of(pid, "VmHWM"), time.clock_gettime(clock)
    status = await send(port, request)
    return status, (time.clock_gettime(clock) - began) / cpu_unit_s(), memory_of(pid, "VmHWM") - before


@contextlib.asynccontextmanager
async def serve_gateway(
    tmp_path: Path, endpoint: str
) -> AsyncIterator[tuple[InMemoryLightningStore, asyncio.subprocess.Process, int]]:
    """Serves a gateway in a process of its own, over a store with a token; yields store, process and port."""
    store = InMemoryLightningStore()
    served = LightningStoreServer(store, port=0, token=TOKEN)
    await served.start()
    config, log = tmp_path / "gateway.yaml", tmp_path / "log"
    settings: dict[str, Any] = {
        "model_list": [{"model": "m", "endpoint": endpoint, "api_key": "sk-the/real-provider-key"}],
        "require_keys": True,
        "num_retries": 0,
    }
    config.write_text(json.dumps(settings), encoding="utf-8")
    arguments = ["--config", str(config), "--store", served.endpoint, "--token", TOKEN, "--port", "0"]
    try:
        async with process(log, "-m", "agentlightning", "gateway", *arguments) as gateway:
            yield store, gateway, await port_of(gateway, log, r"Serving .* at http://127\.0\.0\.1:(\d+)")
    finally:
        await served.stop()
        await store.close()


async def start_attempt(store: InMemoryLightningStore) -> str:
    """Returns the token of a new attempt."""
    rollout = await store.start_rollout({})
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    return attempt_token.mint(attempt_token.derive_secret(TOKEN), *ids, time.time() + 600)


async def test_a_hostile_request_costs_little_cpu_and_memory_and_without_a_key_almost_none(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path, "http://127.0.0.1:9/v1") as (store, gateway, port):
        token = await start_attempt(store)
        for name in HOSTILE:
            request, statuses = request_of(name, "guess")
            status, cpu, memory = await measure(port, gateway.pid, request)
            assert status in (401, 0), name  # 0: the answer was lost when the connection was closed
            assert cpu < 2, f"{name}: {cpu:.1f} units without a key"
            assert memory < 10 * MIB, f"{name}: {memory / MIB:.0f} MiB without a key"
            request, statuses = request_of(name, token)
            status, cpu, memory = await measure(port, gateway.pid, request)
            assert status in statuses | {0}, name
            assert cpu < 40, f"{name}: {cpu:.1f} units"  # at most 15 on an idle machine
            assert memory < 200 * MIB, f"{name}: {memory / MIB:.0f} MiB"


@pytest.mark.parametrize("unit", ["\\", "%25", "%", "&#", "\\u0073\\"])
async def test_a_long_text_in_an_answer_an_error_or_a_stream_costs_little_cpu(tmp_path: Path, unit: str) -> None:
    text = unit * (200_000 // len(unit))
    choice = {"index": 0, "message": {"content": text}, "finish_reason": "stop"}
    chunk = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
    event = f"data: {json.dumps({'id': 'x', 'choices': [chunk]})}\n\ndata: [DONE]\n\n".encode()
    script = [
        Answer(body=json.dumps({"id": "x", "choices": [choice]}).encode()),
        Answer(status=400, error=text),
        Answer(body=event, content_type="text/event-stream"),
    ]
    async with ScriptedOpenAI(script) as backend, serve_gateway(tmp_path, backend.endpoint) as (store, gateway, port):
        token = await start_attempt(store)
        for status in (200, 400, 200):
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
            head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
            request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
            found, cpu, _ = await measure(port, gateway.pid, request)
            assert found == status
            assert cpu < 10, f"{cpu:.1f} units"  # at most 2 on an idle machine; a quadratic search takes 1,000
