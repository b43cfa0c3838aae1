"""The policy backend ``vllm``: a vLLM server that is already running, on this machine or another.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --served-model-name policy --logprobs-mode processed_logprobs

The trainer writes new weights to a directory that the server also sees, and the server reloads them in place:

    POST /pause?mode=wait     running calls end, further calls wait, cached prefixes are dropped
    POST /collective_rpc      reload_weights, with weights_path = DIR and is_checkpoint_format = true
    POST /resume

These paths exist in development mode only, and any client that reaches them can replace the model: run the server on
loopback or in a private network. Several policies are LoRA adapters, which a server with ``--enable-lora`` and
VLLM_ALLOW_RUNTIME_LORA_UPDATING=True loads by ``POST /v1/load_lora_adapter`` while it is paused.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from agentlightning.errors import ConfigError, LightningError
from agentlightning_algorithms.shared.policy_backend import PolicySetup
from agentlightning_plugins.shared.token import read_key


class VLLMBackend:
    """A vLLM server, 0.16 or later, over HTTP. This backend neither starts nor stops it."""

    tells_versions = False

    def __init__(
        self, *, endpoint: str = "http://127.0.0.1:8000/v1", served_model: str | None = None, api_key: str | None = None
    ) -> None:
        """Takes the settings that only this backend has.

        Args:
            endpoint: OpenAI base URL.
            served_model: the server's name for the model; None: the name that agents use.
            api_key: API key of the server.
        """
        self.endpoint = endpoint.rstrip("/")
        self._served_model = served_model
        self._api_key = api_key
        self._model_name = ""
        self._served: set[str] = set()
        """Names of the server's models and adapters."""
        self._loaded = ""
        """Directory of the newest weights, as the server sees it."""
        self._is_loaded = False
        """Whether the server certainly has these weights; an earlier training may have left other weights."""
        self._on_cpu = False

    @property
    def model_entry(self) -> Mapping[str, Any]:
        """The entry in the gateway's model list."""
        names = {"model_name": self._model_name, "model": self._served_model or self._model_name}
        key = {"api_key": self._api_key} if self._api_key else {}
        return {**names, "endpoint": self.endpoint, "provider": "vllm", **key}

    async def start(self, setup: PolicySetup) -> None:
        """Checks that the server has the model and supports training; an error names the missing option."""
        self._model_name = setup.model_name
        served = self.model_entry["model"]
        status, models = await self._request("GET", "/v1/models")
        names = {str(model["id"]): str(model.get("root")) for model in models.get("data", ())} if status == 200 else {}
        if served not in names:
            raise ConfigError(
                f"the vLLM server at {self.endpoint} has no model {served!r} (status {status}, models: "
                f"{', '.join(names) or 'none'}); start it with --served-model-name {served}, or set served_model."
            )
        self._served, self._loaded = set(names), names[served]
        status, _ = await self._request("GET", "/is_paused")
        if status != 200:
            raise ConfigError(
                f"the vLLM server at {self.endpoint} has no /is_paused (status {status}), so its weights cannot be "
                "replaced; start vLLM 0.16 or later with the environment variable VLLM_SERVER_DEV_MODE=1."
            )
        await self._command("/resume")  # a killed training may have left it paused
        await self._check_logprobs(served)
        status, found = await self._request("GET", "/server_info")
        self._on_cpu = status == 200 and "device_config=cpu" in str(found.get("vllm_config"))

    async def load_weights(self, path: Path, version: int) -> None:
        """Pauses the server while it reloads its weights; the server does not store the version."""
        if self._on_cpu and _ties_embeddings(path):
            raise ConfigError(
                "vLLM on a CPU keeps its old output layer when it reloads a model with tied embeddings "
                "(tie_word_embeddings in config.json), so it would sample from a mixture of old and new weights; use "
                "backend: transformers, or train adapters (policies), or a model with its own output layer."
            )
        new = str(Path.cwd() / path)
        async with self._paused():
            status, answer = await self._reload(new)
            if status != 200:
                # A reload that fails leaves layers without weights, and the next call would end vLLM's engine.
                restored, _ = await self._reload(self._loaded)
                raise ConfigError(
                    f"the vLLM server refused weights version {version} (status {status}): {_error_text(answer)}. It "
                    f"must see {new} under the same path."
                    + ("" if restored == 200 else f" It cannot reload {self._loaded} either; restart the server.")
                )
            self._loaded, self._is_loaded = new, True

    async def _reload(self, directory: str) -> tuple[int, Any]:
        kwargs = {"weights_path": directory, "is_checkpoint_format": True}
        return await self._request("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})

    async def load_adapter(self, name: str, path: Path, version: int) -> None:
        """Pauses the server while it loads an adapter under a name, replacing an earlier adapter of that name."""
        body = {"lora_name": name, "lora_path": str(Path.cwd() / path)}
        async with self._paused():
            if not self._is_loaded:
                status, answer = await self._reload(self._loaded)
                if status != 200:
                    raise ConfigError(
                        f"the vLLM server cannot reload {self._loaded}, its initial weights (status {status}): "
                        f"{_error_text(answer)}; restart it."
                    )
                self._is_loaded = True
            if name in self._served:
                await self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})
            status, answer = await self._request("POST", "/v1/load_lora_adapter", body)
            if status != 200:
                raise ConfigError(
                    f"the vLLM server refused the adapter {name}, version {version} (status {status}): "
                    f"{_error_text(answer)}. It must see {body['lora_path']} under the same path; start it with "
                    "--enable-lora, --max-loras of at least the number of policies, --max-lora-rank of at least their "
                    "rank, and the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."
                )
        self._served.add(name)

    def check(self) -> None:
        """Does nothing: this process does not own the server, and calls fail if the server has ended."""

    async def statistics(self) -> Mapping[str, float]:
        """Returns nothing: vLLM reports its statistics at ``/metrics``."""
        return {}

    async def stop(self) -> None:
        """Does nothing: the server keeps running."""

    async def _check_logprobs(self, served: str) -> None:
        """Samples a token at two temperatures, to check that log-probabilities include the temperature."""
        found = []
        # The server sets omitted fields to the values in the model's generation_config.json.
        unfiltered = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        for temperature in (1.0, 2.0):
            body = {"model": served, "prompt": [1, 2, 3], "max_tokens": 1, "temperature": temperature, "seed": 0}
            asked = {"logprobs": 1, "return_token_ids": True}
            status, answer = await self._request("POST", "/v1/completions", {**body, **unfiltered, **asked})
            if status != 200:
                raise ConfigError(f"the vLLM server cannot complete a prompt (status {status}): {_error_text(answer)}")
            choice = answer["choices"][0]
            if not choice.get("token_ids"):
                raise ConfigError(
                    "the vLLM server returns no token ids (return_token_ids); vLLM 0.16 or later is needed."
                )
            found.append(max(choice["logprobs"]["top_logprobs"][0].values()))
        if math.isclose(*found, abs_tol=1e-4):
            raise ConfigError(
                "the vLLM server returns log-probabilities from before the temperature is applied "
                f"({found[0]:.4f} at 1 and at 2); start it with --logprobs-mode processed_logprobs."
            )

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Waits for running calls and drops cached prefixes; holds back further calls until the block ends."""
        try:
            await self._command("/pause?mode=wait")
            yield
        finally:
            await self._command("/resume")

    async def _command(self, path: str) -> None:
        status, answer = await self._request("POST", path)
        if status != 200:
            raise LightningError(
                f"the vLLM server at {self.endpoint} refused {path} (status {status}): {_error_text(answer)}"
            )

    async def _request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        url = self.endpoint.removesuffix("/v1") + path
        key = read_key(self._api_key)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=600, connect=30)  # for running calls and reloading together
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.request(method, url, json=body) as response,
            ):
                text = await response.read()
                try:
                    return response.status, orjson.loads(text)
                except orjson.JSONDecodeError:
                    return response.status, {"error": text.decode(errors="replace")[:500]}
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LightningError(
                f"the vLLM server at {self.endpoint} does not answer {path} ({type(error).__name__}: {error})."
            ) from error


def _ties_embeddings(path: Path) -> bool:
    """Whether the model in a directory uses its embeddings as output layer, too."""
    file = path / "config.json"
    return file.is_file() and orjson.loads(file.read_bytes()).get("tie_word_embeddings") is True


def _error_text(answer: Any) -> str:
    """Returns the text of an error: vLLM sends ``error`` as text or as an object, FastAPI sends ``detail``."""
    error = answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)
