"""Recorded answers of the fake server have the fields of the real server."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from tests.algorithms.vllm_server import WIRE

MESSAGES = [{"role": "user", "content": "Add 2 and 3."}]
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
CHAT = {
    "model": "policy",
    "messages": MESSAGES,
    "max_tokens": 200,
    "logprobs": True,
    "return_token_ids": True,
    "tools": [{"type": "function", "function": {"name": "add", "strict": True, "parameters": NO_PARAMETERS}}],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
}


async def request(server: Any, method: str, path: str, body: Any = None) -> Any:
    url = server.endpoint.removesuffix("/v1") + path
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body) as response:
        text = await response.text()
    if text.startswith("data:"):
        return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return json.loads(text)


def missing(recorded: Any, real: Any, place: str = "") -> list[str]:
    """Returns the fields of a recorded answer that the real answer lacks or has with another type."""
    if isinstance(recorded, dict) and isinstance(real, dict):
        return [
            place + name if name not in real else item
            for name in recorded
            for item in (missing(recorded[name], real[name], f"{place}{name}.") if name in real else [""])
        ]
    if isinstance(recorded, list) and isinstance(real, list):
        return missing(recorded[0], real[0], place) if recorded and real else []
    numbers = (int, float)
    same = isinstance(real, type(recorded)) or (isinstance(recorded, numbers) and isinstance(real, numbers))
    return [] if same or recorded is None or real is None else [place.rstrip(".")]


async def test_recorded_answers_have_the_fields_of_the_real_server(server: Any) -> None:
    asked = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 1, "logprobs": 1, "return_token_ids": True}
    completion = await request(server, "POST", "/v1/completions", asked)
    completion["choices"][0]["logprobs"].pop("top_logprobs")  # named by token
    recorded = json.loads(json.dumps(WIRE["completion"]))
    recorded["choices"][0]["logprobs"].pop("top_logprobs")
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(server.model), "is_checkpoint_format": True}}
    found = {
        "models": missing(WIRE["models"], await request(server, "GET", "/v1/models")),
        "completion": missing(recorded, completion),
        "chat": missing(WIRE["chat"], await request(server, "POST", "/v1/chat/completions", CHAT)),
        "pause": missing(WIRE["pause"], await request(server, "POST", "/pause?mode=wait")),
        "is_paused": missing({"is_paused": True}, await request(server, "GET", "/is_paused")),
        "collective_rpc": missing(WIRE["collective_rpc"], await request(server, "POST", "/collective_rpc", reload)),
        "resume": missing(WIRE["resume"], await request(server, "POST", "/resume")),
        "error": missing(WIRE["error"], await request(server, "POST", "/v1/completions", {**asked, "model": "no"})),
        "server_info": missing({"vllm_config": ""}, await request(server, "GET", "/server_info")),
    }
    assert not any(found.values()), found


async def test_recorded_chunks_have_the_fields_of_the_real_stream(server: Any) -> None:
    real = await request(server, "POST", "/v1/chat/completions", {**CHAT, "stream": True})
    recorded: list[dict[str, Any]] = WIRE["stream"]
    assert not missing(recorded[0], real[0])
    with_prompt = [[bool(chunk.get("prompt_token_ids")) for chunk in chunks] for chunks in (recorded, real)]
    assert [sum(chunks) for chunks in with_prompt] == [1, 1], "the prompt's tokens are sent once"
    assert all(chunks[0] for chunks in with_prompt), "the prompt's tokens are sent in the first chunk"
    fields: list[set[str]] = [set(), set()]
    for seen, chunks in zip(fields, (recorded, real), strict=True):
        for chunk in chunks:
            for choice in chunk["choices"]:
                seen |= {name for name, value in choice.items() if value is not None}
                seen |= {f"delta.{name}" for name, value in choice["delta"].items() if value is not None}
    assert fields[0] <= fields[1] | {"delta.reasoning"}, fields
