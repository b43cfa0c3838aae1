"""`agl top`."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import agentlightning as agl
from agentlightning.types import AttemptFailure, AttemptStatus, Metrics, Run, Span, TraceStatus
from agentlightning_plugins.commands.top import command
from agentlightning_plugins.commands.top.screen import read_snapshot
from agentlightning_plugins.shared.monitoring.fleet import read_activity, read_backends, read_workers
from agentlightning_plugins.shared.monitoring.metrics import estimate_left
from tests.waiting import LIMIT_S, blocking_until

HOSTILE = "\x1b[31mred\u202e [bold]not bold[/bold]"


async def run_rollout(store: agl.LightningStore, *, error: AttemptFailure | None = None, calls: str = "") -> None:
    """Runs a rollout whose model calls succeed (``+``) or fail (``-``)."""
    await store.enqueue_rollout({"n": 1}, mode="train")
    claimed = await store.dequeue_rollout("w-1")
    assert claimed is not None
    for number, call in enumerate(calls):
        attributes = {
            "gen_ai.request.model": "m", "agentlightning.gateway.complete": call == "+", "gen_ai.usage.input_tokens": 7,
            "gen_ai.usage.output_tokens": 3, "agentlightning.gateway.backend": "http://gpu/v1",
            "agentlightning.gateway.cost": 0.5,
        }  # fmt: skip
        outcome = TraceStatus(status_code="OK") if call == "+" else TraceStatus(status_code="ERROR", description="gone")
        await store.add_span(
            Span.from_attributes(
                rollout_id=claimed.rollout_id, attempt_id=claimed.attempt.attempt_id, name="chat",
                attributes=attributes, status=outcome, start_time=10.0, end_time=11.0 + number,
            )
        )  # fmt: skip
    ended: AttemptStatus = "failed" if error else "succeeded"
    await store.update_attempt(claimed.rollout_id, "latest", status=ended, error=error)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    async def fill() -> None:
        store = agl.create_store(f"sqlite:///{tmp_path / 'store.db'}")
        await store.create_run("finished", run_id="old")
        await store.update_run("old", "succeeded")
        await store.create_run(f"live {HOSTILE}", run_id="live", config={"algorithm": {"name": "grpo", "steps": 4}})
        live = store.with_run("live")
        for step in (1, 2):
            await live.add_metrics(step, {"reward": 0.25 * step, "val_reward": 0.4, "tokens_per_s": 120, "seconds": 3})
        await run_rollout(live, calls="++-")
        for _ in range(2):
            await run_rollout(live, error=AttemptFailure(type="KeyError", message=HOSTILE, traceback=""))
        await live.enqueue_rollout({"n": 2}, mode="train", priority=7)
        await live.update_worker("w-1", {"running": 1})
        await store.close()

    asyncio.run(fill())
    return tmp_path


def test_a_pipe_gets_the_state_once_with_queue_workers_reward_throughput_and_errors(place: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "agentlightning", "top", str(place)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    ).stdout
    for shown in (
        "grpo",
        "1 waiting",
        "the highest priority 7",
        "1 succeeded, 2 failed",
        "3 rollouts/min (2 failed), 120 tokens/s, 3.0 s per step",
    ):
        assert shown in said
    assert "2 of 4, 50%" in said
    assert "0.500  ▁█   validation 0.400" in said
    assert "m              failing  3         2.0 s, 3.0 s   21/9" in said
    assert "http://gpu/v1           1 failed" in said
    assert "21/9" in said
    assert "w-1" in said
    assert "2      KeyError" in said
    assert not set(said) & {"\x1b", "\u202e"}
    assert "[bold]not bold[/bold]" in said


def test_a_run_can_be_chosen_and_an_unknown_one_is_named(place: Path) -> None:
    told = CliRunner().invoke(command, [str(place), "--run", "old", "--json"])
    assert json.loads(told.stdout)["run"]["name"] == "finished"
    refused = CliRunner().invoke(command, [str(place), "--run", "none"])
    assert "no run 'none' in this store" in str(refused.exception)


def test_a_store_without_runs_is_shown_as_such(tmp_path: Path) -> None:
    asyncio.run(agl.create_store(f"sqlite:///{tmp_path / 'store.db'}").close())
    assert "no runs yet" in CliRunner().invoke(command, [str(tmp_path), "--once"]).stdout


@pytest.mark.parametrize(("calls", "state"), [("+" * 20, "ok"), ("+-" * 5 + "+", "failing"), ("+++---", "down")])
async def test_the_state_of_a_backend_follows_its_calls(calls: str, state: str) -> None:
    store = agl.InMemoryLightningStore()
    await run_rollout(store, calls=calls)
    (backend,) = await read_backends(store)
    assert (backend["state"], backend["calls"], backend["failed"]) == (state, len(calls), calls.count("-"))
    assert (backend["cost"], backend["error"]) == (0.5 * len(calls), "gone" if "-" in calls else None)
    await store.close()


async def test_ages_are_measured_by_the_clock_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = agl.InMemoryLightningStore()
    monkeypatch.setattr(store._database.backend, "now", lambda: time.time() - 90)  # its machine's clock is behind
    started = await store.start_rollout(1, worker_id="w-1")
    await store.update_worker("w-1")
    failed = await store.start_rollout(2)
    await store.update_attempt(failed.rollout_id, "latest", status="failed")
    (worker,), _ = await read_workers(store)
    assert (worker["state"], worker["current_rollout_id"]) == ("busy", started.rollout_id)
    activity = await read_activity(store)
    assert (activity["ended"], activity["failed"]) == (1, 1)
    run = Run(run_id="r", name="r", status="running", created_at=store.now() - 10)
    step = Metrics(run_id="r", step=1, time=store.now(), values={"progress": 0.5})
    left = estimate_left(run, [step], store.now())
    assert left is not None
    assert left["seconds_left"] == pytest.approx(10, abs=1)
    assert abs((await read_snapshot(store, None))["time"] - store.now()) < 10
    await store.close()


def test_the_time_in_which_a_run_was_stopped_does_not_count_as_work() -> None:
    """Steps take 60 s, every fifth one 240 s because of its validation; the run was stopped for a day after step 10."""
    clock, steps = 0.0, []
    for step in range(1, 21):
        clock += 86400 * (step == 11) + (240 if step % 5 == 0 else 60)
        steps.append(Metrics(run_id="r", step=step, time=clock, values={"progress": step / 100}))
    config = {"algorithm": {"name": "grpo", "steps": 100}}
    run = Run(run_id="r", name="r", status="running", created_at=-900.0, config=config)
    left = estimate_left(run, steps, clock + 6)
    assert left is not None
    assert left["seconds_left"] == pytest.approx(80 * 96 - 6, rel=0.05)
    for kept in (steps[:10], steps[::2]):
        found = estimate_left(run, kept, kept[-1].time)
        assert found is not None
        assert found["seconds_left"] == pytest.approx((100 - kept[-1].step) * 96, rel=0.2)


def test_a_long_validation_counts_as_work() -> None:
    """Steps take 2 s, every tenth one 62 s because of its validation; the run was stopped for a day after step 25."""
    clock, steps = 0.0, []
    for step in range(1, 51):
        val_s = 60.0 * (step % 10 == 0)
        clock += 86400 * (step == 26) + 2 + val_s
        steps.append(Metrics(run_id="r", step=step, time=clock, values={"progress": step / 100, "val_s": val_s}))
    run = Run(run_id="r", name="r", status="running", created_at=-900.0, config={"algorithm": {"name": "grpo"}})
    left = estimate_left(run, steps, clock)
    assert left is not None
    assert left["seconds_left"] == pytest.approx(50 * 8, rel=0.05)


@pytest.fixture
def terminal(place: Path) -> Iterator[tuple[subprocess.Popen[bytes], bytearray]]:
    """`agl top` in a terminal, and what it has written."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "agentlightning", "top", str(place), "--interval", "0.1"],
        stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )  # fmt: skip
    os.close(theirs)
    written = bytearray()

    def read() -> None:
        try:
            while data := os.read(ours, 65536):
                written.extend(data)
        except OSError:  # the process ended
            return

    reader = threading.Thread(target=read)
    reader.start()
    yield process, written
    process.kill()
    process.wait()
    reader.join(LIMIT_S)
    os.close(ours)


def test_a_terminal_follows_the_run_until_ctrl_c(
    place: Path, terminal: tuple[subprocess.Popen[bytes], bytearray]
) -> None:
    process, written = terminal
    blocking_until(lambda: b"1 waiting" in written)

    async def enqueue() -> None:
        store = agl.create_store(f"sqlite:///{place / 'store.db'}", run="live")
        await store.enqueue_rollout({"n": 3}, mode="train")
        await store.close()

    asyncio.run(enqueue())
    blocking_until(lambda: b"2 waiting" in written)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130
