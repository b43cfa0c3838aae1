"""The strategy `cs`: processes that die, cannot load the agent, are stopped by signals, or are debugged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.types import AttemptedRollout, RolloutConfig
from agentlightning_plugins.shared.processes import supervisor
from agentlightning_plugins.shared.processes.stopping import until_second_interrupt, until_sigterm
from agentlightning_plugins.shared.processes.supervisor import Ending, Supervisor
from tests.port import reserve_port
from tests.process import wait_for
from tests.waiting import LIMIT_S

TASKS = [{"number": number} for number in range(4)]


def trainer(**settings: Any) -> agl.Trainer:
    return agl.Trainer(**{"algorithm": "baseline", "tracer": "dummy", "trackers": [], **settings})


def pid_agent(task: Any) -> float:
    return float(os.getpid())


def dying_once_agent(task: dict[str, Any]) -> float:
    marker = Path(task["marker"])
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def test_a_rollout_of_a_dead_runner_is_retried_before_its_lease_ends(tmp_path: Path) -> None:
    @agl.algo
    async def algorithm(store: agl.LightningStore, train_dataset: Any) -> None:
        config = RolloutConfig(max_attempts=2, retry_condition=["unresponsive"])
        rollout = await store.enqueue_rollout(train_dataset[0], config=config)
        (done,) = await store.wait_for_rollouts([rollout.rollout_id])
        assert done.status == "succeeded"
        assert isinstance(done, AttemptedRollout)
        # A waiting claim of the dead runner may get the rollout before the store notices the closed connection.
        assert done.attempt.sequence_id in (2, 3)

    store = agl.InMemoryLightningStore(lease_s=100_000.0)
    trainer(algorithm=algorithm, store=store).fit(dying_once_agent, [{"marker": str(tmp_path / "died")}])


def spying_agent(task: Any) -> float:
    started_with = Path("/proc/self/environ").read_bytes()
    return float(os.environ["PROVIDER_KEY"] == "hunter2" and b"hunter2" not in started_with)


def test_a_runner_gets_its_environment_after_its_start_so_that_proc_does_not_show_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", "hunter2")
    store = agl.create_store("memory://")
    assert trainer(store=store).fit(spying_agent, TASKS[:1]).status == "succeeded"
    (rollout,) = asyncio.run(store.query_rollouts()).items
    assert isinstance(rollout, AttemptedRollout)
    assert rollout.attempt.reward == 1.0


def test_an_agent_that_no_runner_can_load_fails_the_run_immediately_with_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "vanishing_agent.py"
    module.write_text("def agent(task):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import vanishing_agent  # written above

    module.unlink()
    store = agl.create_store("memory://")
    with pytest.raises(agl.ConfigError, match="cannot be loaded in a runner process: ModuleNotFoundError.*vanishing"):
        trainer(store=store).fit(vanishing_agent.agent, TASKS)
    (run,) = asyncio.run(store.query_runs()).items
    assert run.status == "failed"


def test_main_process_runner_runs_the_agent_in_this_process_and_the_algorithm_in_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("agentlightning")
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(logger, "level", logging.INFO)

    class Elsewhere(agl.Baseline):
        async def run(self, *args: Any, **kwargs: Any) -> None:
            await super().run(*args, **kwargs)
            await self.get_store().add_metrics(100, {"pid": float(os.getpid())})

    store = agl.create_store("memory://")
    strategy = {"name": "cs", "main_process": "runner"}
    run = trainer(store=store, algorithm=Elsewhere(), strategy=strategy).fit(pid_agent, TASKS)
    assert run.status == "succeeded"

    async def read() -> tuple[set[float | None], float]:
        ids = [rollout.rollout_id for rollout in (await store.query_rollouts()).items]
        found = {agl.find_final_reward((await store.query_spans(id_, "latest")).items) for id_ in ids}
        return found, (await store.query_metrics()).items[-1].values["pid"]

    rewards, algorithm_pid = asyncio.run(read())
    assert rewards == {float(os.getpid())}
    assert algorithm_pid != float(os.getpid())
    assert "INFO epoch 1 of 1: " in capsys.readouterr().err, "the other process logs as this one does"


def test_an_algorithm_that_fails_in_its_own_process_fails_the_run() -> None:
    @agl.algo
    async def algorithm(train_dataset: Any) -> None:
        raise ZeroDivisionError("in the algorithm")

    store = agl.create_store("memory://")
    with pytest.raises(RuntimeError, match="exit code 1: ZeroDivisionError: in the algorithm"):
        trainer(store=store, algorithm=algorithm, strategy={"name": "cs", "main_process": "runner"}).fit(
            pid_agent, TASKS
        )
    (run,) = asyncio.run(store.query_runs()).items
    assert run.status == "failed"


_STOPPED_AGENT = """
import asyncio, pathlib, signal, time, agentlightning as agl
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for background processes
def agent(task):
    print("the agent prints", flush=True)
    pathlib.Path("begun").touch()
    while not pathlib.Path("told").exists():
        time.sleep(0.01)
    return 1.0
