"""``agl serve`` with a vLLM command."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.algorithms.tiny_model import save_tiny_model
from tests.port import reserve_port
from tests.vllm.vllm_process import OPTIONS, SERVER, wait_until_ready


@pytest.mark.soak
def test_agl_serve_can_serve_a_model_with_a_vllm_command(tmp_path: Path) -> None:
    model, log, port = tmp_path / "model", tmp_path / "serve.log", reserve_port()
    save_tiny_model(model, hidden_size=128)
    own = shlex.join([*SERVER, "--model", "{model}", "--served-model-name", "{name}", "--port", "{port}"])
    agl = str(Path(sys.executable).with_name("agl"))
    command = [agl, "serve", str(model), "--name", "mine", "--port", str(port), "--command", own]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, env={**os.environ, **OPTIONS}, stdout=output, stderr=output, start_new_session=True
        )
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/health", process, log)
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
                answer = client.completions.create(model="mine", prompt=[5, 6, 7], max_tokens=4)
            assert answer.usage is not None
            assert answer.usage.completion_tokens >= 1
        finally:
            process.terminate()
            process.wait(60)
