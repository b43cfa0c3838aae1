"""Policy backends: the model servers that sample a policy while it is trained.

A component of the kind ``policy_backend`` is a class that implements :class:`PolicyBackend`; its constructor takes the
settings that users write after its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from agentlightning.algorithm.context import Gateway
from agentlightning.errors import ConfigError, LightningError

API_KEY_VARIABLE: Final = "AGL_POLICY_API_KEY"
"""The environment variable with the key that the policy server requires for completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySetup:
    """The policy to sample.

    Attributes:
        model: directory or hub name of the initial weights.
        model_name: the name that agents use.
        directory: the directory for logs.
        dtype: the type of the weights during sampling.
        device: the device of the model, such as ``cpu`` or ``cuda:0``.
        threads: number of torch threads; None: torch's default.
        max_batch_size: maximum number of calls sampled at the same time.
        seed: the seed for calls that have none.
        swap_in_flight: whether new weights are loaded without waiting for running calls. Such calls mix versions; each
            choice of their answers has the version of each token (``weight_versions``). A backend may ignore this.
    """

    model: str
    model_name: str
    directory: Path
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    max_batch_size: int = 64
    seed: int | None = None
    swap_in_flight: bool = False


class PolicyBackend(Protocol):
    """A model server behind an OpenAI-compatible endpoint whose weights can be replaced.

    It supports ``return_token_ids`` and ``logprobs`` as vLLM does; the log-probabilities are those of the distribution
    that was sampled from, temperature and filters included.
    """

    tells_versions: bool
    """Whether each answer has the version of the weights that sampled its first token (``weight_version``) and, if
    other weights sampled the rest, the version of each token. Otherwise the gateway holds calls back while the weights
    change, and records the version."""

    @property
    def model_entry(self) -> Mapping[str, Any]:
        """The entry in the gateway's model list; available after :meth:`start`."""
        ...

    async def start(self, setup: PolicySetup) -> None:
        """Starts or connects to the server, and returns when the model answers.

        Raises:
            ConfigError: the server lacks an option that training needs.
            LightningError: the server cannot be reached or did not start.
        """
        ...

    async def load_weights(self, path: Path, version: int) -> None:
        """Replaces the weights, and returns once every call that begins later is sampled with them.

        ``path`` was written by ``save_pretrained``, in a file system that the server can read.

        Raises:
            ConfigError: the weights belong to another model.
            LightningError: the server does not answer.
        """
        ...

    def check(self) -> None:
        """Raises a LightningError if the server is known to have ended."""
        ...

    async def statistics(self) -> Mapping[str, float]:
        """Returns totals since the start, by name."""
        ...

    async def stop(self) -> None:
        """Stops what :meth:`start` started; may be called at any time."""
        ...


@runtime_checkable
class AdapterBackend(Protocol):
    """A policy backend that serves several LoRA adapters over its model; the ``model`` of a request names one."""

    async def load_adapter(self, name: str, path: Path, version: int) -> None:
        """Adds the adapter ``name`` or replaces its weights, as :meth:`PolicyBackend.load_weights` does; others stay.

        Raises:
            ConfigError: the adapter belongs to another model, or the server does not serve adapters.
            LightningError: the server does not answer.
        """
        ...


async def publish_weights(
    backend: PolicyBackend,
    gateway: Gateway,
    weights: Path | Mapping[str, Path],
    version: int,
    *,
    drain_timeout_s: float = 600.0,
) -> None:
    """Replaces a policy's weights; answers are recorded with their version, and mix two only with ``swap_in_flight``.

    ``weights`` is the directory of the weights or, for several policies, the directory of each adapter by its name.

    Raises:
        ConfigError: the weights belong to another model.
        LightningError: the server does not answer, or running calls that must end first did not end within
            ``drain_timeout_s``.
    """
    if backend.tells_versions:
        await _load(backend, weights, version)
        return
    await gateway.pause()
    loaded: int | None = None
    try:
        if not await gateway.drain(drain_timeout_s):
            raise LightningError(
                f"calls to the model were still running after {drain_timeout_s:g} s, so its weights could not be "
                "replaced; limit max_tokens in sampling, or rollout_timeout_s."
            )
        await _load(backend, weights, version)
        loaded = version
    finally:
        await gateway.resume(loaded)


def serve_models(gateway: Gateway, entries: Sequence[Mapping[str, Any]]) -> None:
    """Replaces the backends of the models in ``entries``; other models stay."""

    def name(entry: Mapping[str, Any]) -> Any:
        return entry.get("model_name", entry.get("model"))

    own = {name(entry) for entry in entries}
    others = [entry for entry in gateway.model_list if name(entry) not in own]
    gateway.update_model_list([dict(entry) for entry in (*entries, *others)])


async def load_adapter(backend: PolicyBackend, name: str, path: Path, version: int) -> None:
    """Makes a backend serve an adapter; raises ConfigError if the backend cannot serve adapters."""
    if not isinstance(backend, AdapterBackend):
        raise ConfigError(
            f"the policy backend {type(backend).__name__} serves no LoRA adapters, so it cannot sample several "
            "policies; use the backend transformers or vllm, or train one policy."
        )
    await backend.load_adapter(name, path, version)


async def _load(backend: PolicyBackend, weights: Path | Mapping[str, Path], version: int) -> None:
    if isinstance(weights, Path):
        await backend.load_weights(weights, version)
        return
    adapters = dict(weights)
    for name, path in adapters.items():
        await load_adapter(backend, name, path, version)


def digest_weights(directory: Path) -> str:
    """Returns the digest of all ``*.safetensors`` in a directory: their names and contents.

    By it, trainer and policy server check that they use the same weights.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode())
    return digest.hexdigest()
