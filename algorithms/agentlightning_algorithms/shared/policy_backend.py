"""Policy backends: the model servers that sample a policy while it is trained.

A component of the kind ``policy_backend`` implements :class:`PolicyBackend`; its constructor takes the user's settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from agentlightning.algorithm.algorithm import Gateway
from agentlightning.errors import LightningError

API_KEY_VARIABLE: Final = "AGL_POLICY_API_KEY"
"""The environment variable with the key that the policy server requires for completions."""
_CHUNK_BYTES: Final = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySetup:
    """The policy to sample."""

    model: str
    """Directory or hub name of the initial weights."""
    model_name: str
    """The name that agents use."""
    directory: Path
    """The directory for logs."""
    dtype: str = "float32"
    """The type of the weights during sampling."""
    device: str = "cpu"
    """The device of the model, such as ``cpu`` or ``cuda:0``."""
    threads: int | None = None
    """Number of torch threads; None: torch's default."""
    max_batch_size: int = 64
    """Maximum number of calls sampled at the same time."""
    seed: int | None = None
    """The seed for calls that have none."""
    swap_in_flight: bool = False
    """Whether new weights are loaded without waiting for running calls. Such calls mix versions; each choice of their
    answers has the version of each token (``weight_versions``). A backend may ignore this."""


class PolicyBackend(Protocol):
    """A model server behind an OpenAI-compatible endpoint whose weights can be replaced.

    It supports ``return_token_ids`` and ``logprobs`` as vLLM does; the log-probabilities are under the
    distribution that was sampled from, temperature and filters included.
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

    async def load_adapter(self, name: str, path: Path, version: int) -> None:
        """Adds the LoRA adapter ``name`` or replaces its weights, as :meth:`load_weights` does; others stay.

        The ``model`` of a request names an adapter.

        Raises:
            ConfigError: the adapter belongs to another model, or the server does not serve adapters.
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
        LightningError: the server does not answer, or running calls did not end within ``drain_timeout_s``.
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
    own = {entry.get("model_name", entry.get("model")) for entry in entries}
    others = [entry for entry in gateway.model_list if entry.get("model_name", entry.get("model")) not in own]
    gateway.update_model_list([dict(entry) for entry in (*entries, *others)])


async def _load(backend: PolicyBackend, weights: Path | Mapping[str, Path], version: int) -> None:
    if isinstance(weights, Path):
        await backend.load_weights(weights, version)
    else:
        for name, path in dict(weights).items():
            await backend.load_adapter(name, path, version)


def digest_weights(directory: Path) -> str:
    """Returns the digest of all ``*.safetensors`` in a directory: their names and contents.

    By it, trainer and policy server check that they use the same weights.
    """
    paths = sorted(directory.glob("*.safetensors"))
    chunks = [(path, start) for path in paths for start in range(0, path.stat().st_size, _CHUNK_BYTES)]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(8, "agl-digest") as pool:  # sha256 releases the GIL
        for (path, start), part in zip(chunks, pool.map(_digest_chunk, chunks), strict=True):
            digest.update(f"{path.name}\0{start}\0{part}\0".encode())
    return digest.hexdigest()


def _digest_chunk(chunk: tuple[Path, int]) -> str:
    path, start = chunk
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(_CHUNK_BYTES)).hexdigest()
