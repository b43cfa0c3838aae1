from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.event import RunFinished, StepFinished
from agentlightning.plugin.hookspecs import Component
from agentlightning.plugin.registry import PluginManager
from agentlightning.types import AttemptedRollout
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.waiting import LIMIT_S, blocking_until

TASKS = [{"number": number} for number in range(6)]


def halving_agent(task: dict[str, int]) -> float:
    """Returns half of the number; runner processes can import this agent."""
    return task["number"] / 2


def meeting_agent(task: dict[str, str]) -> float:
    """Waits until agents of two processes have been here."""
    folder = Path(task["folder"])
    (folder / str(os.getpid())).touch()
    blocking_until(lambda: len(list(folder.iterdir())) == 2)
    return float(os.getpid())


def crashing_agent(task: dict[str, Any]) -> float:
    """Kills its whole runner process on the first try of the first task."""
    marker = Path(task["marker"])
    if task["number"] == 0 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def trainer(**settings: Any) -> agl.Trainer:
    return agl.Trainer(**{"algorithm": {"name": "baseline"}, "tracer": "dummy", "trackers": [], **settings})


def results(store: agl.LightningStore) -> list[AttemptedRollout]:
    items = asyncio.run(store.query_rollouts()).items
    return [rollout for rollout in items if isinstance(rollout, AttemptedRollout)]


def rewards(store: agl.LightningStore) -> list[float | None]:
    async def read() -> list[float | None]:
        ids = [rollout.rollout_id for rollout in (await store.query_rollouts()).items]
        return [agl.find_final_reward((await store.query_spans(id_, "latest")).items) for id_ in ids]

    return asyncio.run(read())


@pytest.mark.parametrize("strategy", ["shm", "cs", {"name": "shm", "main_thread": "runner"}])
def test_a_trainer_runs_an_agent_over_its_data(strategy: Any) -> None:
    store = agl.create_store("memory://")
    run = trainer(store=store, strategy=strategy).fit(halving_agent, TASKS[:4], TASKS[4:])
    assert run.status == "succeeded"
    assert rewards(store) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert [rollout.mode for rollout in results(store)] == ["train"] * 4 + ["val"] * 2


def test_runners_are_separate_processes(tmp_path: Path) -> None:
    store = agl.create_store("memory://")
    trainer(store=store, n_runners=2, max_concurrency=1).fit(meeting_agent, [{"folder": str(tmp_path)}] * 4)
    pids = set(rewards(store))
    assert float(os.getpid()) not in pids
    assert len(pids) == 2


def test_a_local_function_and_a_lambda_reach_runner_processes() -> None:
    store = agl.create_store("memory://")
    scale = 3.0
    trainer(store=store).fit(lambda task: task["number"] * scale, TASKS[:2], [])
    assert rewards(store) == [0.0, 3.0]


def test_a_runner_process_that_dies_is_replaced_and_its_rollout_is_recorded(tmp_path: Path) -> None:
    store = agl.create_store("memory://")
    tasks = [{"number": number, "marker": str(tmp_path / "crashed")} for number in range(3)]
    run = trainer(store=store, max_concurrency=1).fit(crashing_agent, tasks)
    assert run.status == "succeeded"
    assert [rollout.status for rollout in results(store)] == ["succeeded"] * 3
    attempts = [asyncio.run(store.query_attempts(rollout.rollout_id)).items for rollout in results(store)]
    (crashed,) = [each for each in attempts if len(each) > 1]
    assert [attempt.status for attempt in crashed] == ["unresponsive", "succeeded"]
    assert crashed[0].worker_id != crashed[1].worker_id


def test_an_exception_of_the_algorithm_fails_the_run_and_is_raised() -> None:
    @agl.algo
    async def algorithm(store: agl.LightningStore) -> None:
        raise ZeroDivisionError("in the algorithm")

    for strategy in ("shm", "cs"):
        store = agl.create_store("memory://")
        with pytest.raises(ZeroDivisionError, match="in the algorithm"):
            trainer(algorithm=algorithm, store=store, strategy=strategy).fit(halving_agent)
        (run,) = asyncio.run(store.query_runs()).items
        assert run.status == "failed"


