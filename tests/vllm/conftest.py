"""A real vLLM server on the CPU, which serves a tiny model with random weights."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import agentlightning as agl
from agentlightning_algorithms.grpo.vllm_backend import VLLMBackend
from agentlightning_algorithms.shared.policy.model import Policy, load_policy
from agentlightning_algorithms.shared.policy_backend import PolicySetup
from tests.algorithms.tiny_model import save_tiny_model
from tests.port import reserve_port
from tests.vllm.vllm_process import OPTIONS, SERVER, wait_until_ready


@dataclass(frozen=True)
class Server:
    """A running server."""

    endpoint: str
    model: Path
    """Directory of the first weights."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves one model to all tests; each test first publishes its weights."""
    folder = tmp_path_factory.mktemp("vllm")
    model, log, port = folder / "model", folder / "server.log", reserve_port()
    # vLLM's attention on the CPU needs heads of 32 dimensions or more.
    save_tiny_model(model, hidden_size=128, tie_word_embeddings=False, initializer_range=0.1)
    command = [
        *(*SERVER, "--model", str(model), "--served-model-name", "policy", "--port", str(port)),
        *("--logprobs-mode", "processed_logprobs", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "16"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **OPTIONS}, stdout=output, stderr=output, start_new_session=True
        )
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/health", process, log)
            yield Server(f"http://127.0.0.1:{port}/v1", model)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
async def backend(server: Server, tmp_path: Path) -> AsyncIterator[VLLMBackend]:
    """The backend, connected to the server, with the first weights loaded."""
    backend = VLLMBackend(endpoint=server.endpoint)
    await backend.start(PolicySetup(model=str(server.model), model_name="policy", directory=tmp_path))
    await backend.load_weights(server.model, 0)
    yield backend
    await backend.stop()


@pytest.fixture
def policy(server: Server) -> Policy:
    """The trainer's model, with the first weights of the server."""
    torch.set_num_threads(1)
    return load_policy(server.model)


@pytest.fixture
async def gateway(backend: VLLMBackend) -> AsyncIterator[agl.LLMProxy]:
    """A gateway in front of the server, with a new store."""
    gateway = agl.LLMProxy(model_list=[dict(backend.model_entry)], store=agl.InMemoryLightningStore())
    await gateway.start()
    yield gateway
    await gateway.stop()
