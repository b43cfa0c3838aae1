"""``backend: vllm``: the policy is sampled by a vLLM server that runs already, on this machine or another.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --served-model-name policy --logprobs-mode processed_logprobs

New weights are written by the trainer to a directory that the server sees too, and read by it in place:

    POST /pause?mode=wait     calls under way end, further ones wait, cached prefixes are forgotten
    POST /collective_rpc      reload_weights, with weights_path = DIR and is_checkpoint_format = true
    POST /resume

These paths exist in development mode only, and let whoever reaches them replace the model: the server belongs on
loopback or a network of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from agentlightning.errors import ConfigError, LightningError
from agentlightning_algorithms.policy_backend import PolicySetup


class VLLMBackend:
    """A vLLM server, 0.16 or later, over HTTP. It is neither started nor ended from here."""

    tells_versions = False

    def __init__(
        self,
        *,
        endpoint: str = "http://127.0.0.1:8000/v1",
        served_model: str | None = None,
        api_key: str | None = None,
        reload_timeout_s: float = 600.0,
    ) -> None:
        """Sets the address.

        Args:
            endpoint: OpenAI base URL.
            served_model: what the server calls the model; default what agents call it.
            api_key: of the server.
            reload_timeout_s: how long calls under way and reading the weights may take together.
        """
        self.endpoint = endpoint.rstrip("/")
        self._served_model = served_model
        self._api_key = api_key
        self._reload_timeout_s = reload_timeout_s
        self._model_name = ""

    @property
    def model_entry(self) -> Mapping[str, Any]:
        """The entry in the gateway's model list."""
        entry: dict[str, Any] = {
            "model_name": self._model_name,
            "model": self._served_model or self._model_name,
            "endpoint": self.endpoint,
            "provider": "vllm",
        }
        return {**entry, "api_key": self._api_key} if self._api_key else entry

    async def start(self, setup: PolicySetup) -> None:
        """Checks that the server is there, serves the model, and tells what training needs.

        Raises:
            ConfigError: it lacks an option; the message names it.
            LightningError: it cannot be reached.
        """
        self._model_name = setup.model_name
        served = self._served_model or setup.model_name
        status, models = await self._ask("GET", "/v1/models")
        names = [model["id"] for model in models.get("data", ())] if status == 200 else []
        if served not in names:
            raise ConfigError(
                f"the vLLM server at {self.endpoint} has no model {served!r} (status {status}, models: "
                f"{', '.join(names) or 'none'}); start it with --served-model-name {served}, or set served_model."
            )
        status, _ = await self._ask("GET", "/is_paused")
        if status != 200:
            raise ConfigError(
                f"the vLLM server at {self.endpoint} has no /is_paused (status {status}), so its weights cannot be "
                "replaced; start vLLM 0.16 or later with the environment variable VLLM_SERVER_DEV_MODE=1."
            )
        await self._resume()  # a training that was killed may have left it paused
        await self._check_logprobs(served)

    async def load_weights(self, path: Path, version: int) -> None:
        """Replaces the weights by those in ``path``; the version stays with the caller.

        Raises:
            ConfigError: the server refuses them.
            LightningError: it does not answer.
        """
        kwargs = {"weights_path": _absolute(path), "is_checkpoint_format": True}
        try:
            await self._demand("/pause?mode=wait")
            status, answer = await self._ask("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
            if status != 200:
                raise ConfigError(
                    f"the vLLM server refused weights version {version} (status {status}): {_told(answer)}. It must "
                    f"see {kwargs['weights_path']} under the same path."
                )
        finally:
            await self._resume()

    def check(self) -> None:
        """Harmless: the server is not ours, and a call that fails says so."""

    async def statistics(self) -> Mapping[str, float]:
        """Returns nothing: vLLM's own ``/metrics`` has its numbers."""
        return {}

    async def stop(self) -> None:
        """Leaves the server as it is."""

    async def _check_logprobs(self, served: str) -> None:
        """Asks for the same token at two temperatures: log-probabilities taken before the temperature are equal."""
        told = []
        for temperature in (1.0, 2.0):
            body = {
                "model": served,
                "prompt": [1, 2, 3],
                "max_tokens": 1,
                "temperature": temperature,
                "seed": 0,
                "logprobs": 1,
                "return_token_ids": True,
            }
            status, answer = await self._ask("POST", "/v1/completions", body)
            if status != 200:
                raise ConfigError(f"the vLLM server cannot complete a prompt (status {status}): {_told(answer)}")
            choice = answer["choices"][0]
            if not choice.get("token_ids"):
                raise ConfigError(
                    "the vLLM server tells no token ids (return_token_ids); vLLM 0.16 or later is needed."
                )
            told.append(max(choice["logprobs"]["top_logprobs"][0].values()))
        if math.isclose(*told, abs_tol=1e-4):
            raise ConfigError(
                f"the vLLM server tells log-probabilities before the temperature is applied ({told[0]:.4f} at 1 and at "
                "2); start it with --logprobs-mode processed_logprobs."
            )

    async def _resume(self) -> None:
        await self._demand("/resume")

    async def _demand(self, path: str) -> None:
        status, answer = await self._ask("POST", path)
        if status != 200:
            raise LightningError(
                f"the vLLM server at {self.endpoint} refused {path} (status {status}): {_told(answer)}"
            )

    async def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        url = self.endpoint.removesuffix("/v1") + path
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        timeout = aiohttp.ClientTimeout(total=self._reload_timeout_s, connect=30)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.request(method, url, json=body) as response,
            ):
                text = await response.read()
                return response.status, _parse(text)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LightningError(
                f"the vLLM server at {self.endpoint} does not answer {path} ({type(error).__name__}: {error})."
            ) from error


def _absolute(path: Path) -> str:
    return str(path.resolve())


def _parse(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return {"error": text.decode(errors="replace")[:500]}


def _told(answer: Any) -> str:
    """What an error says: vLLM writes ``error`` as text or with a message, and FastAPI ``detail``."""
    error = answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)
