"""A server that answers as vLLM does: bodies and statuses as its routers write them, and no model.

From vLLM's ``entrypoints/serve/dev/rlhf`` and ``dev/rpc`` (pause, resume, is_paused, collective_rpc) and its OpenAI
protocol (models, completions with ``return_token_ids``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aiohttp import web

MODELS = {
    "object": "list",
    "data": [
        {
            "id": "policy",
            "object": "model",
            "created": 1762000000,
            "owned_by": "vllm",
            "root": "/models/qwen",
            "parent": None,
            "max_model_len": 4096,
            "permission": [],
        }
    ],
}


def completion(temperature: float, *, processed: bool) -> dict[str, Any]:
    logprob = -0.4 / temperature if processed else -0.4
    return {
        "id": "cmpl-7a55",
        "object": "text_completion",
        "created": 1762000000,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "text": " a",
                "logprobs": {
                    "text_offset": [0],
                    "token_logprobs": [logprob],
                    "tokens": [" a"],
                    "top_logprobs": [{" a": logprob}],
                },
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": [264],
                "prompt_logprobs": None,
                "prompt_token_ids": [1, 2, 3],
            }
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1, "prompt_tokens_details": None},
        "kv_transfer_params": None,
    }


def has_weights(path: str) -> bool:
    return any(Path(path).glob("*.safetensors"))


class FakeVLLM:
    """Started with ``async with``; ``asked`` is what it was asked, in order."""

    def __init__(self, *, dev_mode: bool = True, processed: bool = True, token_ids: bool = True) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.paused = False
        self.endpoint = ""
        self.api_key: str | None = None
        self._processed, self._token_ids = processed, token_ids
        app = web.Application(middlewares=[self._listen])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        if dev_mode:
            app.router.add_get("/is_paused", self._is_paused)
            app.router.add_post("/pause", self._pause)
            app.router.add_post("/resume", self._resume)
            app.router.add_post("/collective_rpc", self._collective_rpc)
        self._runner = web.AppRunner(app)

    async def __aenter__(self) -> FakeVLLM:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.endpoint = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _listen(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = json.loads(await request.read() or b"null")
        self.asked.append((request.path_qs, body))
        try:
            answer: web.StreamResponse = await handler(request)
        except web.HTTPNotFound:
            return web.json_response({"detail": "Not Found"}, status=404)
        return answer

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(MODELS)

    async def _completions(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        assert not self.paused
        answer = completion(body["temperature"], processed=self._processed)
        if not (self._token_ids and body.get("return_token_ids")):
            del answer["choices"][0]["token_ids"]
        return web.json_response(answer)

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "wait"
        self.paused = True
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"status": "resumed"})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        assert self.paused
        assert body["method"] == "reload_weights"
        assert body["kwargs"]["is_checkpoint_format"] is True
        path = body["kwargs"]["weights_path"]
        if not has_weights(path):
            message = f"Cannot find any model weights with `{path}`"
            error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
            return web.json_response({"error": error}, status=500)
        return web.json_response({"results": [None]})