"""
_STOPPED_PROGRAM = f"""{_STOPPED_AGENT}
store = agl.create_store("memory://")
try:
    agl.Trainer(algorithm="baseline", store=store, trackers=[], tracer="dummy", strategy="STRATEGY").fit(agent, [1])
finally:
    rollout = asyncio.run(store.query_rollouts()).items[0]
    pathlib.Path("ended").write_text(f"{{asyncio.run(store.query_runs()).items[0].status}} {{rollout.status}}")
"""


def run_and_stop(folder: Path, program: str, signals: list[signal.Signals]) -> int:
    """Runs a program, sends the first signal while its agent runs, and the others once it reports that it stops.

    The agent may finish only if there are no other signals. Returns the exit code; the file ``ended`` has the statuses.
    """
    (folder / "program.py").write_text(program)
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "program.py"], cwd=folder, stdout=output, stderr=output)
    first, *others = signals
    wait_for((folder / "begun").exists, process, log)
    process.send_signal(first)
    wait_for(lambda: "stopping after" in log.read_text(), process, log)
    for number in others:
        time.sleep(0.5)  # as a person would; without a pause, Python may raise it in a finalizer, where it is lost
        process.send_signal(number)
    if not others:
        (folder / "told").touch()
    process.wait(LIMIT_S)
    assert "the agent prints" in log.read_text()
    return process.returncode


@pytest.mark.parametrize("strategy", ["shm", "cs"])
def test_sigterm_stops_a_run_after_its_running_rollouts_have_finished(tmp_path: Path, strategy: str) -> None:
    code = run_and_stop(tmp_path, _STOPPED_PROGRAM.replace("STRATEGY", strategy), [signal.SIGTERM])
    assert code == 128 + signal.SIGTERM
    assert (tmp_path / "ended").read_text() == "interrupted succeeded"


def test_a_second_ctrl_c_stops_a_run_without_waiting_for_running_rollouts(tmp_path: Path) -> None:
    assert run_and_stop(tmp_path, _STOPPED_PROGRAM.replace("STRATEGY", "cs"), [signal.SIGINT, signal.SIGINT]) != 0
    assert (tmp_path / "ended").read_text().startswith("interrupted ")
    assert "did not drain" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("strategy", ["shm", "cs"])
async def test_fit_works_while_an_event_loop_is_running_as_in_a_notebook(strategy: str) -> None:
    assert trainer(strategy=strategy).fit(pid_agent, TASKS).status == "succeeded"
    with pytest.raises(ZeroDivisionError):
        trainer(strategy=strategy, algorithm=failing).fit(pid_agent, TASKS)


@agl.algo
async def failing(train_dataset: Any) -> None:
    raise ZeroDivisionError("in the algorithm")


_NOTEBOOK_PROGRAM = f"""{_STOPPED_AGENT}
async def cell():
    store = agl.create_store("memory://")
    try:
        agl.Trainer(algorithm="baseline", store=store, trackers=[], tracer="dummy", strategy="STRATEGY").fit(agent, [1])
    except KeyboardInterrupt:
        rollout = (await store.query_rollouts()).items[0]
        pathlib.Path("ended").write_text(f"{{(await store.query_runs()).items[0].status}} {{rollout.status}}")
