"""A fake vLLM server without a model, for the tests of the environment `main`.

It answers from ``vllm_wire.json``, whose fields ``tests/vllm/test_wire.py`` compares with those of a real server.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from aiohttp import web

WIRE: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_wire.json").read_text())


def completion(temperature: float, *, processed: bool) -> dict[str, Any]:
    answer: dict[str, Any] = copy.deepcopy(WIRE["completion"])
    logprobs = answer["choices"][0]["logprobs"]
    if processed:
        logprobs["token_logprobs"] = [value / temperature for value in logprobs["token_logprobs"]]
        logprobs["top_logprobs"] = [{t: v / temperature for t, v in top.items()} for top in logprobs["top_logprobs"]]
    return answer


def has_weights(path: str) -> bool:
    return path == WIRE["models"]["data"][0]["root"] or any(Path(path).glob("*.safetensors"))


class FakeVLLM:
    """A fake vLLM server for ``async with``; ``asked`` lists its requests in order."""

    def __init__(
        self,
        *,
        dev_mode: bool = True,
        processed: bool = True,
        token_ids: bool = True,
        lora: bool = True,
        device: str = "cuda",
    ) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.paused = False
        self.endpoint = ""
        self.api_key: str | None = None
        self.adapters: dict[str, str] = {}
        self._processed, self._token_ids, self._device = processed, token_ids, device
        app = web.Application(middlewares=[self._listen])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        if dev_mode:
            app.router.add_get("/server_info", self._server_info)
            app.router.add_get("/is_paused", self._is_paused)
            app.router.add_post("/pause", self._pause)
            app.router.add_post("/resume", self._resume)
            app.router.add_post("/collective_rpc", self._collective_rpc)
        if lora:
            app.router.add_post("/v1/load_lora_adapter", self._load_lora_adapter)
            app.router.add_post("/v1/unload_lora_adapter", self._unload_lora_adapter)
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
        guarded = self.api_key is not None and request.path.startswith("/v1")
        if guarded and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response(WIRE["unauthorized"], status=401)
        body = json.loads(await request.read() or b"null")
        self.asked.append((request.path_qs, body))
        try:
            answer: web.StreamResponse = await handler(request)
        except web.HTTPNotFound:
            return web.json_response({"detail": "Not Found"}, status=404)
        return answer

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(WIRE["models"])

    async def _completions(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        assert not self.paused
        answer = completion(body["temperature"], processed=self._processed)
        if not (self._token_ids and body.get("return_token_ids")):
            answer["choices"][0] |= {"token_ids": None, "prompt_token_ids": None}
        return web.json_response(answer)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        assert body["return_token_ids"] is True
        assert body["logprobs"] is True
        if not body.get("stream"):
            return web.json_response(WIRE["chat"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in WIRE["stream"]:
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"vllm_config": f"dtype=torch.float32, device_config={self._device}, seed=0"})

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "wait"
        self.paused = True
        return web.json_response(WIRE["pause"])

    async def _resume(self, _: web.Request) -> web.Response:
        self.paused = False
        return web.json_response(WIRE["resume"])

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        assert self.paused
        assert body["method"] == "reload_weights"
        assert body["kwargs"]["is_checkpoint_format"] is True
        path = body["kwargs"]["weights_path"]
        if not has_weights(path):
            error = {**WIRE["error"]["error"], "message": WIRE["error"]["error"]["message"].format(path=path)}
            return web.json_response({"error": error}, status=500)
        return web.json_response(WIRE["collective_rpc"])

    async def _load_lora_adapter(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        assert self.paused
        name, path = body["lora_name"], body["lora_path"]
        if name in self.adapters or not (Path(path) / "adapter_config.json").is_file():
            error = {"message": f"The lora adapter {name!r} has already been loaded, or is missing.", "code": 400}
            return web.json_response({"error": error}, status=400)
        self.adapters[name] = path
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_lora_adapter(self, request: web.Request) -> web.Response:
        name = json.loads(await request.read())["lora_name"]
        if self.adapters.pop(name, None) is None:
            error = {"message": f"The lora adapter '{name}' cannot be found.", "type": "NotFoundError", "code": 404}
            return web.json_response({"error": error}, status=404)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")
