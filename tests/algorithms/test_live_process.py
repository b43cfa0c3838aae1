"""Live learning over processes: a learner that is killed, and a service that does not notice."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.live import LivePlace, LiveState
from tests.algorithms.live_service import BEGIN, GOOD, running, serving, until
from tests.benchmarks.bench_live import measure
from tests.source import REPO

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def learner(url: str, prompt: str, *settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A learner with a runner for its checks, in a process of its own."""
    program = ["-m", "tests.algorithms.live_learner", url, prompt, *settings]
    process = await asyncio.create_subprocess_exec(sys.executable, *program, cwd=REPO)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def states(store: agl.LightningStore) -> list[LiveState]:
    place = LivePlace(store.run_id)
    updates = await store.with_run(place.desk_run_id).query_resources(resources_id=place.state_id)
    return [state for update in updates if isinstance(state := update.resources["live"], LiveState)]


@pytest.mark.parametrize("served", [False, True], ids=["one file", "agl store"])
async def test_a_killed_learner_goes_on_when_it_is_started_again_and_the_service_never_stops(
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
        await until(lambda: service.live.trial is None, 20)
        before = service.served.copy()
        await until(lambda: service.served["tuned@1"] >= before["tuned@1"] + 10)
        assert service.served["default.candidate@1"] == before["default.candidate@1"]
        assert not work.done()
        in_trial = await states(store)
        assert in_trial[-1].phase == "trial"
        async with learner(url, "quality 0.1 never asked for") as second:
            assert await asyncio.wait_for(second.wait(), 90) == 0
        after = await states(store)
        assert after[: len(in_trial)] == in_trial
        assert [state.phase for state in after[len(in_trial) :]] == ["watching"]
        await until(lambda: service.served["tuned@2"] >= 5)
        assert not work.done()
        latest = await store.get_latest_resources()
        assert latest is not None
        assert (latest.version_id, latest.resources["prompt"]) == ("tuned@2", agl.PromptTemplate(GOOD))
        failed = await store.query_rollouts(status_in=["failed", "requeuing"])
        assert len(failed) == 0


@contextlib.asynccontextmanager
async def agl_store(folder: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """``agl store`` over a file, killed in the end."""
    program = ["-m", "agentlightning", "store", "--port", str(port), "--backend", f"sqlite:///{folder / 'store.db'}"]
    process = await asyncio.create_subprocess_exec(sys.executable, *program, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_while_the_store_is_dead_the_last_known_version_is_served(tmp_path: Path) -> None:
    port = free_port()
    client = agl.LightningStoreClient(f"http://127.0.0.1:{port}", retry_s=30.0)
    impatient = agl.LightningStoreClient(client.url, retry_s=0.2)
    async with contextlib.AsyncExitStack() as stack:
        async with agl_store(tmp_path, port):
            await client.update_resources("tuned", {"prompt": BEGIN})
            live = await stack.enter_async_context(agl.LiveResources(impatient, refresh_s=0.2))
        for _ in range(20):
            assert live.pick().resources_id == "tuned@1"
            await asyncio.sleep(0.05)
        async with agl_store(tmp_path, port):
            await client.update_resources("tuned", {"prompt": GOOD})
            await until(lambda: live.pick().resources_id == "tuned@2", 30)
            await stack.aclose()
            await impatient.close()
            await client.close()


@pytest.mark.parametrize("at_once", [1, 4])
async def test_learning_makes_answers_at_most_a_tenth_slower(at_once: int) -> None:
    """Rounds with and without it alternate in one process; one that others disturb may be evened out by a later one."""
    found = await measure(30 * at_once, at_once, rounds=6, enough=1.10)
    assert found.ratio(0.5) <= 1.10
    assert found.ratio(0.95) <= 1.15
