"""Where the trained policy is sampled: what the trainer asks of a model server.

A component of the kind ``policy_backend`` is a class that has this form; its constructor takes the settings that users
write after its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agentlightning.algorithm.context import Gateway
from agentlightning.errors import LightningError


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySetup:
    """What a training says about its policy.

    Attributes:
        model: directory or hub name of the weights to begin with.
        model_name: what agents call the model.
        directory: of the run, for logs.
        dtype: of the weights when sampling.
        device: such as ``cpu`` or ``cuda:0``.
        threads: of torch when sampling; None: torch's own choice.
        max_batch_size: calls to sample at once.
        seed: of calls that bring none.
    """

    model: str
    model_name: str
    directory: Path
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    max_batch_size: int = 64
    seed: int | None = None


class PolicyBackend(Protocol):
    """A model server behind an OpenAI-compatible endpoint whose weights can be replaced.

    It answers ``return_token_ids`` and ``logprobs`` as vLLM does; the log-probabilities are those of the distribution
    that was sampled from, temperature and filters included.
    """

    tells_versions: bool
    """Whether each answer carries the version of the weights that sampled all of it (``weight_version``). If not, calls
    are held back while the weights change, and the gateway keeps the version."""

    @property
    def model_entry(self) -> Mapping[str, Any]:
        """The entry in the gateway's model list; only after :meth:`start`."""
        ...

    async def start(self, setup: PolicySetup) -> None:
        """Returns when the model answers.

        Raises:
            ConfigError: the server is not set up as it must be.
            LightningError: it cannot be reached or did not start.
        """
        ...

    async def load_weights(self, path: Path, version: int) -> None:
        """Replaces the weights, and returns when every call that begins from now on is sampled with them.

        Args:
            path: written by ``save_pretrained``; the server must see the same file system.
            version: what they are called.

        Raises:
            ConfigError: weights of another model.
            LightningError: the server does not answer.
        """
        ...

    def check(self) -> None:
        """Raises a LightningError once the server is known to have ended."""
        ...

    async def statistics(self) -> Mapping[str, float]:
        """Totals since the start, by name; what a backend does not count is left out."""
        ...

    async def stop(self) -> None:
        """Ends what :meth:`start` started; harmless at any time."""
        ...


async def publish_weights(
    backend: PolicyBackend, gateway: Gateway, path: Path, version: int, *, drain_timeout_s: float = 600.0
) -> None:
    """Replaces a policy's weights so that no answer mixes two versions and each is recorded with its own.

    Args:
        backend: where the policy is sampled.
        gateway: through which agents reach it.
        path: the new weights.
        version: what they are called.
        drain_timeout_s: how long calls under way may take, where they must end first.

    Raises:
        ConfigError: weights of another model.
        LightningError: the server does not answer, or calls did not end in time.
    """
    if backend.tells_versions:
        await backend.load_weights(path, version)
        return
    await gateway.pause()
    loaded = False
    try:
        if not await gateway.drain(drain_timeout_s):
            raise LightningError(
                f"calls to the model were still under way after {drain_timeout_s:g} s, so its weights could not be "
                "replaced; limit max_tokens in sampling, or rollout_timeout_s."
            )
        await backend.load_weights(path, version)
        loaded = True
    finally:
        await gateway.resume(version if loaded else None)
