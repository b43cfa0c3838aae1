"""Random requests to every route of a real store process, with and without each kind of token."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.security.store_process import AGL, TOKEN, StoreProcess, running_store

MIB = 2**20
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


SHORT_POLLS = "from agentlightning_plugins.stores.http import message; message.MAX_POLL_S = 0.01"


class Health(threading.Thread):
    """Continuously requests the health of a store and records the times of the answers."""

    def __init__(self, store: StoreProcess) -> None:
        super().__init__()
        self._store = store
        self._ended = threading.Event()
        self.times_s: list[float] = []
        self.failures: list[str] = []

    def run(self) -> None:
        while not self._ended.wait(0.05):
            began = time.monotonic()
            answer = self._store.ask("GET", f"{AGL}/health")
            self.times_s.append(time.monotonic() - began)
            if answer.status != 200:
                self.failures.append(str(answer))

    def end(self) -> None:
        self._ended.set()
        self.join()


def _fuzz(store: StoreProcess, folder: Path, token: str | None, options: list[str]) -> int:
    """Runs schemathesis and returns the number of requests that it sent."""
    shown = [] if token is None else ["-H", f"Authorization: Bearer {token}"]
    document = folder / "openapi.json"
    document.write_bytes(store.ask("GET", "/openapi.json", token=TOKEN).body)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", str(document), "--url", store.url, *shown),
            *("--checks", CHECKS, "--exclude-path", f"{AGL}/events", "--suppress-health-check", "all", "--no-color"),
            *options,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    cases = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert cases is not None, done.stdout
    assert cases[1] == cases[2]
    return int(cases[1])


def _fuzz_store(folder: Path, options: list[str], backend: str, *, is_soak: bool) -> None:
    with running_store(folder, backend=backend, before=SHORT_POLLS) as store:
        rollout_id, attempt_id, token = store.claim()
        span = {"rollout_id": rollout_id, "attempt_id": attempt_id, "trace_id": "1" * 32, "span_id": "2" * 16}
        assert store.post("/spans", {**span, "name": "first"}, token=token).status == 201
        assert store.post("/resources", {"resources": {"prompt": "Say {word}"}}).status == 201
        memory = store.memory_bytes
        health = Health(store)
        health.start()
        try:
            tokens = (TOKEN, token, None, "agl-forged.token") if is_soak else (TOKEN, token)
            sent = [_fuzz(store, folder, shown, options) for shown in tokens]
        finally:
            health.end()
        assert min(sent) > 5, sent
        assert health.failures == []
        times_s = sorted(health.times_s)
        assert not is_soak or times_s[len(times_s) * 99 // 100] < 0.2, times_s[-10:]
        assert store.memory_bytes - memory < 100 * MIB
        assert "Traceback" not in store.log.read_text()


@pytest.mark.slow
def test_random_requests_find_no_fault_in_a_store_and_cost_little_memory(tmp_path: Path) -> None:
    options = ["--phases", "fuzzing", "--max-examples", "2", "--seed", "1"]
    _fuzz_store(tmp_path, options, "memory://", is_soak=False)


@pytest.mark.soak
def test_random_requests_find_no_fault_in_a_store_in_twenty_minutes(tmp_path: Path) -> None:
    options = ["--max-examples", "300", "--max-time", "300"]
    _fuzz_store(tmp_path, options, f"sqlite:///{tmp_path}/store.db", is_soak=True)
