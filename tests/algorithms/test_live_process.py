"""Live learning over processes: the service continues while the learner is killed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning_algorithms.shared.live_resources import read_live_history
from tests.algorithms.live_service import BEGIN, GOOD, running, serving
from tests.benchmarks.bench_live import measure
from tests.source import REPO
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def learner(url: str, prompt: str, *settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a learner, with a runner for its checks, in another process."""
    program = ["-m", "tests.algorithms.live_learner", url, prompt, *settings]
    process = await asyncio.create_subprocess_exec(sys.executable, *program, cwd=REPO)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize("served", [pytest.param(False, marks=pytest.mark.soak), True], ids=["one file", "agl store"])
async def test_a_killed_learner_continues_after_a_restart_and_the_service_never_stops(
    tmp_path: Path, served: bool
) -> None:
    owner = agl.create_store(f"sqlite:///{tmp_path / 'store.db'}")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(owner.close)
        store, url = owner, f"sqlite:///{tmp_path / 'store.db'}"
        if served:
            server = await stack.enter_async_context(agl.LightningStoreServer(owner, port=0))
            store, url = agl.LightningStoreClient(server.endpoint), server.endpoint
            stack.push_async_callback(store.close)
        await store.update_resources("tuned", {"prompt": BEGIN})
        service = await stack.enter_async_context(serving(store, 0.02, refresh_s=0.3, learner_timeout_s=1.5))
        (work,) = await stack.enter_async_context(running(service.serve()))
        patient = {"margin": "0.0", "risk": "0.000000001"}
        async with learner(url, GOOD, *(f"{key}={value}" for key, value in patient.items())) as first:
            await until(lambda: service.served["default.candidate@1"] >= 5)
            first.send_signal(signal.SIGKILL)
            await first.wait()
        await until(lambda: service.live.trial is None)
        before = service.served.copy()
        await until(lambda: service.served["tuned@1"] >= before["tuned@1"] + 10)
        assert service.served["default.candidate@1"] == before["default.candidate@1"]
        assert not work.done()
        in_trial = await read_live_history(store)
        assert in_trial[-1].phase == "trial"
        async with learner(url, "quality 0.1 never asked for", "margin=0.9") as second:
            assert await asyncio.wait_for(second.wait(), LIMIT_S) == 0
        after = await read_live_history(store)
        assert after[: len(in_trial)] == in_trial
        assert [state.phase for state in after[len(in_trial) :]] == ["closing", "watching"]
        await until(lambda: service.served["tuned@2"] >= 5)
        assert not work.done()
        latest = await store.get_latest_resources()
        assert latest is not None
        assert (latest.version_id, latest.resources["prompt"]) == ("tuned@2", agl.PromptTemplate(GOOD))
        failed = await store.query_rollouts(status_in=["failed", "requeuing"])
        assert len(failed) == 0


async def test_while_the_store_is_down_the_last_known_version_is_served(tmp_path: Path) -> None:
    owner = agl.create_store(f"sqlite:///{tmp_path / 'store.db'}")
    server = agl.LightningStoreServer(owner, port=0)
    await server.start()
    client = agl.LightningStoreClient(server.endpoint, retry_s=0.2)
    await client.update_resources("tuned", {"prompt": BEGIN})
    async with agl.LiveResources(client, refresh_s=0.05) as live:
        await server.stop()
        for _ in range(10):
            assert live.pick().resources_id == "tuned@1"
            await asyncio.sleep(0.05)
        await owner.update_resources("tuned", {"prompt": GOOD})
        server = agl.LightningStoreServer(owner, port=server.port)
        await server.start()
        await until(lambda: live.pick().resources_id == "tuned@2")
    await client.close()
    await server.stop()
    await owner.close()


@pytest.mark.serial
async def test_learning_slows_answers_by_at_most_a_tenth() -> None:
    """Blocks with and without learning alternate in one process; the quietest block of each counts."""
    found = await measure(40, 1, rounds=8, limit=0.10)
    assert found.is_close(0.10), found
