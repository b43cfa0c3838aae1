"""The rollout backend ``transformers``: a server of the OpenAI API for tests, laptops and small models.

verl starts one replica per inference engine; each is a Ray actor that samples on transformers. The adapter lives in
verl's training process and brings the weights over through Ray's object store.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import ray
import torch
from aiohttp import web
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from agentlightning.errors import ConfigError
from agentlightning_algorithms.verl.sampler import Sampler

_NAME: Final = "agentlightning_replica_{rank}"


class TransformersServer:
    """Serves ``/v1/chat/completions`` and ``/v1/models`` on loopback, and verl's own token-in, token-out calls."""

    def __init__(self, model_config: Any, rollout_config: Any) -> None:
        from transformers import AutoTokenizer

        torch.set_num_threads(1)
        path = model_config.local_path if hasattr(model_config, "local_path") else model_config.path
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=model_config.trust_remote_code)
        template = model_config.get("custom_chat_template", None)
        if template is not None:
            self._tokenizer.chat_template = template
        self._sampler = Sampler(
            path,
            dtype=rollout_config.dtype,
            device="cuda" if torch.cuda.is_available() else "cpu",
            trust_remote_code=model_config.trust_remote_code,
        )
        self._limit = rollout_config.max_model_len or rollout_config.prompt_length + rollout_config.response_length
        self._model_name = model_config.path

    async def launch(self) -> str:
        """Begins to serve; the address, as ``host:port``."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"127.0.0.1:{runner.addresses[0][1]}"

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        """Verl's own way to sample; agents come through HTTP."""
        wanted = sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens") or self._limit
        sample = await asyncio.to_thread(
            self._sampler.sample,
            prompt_ids,
            max_tokens=min(int(wanted), self._limit - len(prompt_ids)),
            temperature=float(sampling_params.get("temperature", 1.0)),
            top_p=float(sampling_params.get("top_p", 1.0)),
            top_k=int(sampling_params.get("top_k", -1)),
        )
        return TokenOutput(
            token_ids=sample.token_ids,
            log_probs=sample.logprobs,
            stop_reason="completed",
            extra_fields={"global_steps": sample.weight_version},
        )

    async def load_weights(self, weights: dict[str, torch.Tensor], version: int | None) -> None:
        """Replaces the weights."""
        await asyncio.to_thread(self._sampler.load_weights, weights, version)

    async def nothing(self, *_: Any, **__: Any) -> None:
        """What verl asks of engines that share a GPU with the trainer: there is no memory to give back here."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = nothing

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._model_name, "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("stream") or body.get("n", 1) != 1:
            return _refuse("this server gives one answer, whole: leave out stream and n")
        try:
            prompt_ids = self._tokenizer.apply_chat_template(
                body["messages"],
                tools=body.get("tools"),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # isolation point: the template is the model's, the messages are the agent's
            return _refuse(f"the chat template refuses these messages: {error}")
        if len(prompt_ids) >= self._limit:
            return _refuse(
                f"the prompt has {len(prompt_ids)} tokens, and the model takes {self._limit} with the answer"
            )
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or self._limit
        temperature, top_p, top_k = (body.get(name) for name in ("temperature", "top_p", "top_k"))
        sample = await asyncio.to_thread(
            self._sampler.sample,
            prompt_ids,
            max_tokens=min(int(wanted), self._limit - len(prompt_ids)),
            temperature=1.0 if temperature is None else float(temperature),
            top_p=1.0 if top_p is None else float(top_p),
            top_k=-1 if top_k is None else int(top_k),
        )
        text = self._tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        pieces = self._tokenizer.convert_ids_to_tokens(sample.token_ids)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": sample.finish_reason,
            "token_ids": sample.token_ids,
            "logprobs": {
                "content": [
                    {"token": piece, "logprob": logprob, "bytes": None, "top_logprobs": []}
                    for piece, logprob in zip(pieces, sample.logprobs, strict=True)
                ]
            },
        }
        used = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(sample.token_ids)}
        return web.json_response(
            {
                "id": f"chatcmpl-{uuid.uuid4().hex}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": body.get("model", self._model_name),
                "choices": [choice],
                "usage": {**used, "total_tokens": sum(used.values())},
                "prompt_token_ids": list(prompt_ids),
                "weight_version": sample.weight_version,
            }
        )


def _refuse(message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return web.json_response({"error": error}, status=400)


class TransformersReplica(RolloutReplica):  # type: ignore[misc] # verl's classes are untyped
    """One server for each inference engine of verl's configuration."""

    async def launch_servers(self) -> None:
        options = {"name": _NAME.format(rank=self.replica_rank), "num_cpus": 0.1, "max_concurrency": 256}
        server = ray.remote(TransformersServer).options(**options).remote(self.model_config, self.config)
        self.servers = [server]
        self._server_handle, self._server_address = server, await server.launch.remote()


class TransformersAdapter(BaseRollout):  # type: ignore[misc] # verl's classes are untyped
    """The end of the weights' way that lives in verl's training process."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ.get("RANK", "0"))
        per_replica = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        self.replica_rank = replica_rank if replica_rank >= 0 else rank // per_replica
        self.is_leader_rank = rank % per_replica == 0

    async def resume(self, tags: list[str]) -> None:
        """There is no memory to take back."""

    async def release(self) -> None:
        """There is no memory to give back."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **_: Any,
    ) -> None:
        if wire_format != "named_tensors":
            raise ConfigError(
                f"checkpoint_engine sends {wire_format!r}; the rollout backend transformers takes whole tensors: leave "
                "actor_rollout_ref.rollout.checkpoint_engine.backend at naive"
            )
        own: dict[str, torch.Tensor] = {}
        if isinstance(weights, AsyncIterator):
            async for name, tensor in weights:
                own[name] = tensor.detach().cpu().clone()
        else:
            for name, tensor in weights:  # every rank takes part: sharded tensors are gathered on the way
                own[name] = tensor.detach().cpu().clone()
        if self.is_leader_rank:
            server = ray.get_actor(_NAME.format(rank=self.replica_rank))
            await server.load_weights.remote(ray.put(own), global_steps)