asyncio.new_event_loop().run_until_complete(cell())
"""


@pytest.mark.parametrize("strategy", ["shm", "cs"])
def test_interrupting_a_notebook_lets_running_rollouts_finish(tmp_path: Path, strategy: str) -> None:
    assert run_and_stop(tmp_path, _NOTEBOOK_PROGRAM.replace("STRATEGY", strategy), [signal.SIGINT]) == 0
    assert (tmp_path / "ended").read_text() == "interrupted succeeded"


def test_interrupting_a_notebook_twice_does_not_wait_for_running_rollouts(tmp_path: Path) -> None:
    program = _NOTEBOOK_PROGRAM.replace("STRATEGY", "cs")
    assert run_and_stop(tmp_path, program, [signal.SIGINT, signal.SIGINT]) == 0
    assert (tmp_path / "ended").read_text().startswith("interrupted ")
    assert "did not drain" not in (tmp_path / "log").read_text()


async def test_a_second_cancellation_of_a_run_ends_the_wait_for_running_rollouts() -> None:
    waits = asyncio.Event()
    waited: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    async def drain() -> str:
        waits.set()
        await asyncio.Event().wait()
        return "drained"

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            waited.set_result(await until_second_interrupt(drain()))

    run = asyncio.create_task(until_sigterm(work()))
    await asyncio.sleep(0)
    run.cancel()
    await waits.wait()
    assert not run.done()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert await waited is None


class NeverRunners:
    """Runners that wait until they are stopped."""

    def __init__(self) -> None:
        self.worker_ids: list[str] = []
        self.begun = asyncio.Event()

    async def run(self, worker_id: str) -> Ending:
        self.worker_ids.append(worker_id)
        self.begun.set()
        await asyncio.Event().wait()
        return Ending("done")

    def close(self) -> None:
        pass


@contextlib.asynccontextmanager
async def supervised(store: agl.LightningStore) -> AsyncIterator[NeverRunners]:
    runners = NeverRunners()
    work = asyncio.create_task(Supervisor(runners, store, 1).run())
    await runners.begun.wait()
    yield runners
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def test_a_supervisor_releases_the_rollout_of_a_dead_predecessor_with_the_same_process_id() -> None:
    store = agl.InMemoryLightningStore(lease_s=600.0)
    config = RolloutConfig(max_attempts=3, retry_condition=["unresponsive"])
    rollout = await store.enqueue_rollout("task", config=config)
    async with supervised(store) as first:
        await store.dequeue_rollout(first.worker_ids[0])
        async with supervised(store) as second:  # the first is alive, so it keeps its rollout
            assert (await one_rollout(store, rollout.rollout_id)).status == "preparing"
        assert first.worker_ids != second.worker_ids
    async with supervised(store):  # like a restarted container, in which process ids are the same
        assert (await one_rollout(store, rollout.rollout_id)).status == "requeuing"


async def test_a_supervisor_does_not_touch_runners_of_another_container_with_the_same_host_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = agl.InMemoryLightningStore(lease_s=600.0)
    rollout = await store.enqueue_rollout("task", config=RolloutConfig(max_attempts=3))
    with monkeypatch.context() as other:
        other.setattr(supervisor, "_PID_NAMESPACE", tmp_path)
        async with supervised(store) as elsewhere:
            await store.dequeue_rollout(elsewhere.worker_ids[0])
    async with supervised(store):  # process ids of this container mean nothing in the other
        assert (await one_rollout(store, rollout.rollout_id)).status == "preparing"


async def test_a_supervisor_without_proc_starts_and_does_not_touch_runners_of_other_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_PID_NAMESPACE", tmp_path / "hidden")
    store = agl.InMemoryLightningStore(lease_s=600.0)
    rollout = await store.enqueue_rollout("task", config=RolloutConfig(max_attempts=3))
    with monkeypatch.context() as other:  # another container with this host name
        other.setattr(supervisor, "_UNKNOWN_NAMESPACE", "-another")
        async with supervised(store) as elsewhere:
            await store.dequeue_rollout(elsewhere.worker_ids[0])
    async with supervised(store) as runners:
        assert len(runners.worker_ids) == 1
        assert (await one_rollout(store, rollout.rollout_id)).status == "preparing"


async def one_rollout(store: agl.LightningStore, rollout_id: str) -> agl.Rollout:
    found = await store.get_rollout_by_id(rollout_id)
    assert found is not None
    return found


class Unloadable(agl.Baseline):
    def save_state(self, directory: Path) -> None:
        (directory / "state").touch()

    async def run(self, *args: Any, **kwargs: Any) -> None:
        self.checkpoint()

    def load_state(self, directory: Path) -> None:
        raise ZeroDivisionError("the checkpoint is damaged")


def test_a_run_whose_state_cannot_be_loaded_is_recorded_as_failed(tmp_path: Path) -> None:
    store = agl.create_store("memory://")
    settings: dict[str, Any] = {"store": store, "strategy": "shm", "run_dir": tmp_path / "run"}
    trainer(**settings, algorithm=Unloadable()).fit(pid_agent, TASKS)
    with pytest.raises(agl.ConfigError, match=r"state of Unloadable .* \(ZeroDivisionError: the checkpoint"):
        trainer(**settings, algorithm=Unloadable(), resume=True).fit(pid_agent, TASKS)
    (run,) = asyncio.run(store.query_runs()).items
    assert run.status == "failed"


ROLE_PROGRAM = """
import asyncio
import agentlightning as agl

