"""An inference server for the tiny vision-language model, which replaces the rollout backend ``transformers``."""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
import tempfile
import threading
import uuid
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from PIL import Image
from tiny_vision_model import register_processor
from transformers import AutoProcessor, Qwen2VLForConditionalGeneration


def install() -> None:
    """Makes replicas of this process serve images, and registers the processor of the tiny model for verl."""
    from agentlightning_algorithms.verl.inference import replica

    register_processor()
    replica.TransformersServer = VisionServer


COLLAPSED = "collapsed"
"""First text of a conversation whose images the server reports as one token each."""


class VisionServer:
    """Samples from the model with a forward pass per token, and reports tokens and log-probabilities as vLLM does.

    The content of an answer is its token ids as text, so that a conversation continues exactly the sampled tokens.
    """

    def __init__(self, *, model: str, seed: int, **_: Any) -> None:
        register_processor()
        # In the folder of the test, because Ray kills this process, which therefore cannot clean up.
        self._folder = Path(tempfile.mkdtemp(dir=Path(model).parent), "model")
        shutil.copytree(model, self._folder)
        self._processor = AutoProcessor.from_pretrained(self._folder)
        self._tokenizer = self._processor.tokenizer
        self._model = Qwen2VLForConditionalGeneration.from_pretrained(self._folder).eval()
        self._never = [self._processor.image_token_id, self._processor.video_token_id]
        self._lock = threading.Lock()
        self._random = torch.Generator().manual_seed(seed)

    async def launch(self) -> str:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        return f"{host}:{port}"

    async def load_weights(self, weights: bytes, version: int | None) -> None:
        with self._lock:
            (self._folder / "model.safetensors").write_bytes(weights)
            self._model = Qwen2VLForConditionalGeneration.from_pretrained(self._folder).eval()

    async def nothing(self, *_: Any, **__: Any) -> None: ...

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = nothing

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(self._sample, await request.json()))

    def _sample(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, images = self._render(body["messages"])
        ids, logprobs = list(prompt), []
        with self._lock, torch.no_grad():
            while len(logprobs) < body["max_tokens"]:
                scores = self._model(**model_inputs(self._processor, ids, images)).logits[0, -1].float()
                distribution = torch.log_softmax(scores / (body.get("temperature") or 1.0), dim=-1)
                weights = distribution.exp()
                weights[self._never] = 0.0
                ids.append(int(torch.multinomial(weights, 1, generator=self._random)))
                logprobs.append(float(distribution[ids[-1]]))
                if ids[-1] == self._tokenizer.eos_token_id:
                    break
        sampled = ids[len(prompt) :]
        is_collapsed = body["messages"][0]["content"][0]["text"] == COLLAPSED
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": " ".join(map(str, sampled))},
            "finish_reason": "stop" if sampled[-1] == self._tokenizer.eos_token_id else "length",
            "token_ids": sampled,
            "logprobs": {
                "content": [
                    {"token": str(token), "logprob": logprob, "top_logprobs": []}
                    for token, logprob in zip(sampled, logprobs, strict=True)
                ]
            },
        }
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [choice],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(sampled), "total_tokens": len(ids)},
            "prompt_token_ids": self._collapse(prompt) if is_collapsed else prompt,
        }

    def _collapse(self, ids: list[int]) -> list[int]:
        return [token for token, run in groupby(ids) for _ in ([0] if token in self._never else run)]

    def _render(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[Image.Image]]:
        """Returns the tokens of a prompt with all tokens of its images, and the images."""
        ids: list[int] = []
        images: list[Image.Image] = []
        for message in messages:
            ids += self._tokenizer.encode(f"<|im_start|>{message['role']}\n")
            content = message["content"]
            if message["role"] == "assistant":
                ids += [int(token) for token in content.split()]
            elif isinstance(content, str):
                ids += self._tokenizer.encode(content)
            else:
                for part in content:
                    if part["type"] == "text":
                        ids += self._tokenizer.encode(part["text"])
                        continue
                    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                    images.append(Image.open(io.BytesIO(data)).convert("RGB"))
                    pads = self._processor(text=[self._processor.image_token], images=images[-1:])["input_ids"][0]
                    ids += self._tokenizer.encode("<|vision_start|>") + pads + self._tokenizer.encode("<|vision_end|>")
            ids += self._tokenizer.encode("<|im_end|>\n")
        return ids + self._tokenizer.encode("<|im_start|>assistant\n"), images


def model_inputs(processor: Any, ids: list[int], images: list[Image.Image]) -> dict[str, Any]:
    """Returns the inputs of the model, without positions, which the model computes itself."""
    tokens = torch.tensor([ids])
    inputs = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == processor.image_token_id).int(),
    }
    return {**inputs, **(processor.image_processor(images, return_tensors="pt") if images else {})}