@pytest.mark.parametrize("ahead_s", [-100.0, 100.0])
def test_the_scores_of_a_run_do_not_depend_on_the_clock_of_its_store(
    ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    @agl.algo
    async def algorithm(store: agl.LightningStore) -> None:
        await store.add_metrics(1, {"reward": 0.5})

    store = agl.InMemoryLightningStore()
    monkeypatch.setattr(store._database.backend, "now", lambda: time.time() + ahead_s)
    asyncio.run(store.add_metrics(7, {"of_an_earlier_run": 1.0}))
    assert trainer(algorithm=algorithm, store=store, strategy="shm").fit(halving_agent).scores == {"reward": 0.5}


async def test_the_scores_of_a_run_do_not_depend_on_the_clock_of_a_store_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @agl.algo
    async def algorithm(store: agl.LightningStore) -> None:
        await store.add_metrics(1, {"reward": 0.5})

    store = agl.InMemoryLightningStore()
    monkeypatch.setattr(store._database.backend, "now", lambda: time.time() - 3600.0)
    async with agl.LightningStoreServer(store, port=0) as server:
        client = agl.LightningStoreClient(server.endpoint)
        fitted = trainer(algorithm=algorithm, store=client, strategy="shm")
        run = await asyncio.to_thread(fitted.fit, halving_agent)
        await client.close()
    assert run.scores == {"reward": 0.5}


def test_an_algorithm_function_gets_the_parameters_that_it_declares() -> None:
    seen: dict[str, Any] = {}

    @agl.algo
    def algorithm(train_dataset: Any, initial_resources: Any, run: agl.Run) -> None:
        seen.update(train=train_dataset, resources=initial_resources, run=run.run_id, thread=threading.current_thread())

    trainer(algorithm=algorithm, strategy="shm", initial_resources={"prompt": "hi"}).fit(halving_agent, TASKS)
    assert seen["train"] is TASKS
    assert seen["resources"] == {"prompt": agl.PromptTemplate("hi")}
    assert seen["run"] == "default"
    assert seen["thread"] is not threading.main_thread()


def test_an_algorithm_function_with_an_unknown_parameter_is_refused_by_the_decorator() -> None:
    with pytest.raises(agl.ConfigError, match=r"'stroe'.*Did you mean 'store'"):

        @agl.algo
        def algorithm(stroe: Any) -> None: ...


def test_a_dataset_that_an_algorithm_function_does_not_declare_is_refused_before_the_run() -> None:
    ran = []

    @agl.algo
    def narrow(train_dataset: Any) -> None:
        ran.append(train_dataset)

    @agl.algo
    def wide(context: Any) -> None:
        ran.append(context.val_dataset)

    with pytest.raises(agl.ConfigError, match="val_dataset has 2 tasks, but the algorithm .*narrow does not declare"):
        trainer(algorithm=narrow).fit(halving_agent, TASKS, TASKS[:2])
    assert ran == []
    trainer(algorithm=narrow, strategy="shm").fit(halving_agent, TASKS, [])
    trainer(algorithm=wide, strategy="shm").fit(halving_agent, TASKS, TASKS[:2])
    assert ran == [TASKS, TASKS[:2]]


def quoting_agent(task: str, prompt: agl.PromptTemplate) -> float:
    return float(prompt.template == task)


EVALUATION = {"name": "baseline", "train_split": 1.0}


@contextlib.contextmanager
def opened(url: str, **settings: Any) -> Iterator[agl.LightningStore]:
    store = agl.create_store(url, **settings)
    yield store
    asyncio.run(store.close())


def latest_id(store: agl.LightningStore) -> str:
    latest = asyncio.run(store.get_latest_resources())
    assert latest is not None
    return latest.version_id


def test_a_second_run_in_the_same_store_has_its_own_initial_resources(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for text in ("one", "two", "two"):
        with opened(f"sqlite:///{tmp_path}/store.db") as store:
            evaluation = trainer(store=store, strategy="shm", algorithm=EVALUATION, initial_resources={"prompt": text})
            evaluation.fit(quoting_agent, [text])
            assert rewards(store)[-1] == 1.0
    assert caplog.messages == []
    with opened(f"sqlite:///{tmp_path}/store.db") as store:
        trainer(store=store, strategy="shm", algorithm=EVALUATION).fit(quoting_agent, ["two"])
        assert rewards(store) == [1.0] * 4
        start = f"the run starts from the latest resources of its store, {latest_id(store)}"
    assert caplog.messages == [f"{start}: it has no initial_resources"]


def test_runs_with_directories_are_separate_in_a_shared_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    for name in ("first", "second"):
        settings: dict[str, Any] = {"store": url, "run_dir": tmp_path / name, "initial_resources": {"prompt": name}}
        run = trainer(**settings, strategy="shm", algorithm=EVALUATION, trackers=["console"])
        run.fit(quoting_agent, [name])
        assert run.store is not None
        assert rewards(run.store) == [1.0]
        shown = capsys.readouterr().err
        assert f"run {name}, files in" in shown
        assert f"first resources: {latest_id(run.store).partition('@')[0]}, version 1" in shown
        asyncio.run(run.store.close())
    with opened(url) as store:
        assert [run.name for run in asyncio.run(store.query_runs()).items] == ["first", "second"]
    assert caplog.messages == []


def test_a_store_object_that_already_has_another_run_is_scoped_to_the_new_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = agl.create_store("memory://")
    for name in ("first", "second"):
        settings: dict[str, Any] = {"store": store, "run_dir": tmp_path / name, "initial_resources": {"prompt": name}}
        trainer(**settings, strategy="shm", algorithm=EVALUATION).fit(quoting_agent, [name])
    assert (rewards(store), rewards(store.with_run("second"))) == ([1.0], [1.0])
    assert caplog.messages == ["the store already has the run 'first': this run is in store.with_run('second')"]


@pytest.mark.parametrize("strategy", ["shm", "cs"])
def test_a_run_with_a_directory_keeps_its_store_in_it_and_is_resumed_from_it(tmp_path: Path, strategy: str) -> None:
    settings: dict[str, Any] = {"algorithm": EVALUATION, "strategy": strategy, "run_dir": tmp_path / "run"}
    assert trainer(**settings).fit(halving_agent, TASKS).name == "run"
    with opened(f"sqlite:///{tmp_path}/run/store.db") as store:
        assert len(results(store)) == len(TASKS)
        trainer(**settings, resume=True).fit(halving_agent, TASKS)
        assert len(results(store)) == len(TASKS), "finished rollouts are read from the store"


def test_an_algorithm_needs_only_the_store_to_learn() -> None:
    @agl.algo
    async def best_prompt(store: agl.LightningStore, train_dataset: Any) -> None:
        scores = {}
        for prompt in ("{number}0", "{number}", "{number}00"):
            snapshot = await store.add_resources({"prompt": prompt})
            rollout = await store.enqueue_rollout(train_dataset[1], resources_id=snapshot.resources_id)
            await store.wait_for_rollouts([rollout.rollout_id])
            spans = await store.query_spans(rollout.rollout_id, "latest")
            scores[prompt] = agl.find_final_reward(spans.items) or 0.0
        await store.add_resources({"prompt": max(scores, key=lambda prompt: scores[prompt])})

    def agent(task: dict[str, int], prompt: agl.PromptTemplate) -> float:
        return float(prompt.format(**task))

    store = agl.create_store("memory://")
    trainer(algorithm=best_prompt, store=store, strategy="shm").fit(agent, TASKS)
    latest = asyncio.run(store.get_latest_resources())
    assert latest is not None
    assert latest.resources["prompt"] == agl.PromptTemplate("{number}00")


def test_trackers_get_the_events_of_a_run_and_a_failing_tracker_does_not_stop_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Keeps:
        def __init__(self) -> None:
            self.events: list[Any] = []
            self.closed = False

        def start(self, run: agl.Run, directory: Path | None) -> None:
            self.events.append(directory)

        def on_event(self, event: Any) -> None:
            self.events.append(event)

        def close(self) -> None:
            self.closed = True

    class Fails(Keeps):
        def on_event(self, event: Any) -> None:
            raise OSError("disk full")

    keeps = Keeps()
    run = trainer(strategy="shm", run_dir=tmp_path / "run", trackers=[Fails(), keeps, "jsonl"]).fit(
        halving_agent, TASKS
    )
    assert run.status == "succeeded"
    assert keeps.events[0] == tmp_path / "run"
    steps = [event for event in keeps.events if isinstance(event, StepFinished)]
    assert [step.values["reward"] for step in steps] == [1.25]
    assert isinstance(keeps.events[-1], RunFinished)
    assert keeps.closed
    assert "tracker Fails failed" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("reward") for line in lines] == [1.25, None]
    assert lines[-1]["status"] == "succeeded"


def test_plugins_observe_every_event_of_a_run_and_a_failing_plugin_does_not_stop_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    class Observer:
        @staticmethod
        @agl.hookimpl
        def observe(event: Any) -> None:
            seen.append(event)

    class Broken:
        @staticmethod
        @agl.hookimpl
        def observe(event: Any) -> None:
            raise OSError("no disk")

    manager = PluginManager()
    manager.register(Broken(), "broken")
    manager.register(Observer(), "observer")
    monkeypatch.setattr("agentlightning.run.tracker.get_manager", lambda: manager)
    with caplog.at_level(logging.DEBUG, "agentlightning.event"):
        trainer(strategy="shm").fit(halving_agent, TASKS)
    kinds = [event.kind for event in seen]
    assert kinds.count("rollout_finished") == len(TASKS)
    assert kinds[-1] == "run_finished"
    assert caplog.text.count("plugin broken failed") == 1
    logged = [record for record in caplog.records if record.name == "agentlightning.event"]
    assert len(logged) == len(seen) + len(TASKS), "each event, and each rollout with its spans"


def test_a_plugin_sees_each_rollout_that_has_finished_with_its_spans(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []

    class Exporter:
        @agl.hookimpl
        def observe_rollout(self, rollout: Any, spans: Any, run: Any, directory: Any) -> None:
            seen.append(
                (
                    rollout.status,
                    [value for span in spans if (value := agl.get_reward_value(span)) is not None],
                    run.run_id,
                    directory,
                )
            )

    manager = PluginManager()
    manager.register(Exporter(), "exporter")
    monkeypatch.setattr("agentlightning.run.tracker.get_manager", lambda: manager)
    run = trainer(strategy="shm", run_dir=tmp_path / "run").fit(halving_agent, TASKS[:2])
    rewards = sorted(each[1] for each in seen)
    assert rewards == [[0.0], [0.5]]
    assert {(status, run_id, directory) for status, _, run_id, directory in seen} == {
        ("succeeded", run.run_id, tmp_path / "run")
    }


def test_a_slow_observer_delays_the_end_of_a_run_for_a_limited_time_and_its_losses_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()

    class Slow:
        @agl.hookimpl
        def observe(self, event: Any) -> None:
            released.wait(LIMIT_S)

    manager = PluginManager()
    manager.register(Slow(), "slow")
    monkeypatch.setattr("agentlightning.run.tracker.get_manager", lambda: manager)
    monkeypatch.setattr("agentlightning.run.tracker._CLOSE_PLUGIN_S", 0.1)
    monkeypatch.setattr("agentlightning.run.tracker._MAX_BEHIND", 2)
    assert trainer(strategy="shm").fit(halving_agent, TASKS).status == "succeeded"
    released.set()
    assert "plugin slow is 2 events behind and loses the next ones" in caplog.text
    lost = re.search(r"plugin slow lost (\d+) events of the run: it was too slow", caplog.text)
    assert lost is not None
    assert int(lost[1]) > len(TASKS)


class Counting(agl.Algorithm):
    """Counts to three; stops once, after ``stop_after`` steps."""

    def __init__(self, *, stop_after: int | None) -> None:
        self.stop_after = stop_after
        self.step = 0
        self.done: list[int] = []

    def save_state(self, directory: Path) -> None:
        assert not list(directory.iterdir())
        (directory / "step").write_text(str(self.step))

    def load_state(self, directory: Path) -> None:
        self.step = int((directory / "step").read_text())

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        while self.step < 3:
            if self.step == self.stop_after:
                raise ConnectionError("stopped")
            self.step += 1
            self.done.append(self.step)
            self.context.log(self.step, {"reward": 0.5, "progress": self.step / 3})
            self.checkpoint()


@pytest.mark.parametrize(("stop_after", "continued"), [(0, [1, 2, 3]), (2, [3])])
def test_an_algorithm_that_makes_checkpoints_continues_after_the_last_one(
    stop_after: int, continued: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"strategy": "shm", "run_dir": tmp_path / "run", "store": agl.create_store("memory://")}
    with pytest.raises(ConnectionError):
        trainer(**settings, algorithm=Counting(stop_after=stop_after)).fit(halving_agent)
    algorithm = Counting(stop_after=None)
    trainer(**settings, algorithm=algorithm, resume=True).fit(halving_agent)
    assert algorithm.done == continued
    assert ("checkpoint yet; Counting starts from the beginning" in caplog.text) == (stop_after == 0)
    (run,) = asyncio.run(settings["store"].query_runs())
    metrics = asyncio.run(settings["store"].with_run(run.run_id).query_metrics())
    assert [(each.step, each.values["reward"]) for each in metrics] == [(1, 0.5), (2, 0.5), (3, 0.5)]


def fail_to_report(store: agl.LightningStore, directory: Path) -> None:
    raise ZeroDivisionError("in the report")


def test_a_report_that_fails_changes_neither_the_result_of_a_run_nor_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Reporting:
        @staticmethod
        @agl.hookimpl
        def components() -> list[Component]:
            return [Component("report", "broken", f"{__name__}:fail_to_report", summary="raises")]

    @agl.algo
    async def failing(store: agl.LightningStore) -> None:
        raise KeyError("in the algorithm")

    manager = PluginManager()
    manager.register(Reporting(), "reporting")
    monkeypatch.setattr("agentlightning.run.job.get_manager", lambda: manager)
    assert trainer(strategy="shm", run_dir=tmp_path / "good").fit(halving_agent, TASKS).status == "succeeded"
    assert "the report 'broken'" in caplog.text
    assert "ZeroDivisionError: in the report" in caplog.text
    assert (tmp_path / "good" / "report.md").exists()
    with pytest.raises(KeyError, match="in the algorithm"):
        trainer(algorithm=failing, strategy="shm", run_dir=tmp_path / "bad").fit(halving_agent)


def test_dev_defaults_to_baseline_and_refuses_slow_algorithms() -> None:
    store = agl.create_store("memory://")
    agl.Trainer(store=store, strategy="shm", tracer="dummy", trackers=[]).dev(halving_agent, TASKS)
    assert len(results(store)) == len(TASKS)

    @agl.algo
    def slow() -> None: ...

    with pytest.raises(agl.ConfigError, match="needs a FastAlgorithm, but the trainer has FunctionalAlgorithm"):
        trainer(algorithm=slow).dev(halving_agent, TASKS)


def test_the_rows_of_a_dataframe_are_tasks() -> None:
    import pandas

    store = agl.create_store("memory://")
    trainer(store=store, strategy="shm", algorithm=EVALUATION).fit(halving_agent, pandas.DataFrame(TASKS))
    assert [dict(rollout.input) for rollout in results(store)] == TASKS
    assert rewards(store) == [task["number"] / 2 for task in TASKS]


def test_a_reward_function_scores_the_result_of_an_agent() -> None:
    store = agl.create_store("memory://")
    reward = lambda task, output, rollout: float(output == str(task["number"]))  # noqa: E731 # as users write it
    trainer(store=store, strategy="shm").fit(lambda task: str(task["number"] % 2), TASKS[:4], [], reward=reward)
    assert rewards(store) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"algorithm": "baselin"}, r"no algorithm named 'baselin'\. Did you mean 'baseline'"),
        ({"algorithm": {"name": "baseline", "epochs": 2}}, r"no setting 'epochs'\. Did you mean 'n_epochs'"),
        ({"store": "memry://"}, "memry"),
        ({"strategy": "csx"}, "no strategy named 'csx'"),
        ({"strategy": {"name": "cs", "role": "boss"}}, "role = 'boss'"),
        ({"n_runners": 0}, "n_runners = 0"),
        ({"max_concurrency": 0}, "max_concurrency = 0"),
        ({"algorithm": "tests.core.test_trainer.Missing"}, "cannot be imported"),
        ({"adapter": {"agent_matsch": "x"}}, r"no setting 'agent_matsch'\. Did you mean 'agent_match'"),
        ({"resume": True}, "needs run_dir"),
        ({"port": 9100, "strategy": agl.ClientServerExecutionStrategy(server_port=9000)}, "port = 9100 .* = 9000"),
        ({"port": 9100, "strategy": {"name": "cs", "server_port": 9000}}, "port = 9100 .* server_port = 9000"),
        ({"port": 9100, "strategy": agl.SharedMemoryExecutionStrategy()}, "port = 9100 does not apply"),
        (
            {"runner": agl.LitAgentRunner(agl.DummyTracer()), "strategy": "shm", "n_runners": 4},
            "4 runners in one process cannot share one object; give the class, as in runner=LitAgentRunner",
        ),
    ],
)
def test_wrong_settings_of_a_trainer_are_refused_with_their_name(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(agl.LightningError, match=complaint):
        trainer(**settings)


def test_n_runners_that_a_given_strategy_ignores_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    trainer(strategy=agl.SharedMemoryExecutionStrategy(n_runners=2), n_runners=4)
    assert caplog.messages == ["n_runners = 4 has no effect: the given strategy has 2"]


def test_the_default_concurrency_is_the_algorithms_proposal_divided_by_the_runners() -> None:
    class Sampling(agl.Algorithm):
        rollouts_at_once = 64

    def concurrency(**settings: Any) -> int:
        return agl.Trainer(trackers=[], **settings).max_concurrency

    assert concurrency() == concurrency(algorithm=agl.Algorithm()) == 16
    assert concurrency(algorithm=Sampling()) == 64
    assert concurrency(algorithm=Sampling(), n_runners=3) == 22
    assert concurrency(algorithm=Sampling(), strategy=agl.SharedMemoryExecutionStrategy(n_runners=2)) == 32
    assert concurrency(algorithm=Sampling(), n_runners=2, max_concurrency=5) == 5


def test_ctrl_c_cancels_the_algorithm_and_ends_the_run_as_interrupted(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import asyncio, agentlightning as agl\n"
        "@agl.algo\n"
        "async def forever(store, train_dataset):\n"
        "    print('running', flush=True)\n"
        "    try:\n"
        "        await asyncio.sleep(3600)\n"
        "    except asyncio.CancelledError:\n"
        "        print('saved', flush=True)\n"
        "        raise\n"
        "store = agl.create_store('memory://')\n"
        "try:\n"
        "    agl.Trainer(algorithm=forever, store=store, trackers=[], tracer='dummy').fit(lambda task: 1.0, [1])\n"
        "except KeyboardInterrupt:\n"
        "    print(asyncio.run(store.query_runs()).items[0].status, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert output == "saved\ninterrupted\n"
    assert process.returncode == 0


def test_the_console_shows_each_error_of_the_agent_once_with_its_count(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def agent(task: dict[str, int]) -> float:
        raise LookupError("no such tool")

    trainer(strategy="shm", trackers=["console"]).fit(agent, TASKS)
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.count("failed: LookupError: no such tool") == 1
    assert f"{len(TASKS)} of {len(TASKS)} rollouts: LookupError: no such tool" in shown
    assert caplog.text.count("LookupError: no such tool") == 1, "the log has the traceback once"


def asking_agent(task: str, llm: agl.LLM) -> float:
    """Calls a model and returns the length of its answer."""
    import openai

    with openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        answer = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
    return float(len(answer.choices[0].message.content or ""))


@pytest.mark.parametrize("strategy", ["shm", "cs"])
async def test_agents_get_the_model_of_a_gateway_without_initial_resources(strategy: str) -> None:
    async with ScriptedOpenAI([Answer("four")] * 2) as server:
        gateway = agl.LLMProxy(model_list=[{"model": "m", "endpoint": server.endpoint}])
        store = agl.InMemoryLightningStore()
        running = trainer(llm_proxy=gateway, store=store, strategy=strategy, tracer="otel")
        await asyncio.to_thread(running.dev, asking_agent, ["a", "b"])
        latest = await store.get_latest_resources()
        ids = [rollout.rollout_id for rollout in (await store.query_rollouts()).items]
        rewards = [agl.find_final_reward((await store.query_spans(each)).items) for each in ids]
    assert latest is not None
    assert isinstance(latest.resources["llm"], agl.ProxyLLM)
    assert rewards == [4.0, 4.0]


async def test_a_model_among_the_initial_resources_replaces_the_models_of_the_gateway() -> None:
    gateway = agl.LLMProxy(model_list=[{"model": name, "endpoint": "http://127.0.0.1:9/v1"} for name in ("m", "judge")])
    own = agl.LLM(endpoint="http://127.0.0.1:9/v1", model="mine")
    for given, expected in (({"model": own}, {"model"}), ({"prompt": "hi"}, {"prompt", "m", "judge"})):
        store = agl.InMemoryLightningStore()
        await asyncio.to_thread(
            trainer(llm_proxy=gateway, store=store, strategy="shm", initial_resources=given).dev, halving_agent, TASKS
        )
        latest = await store.get_latest_resources()
        assert latest is not None
        assert set(latest.resources) == expected


def test_an_algorithm_that_runs_an_agent_asks_for_one() -> None:
    with pytest.raises(agl.ConfigError, match=r"Baseline runs an agent; give it, as in fit\(agent, train_dataset\)"):
        agl.Trainer(algorithm="baseline").fit()


def test_an_algorithm_sees_in_a_trainer_what_it_was_given_and_what_it_sets() -> None:
    class Looking(agl.Algorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            assert self.is_async()
            assert self.get_store() is store
            assert self.get_trainer() is fitting
            assert (self.get_initial_resources() or {})["prompt"] == agl.PromptTemplate("given {task}")
            assert isinstance(self.get_adapter(), agl.TraceToMessages)
            assert self.get_llm_proxy() is proxy
            assert (list(train_dataset), list(val_dataset)) == ([1], [2])
            other = agl.TraceToTriplet()
            self.set_adapter(other)
            self.set_initial_resources({"prompt": "set {task}"})
            assert self.get_adapter() is self.context.adapter is other
            assert self.context.initial_resources == {"prompt": agl.PromptTemplate("set {task}")}
            self.set_store(store.with_run("elsewhere"))
            self.set_llm_proxy(None)
            assert (self.get_store().run_id, self.get_llm_proxy()) == ("elsewhere", None)
            ended.append(True)

    ended: list[bool] = []
    store = agl.create_store("memory://")
    proxy = agl.LLMProxy(model_list=[{"model": "m", "endpoint": "http://127.0.0.1:9/v1", "api_key": "any"}])
    fitting = agl.Trainer(
        algorithm=Looking(), store=store, strategy="shm", tracer="dummy", trackers=[], adapter=agl.TraceToMessages(),
        llm_proxy=proxy, initial_resources={"prompt": "given {task}"},
    )  # fmt: skip
    assert fitting.fit(halving_agent, [1], [2]).status == "succeeded"
    assert ended == [True]
