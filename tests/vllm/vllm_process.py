"""Command, environment variables and start of a vLLM process."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

START_S = 600.0
"""Time for vLLM to start on a busy machine; it takes 45 s on an idle one."""
OPTIONS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_NO_USAGE_STATS": "1",
}
SERVER = [
    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--dtype", "float32"),
    *("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"),
]


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(log.read_text(errors="replace")[-5000:])