def agent(task):
    return float(task)

strategy = agl.ClientServerExecutionStrategy()
baseline = {"name": "baseline", "train_split": 1.0}
store = agl.create_store("memory://")
trainer = agl.Trainer(algorithm=baseline, tracer="dummy", store=store, strategy=strategy, max_rollouts=3)
trainer.fit(agent, [1, 2, 3])
rollouts = asyncio.run(store.query_rollouts())
print(strategy.role, strategy.server_host, strategy.server_port, rollouts.total, flush=True)
"""


def test_two_processes_read_their_role_and_address_from_the_environment(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ROLE_PROGRAM)
    port = reserve_port()
    address = {"AGL_SERVER_HOST": "localhost", "AGL_SERVER_PORT": str(port)}
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = {
        role: subprocess.Popen(
            [sys.executable, str(program)], env={**os.environ, **address, "AGL_CURRENT_ROLE": role}, **output
        )
        for role in ("algorithm", "runner")
    }
    for role, process in started.items():
        shown, errors = process.communicate(timeout=LIMIT_S)
        assert shown == f"{role} localhost {port} {3 * (role == 'algorithm')}\n", errors


@pytest.mark.parametrize(
    ("variable", "text", "complaint"),
    [
        ("AGL_MANAGED_STORE", "maybe", "AGL_MANAGED_STORE = 'maybe': one of 1, true, yes, on, or 0"),
        ("AGL_CURRENT_ROLE", "boss", "AGL_CURRENT_ROLE = 'boss'; roles: both"),
        ("AGL_SERVER_PORT", "x", "AGL_SERVER_PORT = 'x': a port number"),
    ],
)
def test_an_invalid_environment_variable_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, complaint: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(agl.ConfigError, match=complaint):
        agl.ClientServerExecutionStrategy()


def test_an_environment_variable_sets_whether_the_store_is_managed(monkeypatch: pytest.MonkeyPatch) -> None:
    for texts, expected in ((("off", "0", "False", "no"), False), (("on", "1", "TRUE", "yes", ""), True)):
        for text in texts:
            monkeypatch.setenv("AGL_MANAGED_STORE", text)
            assert agl.ClientServerExecutionStrategy().managed_store is expected
    monkeypatch.setenv("AGL_MANAGED_STORE", "off")
    assert agl.ClientServerExecutionStrategy(managed_store=True).managed_store is True


def test_a_store_that_is_not_managed_is_expected_at_the_default_port_of_agl_store() -> None:
    assert agl.ClientServerExecutionStrategy(managed_store=False).server_port == 4747
    assert agl.ClientServerExecutionStrategy().server_port == 0
