"""A gateway process under random requests."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentlightning.run import attempt_token
from agentlightning_plugins.stores.http.server import LightningStoreServer
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.http_site import serving
from tests.security.fuzz import MIB, Findings, Grammar, fuzz
from tests.security.gateway_process import port_of, process, text_of

TOKEN = "the-token-of-this-store"
HELLO = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None, "tool_calls": []}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
LIMITS = {"max_tokens": 2, "temperature": 1.0, "seed": 1}
BODIES: list[dict[str, Any]] = [
    {"model": "m", "messages": HELLO, "tools": [TOOL], "stream": False, "n": 1, **LIMITS},
    {"model": "m", "messages": HELLO, "stream": True, "stream_options": {"include_usage": False}, **LIMITS},
    {"model": "m", "prompt": "once", "logprobs": 1, "stop": ["."], "stream": False, **LIMITS},
    {"model": "m", "prompt": [1, 2], "stream": True, **LIMITS},
]
GATEWAY_BODIES: list[dict[str, Any]] = [
    *BODIES,
    {"model": "m", "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
    {"model": "m", "input": "hi", "stream": True, "tools": [{"type": "function", "name": "add", "parameters": {}}]},
    {
        "model": "m",
        "max_tokens": 9,
        "system": "Be brief.",
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
        ],
    },
    {"model": "m", "input": ["a", "b"], "dimensions": 2},
    {"weight_version": 1},
    {"timeout_s": 0},
]
WANTED = {200, 400, 401, 404, 413, 415}
DURATION = [pytest.param(2.0, id="short"), pytest.param(1200.0, id="long", marks=pytest.mark.soak)]


async def answer(request: web.Request) -> web.Response:
    """Answers any request like a model server."""
    try:
        body: Any = json.loads(await request.read())
    except (ValueError, RecursionError):
        return web.json_response({"error": {"message": "not JSON"}}, status=400)
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    if request.path.endswith("embeddings"):
        return web.json_response({"data": [{"embedding": [0.5], "index": 0}], "model": "m", "usage": usage})
    part = {"role": "assistant", "content": "ok"}
    if body.get("stream"):
        choice = {"index": 0, "delta": part, "text": "ok", "finish_reason": "stop"}
        event = f"data: {json.dumps({'id': 'x', 'model': 'm', 'choices': [choice]})}\n\ndata: [DONE]\n\n"
        return web.Response(text=event, content_type="text/event-stream")
    choice = {"index": 0, "message": part, "text": "ok", "finish_reason": "stop"}
    return web.json_response({"id": "x", "model": "m", "choices": [choice], "usage": usage})


def check(findings: Findings, seed: int, seconds: float) -> None:
    shown = f"seed {seed}: {findings.statuses}"
    assert findings.bad == [], shown
    if seconds < 60:  # in its first seconds a process grows to the memory of concurrent requests
        return
    assert findings.memory_growth < 100 * MIB, f"{shown}: it grew by {findings.memory_growth / MIB:.0f} MiB"
    health_s = sorted(findings.health_s)
    assert len(health_s) > 10
    late = health_s[int(len(health_s) * 0.95)]
    assert late < 0.2, f"{shown}: of {len(health_s)} answers of /health, 5 % took {late:.2f} to {health_s[-1]:.2f} s"


def make_grammar(ids: tuple[str, str], port: int) -> Grammar:
    """Returns requests to a gateway, of an attempt and of strangers."""
    own = f"/rollout/{ids[0]}/attempt/{ids[1]}"
    calls = ("chat/completions", "completions", "responses", "embeddings", "messages", "messages/count_tokens")
    paths = [f"{prefix}/v1/{call}" for call in calls for prefix in ("", own, "/rollout/ro-x/attempt/at-x")]
    paths += ["/anthropic/v1/messages", "/v1/models", "/v1/models/m", "/health", "/status", "/metrics"]
    paths += ["/drain", "/resume", "/", "/nothing", f"{own}/", "/rollout//attempt//v1/chat/completions"]
    secret = attempt_token.derive_secret(TOKEN)
    tokens = [f"Bearer {attempt_token.mint(secret, *ids, 2e9)}"] * 4
    tokens += [f"Bearer {attempt_token.mint(secret, *ids, 1.0)}", f"Bearer {TOKEN}", "Bearer agl-x.y", "Basic x"]
    return Grammar(paths, GATEWAY_BODIES, tokens, port)


@pytest.mark.parametrize("seconds", DURATION)
async def test_the_gateway_withstands_random_requests(seconds: float, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    store = InMemoryLightningStore()
    served = LightningStoreServer(store, port=0, token=TOKEN)
    await served.start()
    routes = [web.route("*", "/{path:.*}", answer)]
    try:
        async with serving(*routes) as models:
            log = tmp_path / "log"
            arguments = ["--model", f"m={models}/v1", "--store", served.endpoint, "--token", TOKEN, "--port", "0"]
            async with process(log, "-m", "agentlightning", "gateway", *arguments) as gateway:
                port = await port_of(gateway, log, r"Serving .* at http://127\.0\.0\.1:(\d+)")
                rollout = await store.start_rollout({})
                grammar = make_grammar((rollout.rollout_id, rollout.attempt.attempt_id), port)
                findings = await fuzz(grammar, gateway.pid, seconds, seed, wanted={*WANTED, 403})
                assert gateway.returncode is None, text_of(log)
                assert "Traceback" not in text_of(log), text_of(log)[:4000]
    finally:
        await served.stop()
        await store.close()
    check(findings, seed, seconds)
