"""Trackers with the real libraries: several can be used together, and none of them delays training."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import agentlightning as agl
from agentlightning.event import AttemptFinished, RolloutFinished, RunFinished, StepFinished
from agentlightning.testing.tracker import TrackerConformance
from agentlightning.types import Run
from agentlightning_plugins.trackers.console import tracker as console_tracker
from agentlightning_plugins.trackers.jsonl import JsonlTracker
from agentlightning_plugins.trackers.mlflow import MlflowTracker
from agentlightning_plugins.trackers.shared import make_row
from agentlightning_plugins.trackers.tensorboard import TensorBoardTracker
from tests.failures import check_messages
from tests.waiting import LIMIT_S

REWARDS = [0.25, 0.5, 1.0]


@agl.algo
async def climbing(store: agl.LightningStore) -> None:
    rollout = await store.enqueue_rollout("one task")
    await store.wait_for_rollouts([rollout.rollout_id])
    for step, reward in enumerate(REWARDS, 1):
        await store.add_metrics(step, {"reward": reward, "loss/policy": -reward})


def track(trackers: list[Any], run_dir: Path | None) -> agl.Run:
    settings: dict[str, Any] = {"strategy": "shm", "tracer": "dummy", "trackers": trackers, "run_dir": run_dir}
    return agl.Trainer(algorithm=climbing, **settings).fit(lambda task: 1.0)


@pytest.fixture(autouse=True)
def trackers_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.run.tracker._CLOSE_S", LIMIT_S)


class Kit(TrackerConformance):
    patience_s = LIMIT_S  # the first use of a library imports it


class TestConsole(Kit):
    @pytest.fixture
    def make_tracker(self) -> Any:
        return lambda: console_tracker.ConsoleTracker(Console(file=io.StringIO()))


class TestJsonl(Kit):
    @pytest.fixture
    def make_tracker(self) -> Any:
        return JsonlTracker

    def read_steps(self, tracker: Any, directory: Path) -> Any:
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        return [(line.pop("step"), line) for line in lines if "step" in line and line.pop("time")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
class TestTensorBoard(Kit):
    @pytest.fixture
    def make_tracker(self) -> Any:
        return TensorBoardTracker

    def read_steps(self, tracker: Any, directory: Path) -> Any:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(directory / "tensorboard"))
        events.Reload()
        steps: dict[int, dict[str, float]] = {}
        for name in events.Tags()["tensors"]:
            for event in events.Tensors(name):
                steps.setdefault(event.step, {})[name] = event.tensor_proto.float_val[0]
        return sorted(steps.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
class TestMlflow(Kit):
    @pytest.fixture
    def make_tracker(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        return lambda: MlflowTracker((tmp_path / "mlruns").as_uri(), "test")

    def read_steps(self, tracker: Any, directory: Path) -> Any:
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=(directory / "mlruns").as_uri())
        experiment = client.get_experiment_by_name("test")
        assert experiment is not None
        steps: dict[int, dict[str, float]] = {}
        for run in client.search_runs([experiment.experiment_id]):
            for name in run.data.metrics:
                for metric in client.get_metric_history(run.info.run_id, name):
                    steps.setdefault(metric.step, {})[name] = metric.value
        return sorted(steps.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_stores_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    track([{"name": "wandb", "mode": "offline", "project": "test"}], tmp_path / "run")
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    from wandb.proto import wandb_internal_pb2 as pb

    logged = []
    for data in leveldb_records(file.read_bytes()[7:], block_offset=7):
        record = pb.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            logged.append((values["_step"], values["reward"]))
    assert logged == list(enumerate(REWARDS, 1))
    (table,) = (tmp_path / "run").glob("wandb/offline-run-*/files/media/table/samples_1_*.table.json")
    assert_sample(json.loads(table.read_text()))


def assert_sample(table: dict[str, Any]) -> None:
    """Checks that the table has the only rollout."""
    [sample] = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert (sample["task"], sample["status"], sample["reward"]) == ("one task", "succeeded", 1.0)


def leveldb_records(data: bytes, block_offset: int) -> Iterator[bytes]:
    """Yields the records of a LevelDB log: blocks of 32 KiB, records of checksum (4), length (2), type (1) and data."""
    position, record = 0, b""
    while position + 7 <= len(data):
        left = 32768 - (position + block_offset) % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_stores_metrics_parameters_and_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    uri = (tmp_path / "mlruns").as_uri()
    track([{"name": "mlflow", "tracking_uri": uri, "experiment": "test"}], tmp_path / "run")
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("test")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm"] == "FunctionalAlgorithm"
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "reward")] == list(
        enumerate(REWARDS, 1)
    )
    assert [item.path for item in client.list_artifacts(run.info.run_id, "samples")] == ["samples/1.json"]
    assert_sample(json.loads(Path(client.download_artifacts(run.info.run_id, "samples/1.json")).read_text()))
    tracker = MlflowTracker(uri, "names")
    tracker.start(Run(run_id="run", name="a", config={f"data[{number}]": number for number in range(150)}), None)
    tracker.on_event(StepFinished(run_id="run", step=1, values={"val_pass@4": 0.5, "loss/policy": 1.0}))
    logged = client.get_run(tracker._run_id).data
    assert logged.metrics == {"val_pass_4": 0.5, "loss/policy": 1.0}
    assert logged.params == {f"data_{number}_": str(number) for number in range(150)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_stores_metrics_in_its_database(tmp_path: Path) -> None:
    script = tmp_path / "program.py"  # the library reads its settings once, when it is imported
    script.write_text(
        "import agentlightning as agl\n"
        "from tests.plugins.trackers.test_trackers import track\n"
        f"import pathlib; track([{{'name': 'trackio', 'project': 'test'}}], pathlib.Path({str(tmp_path / 'run')!r}))\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(script)], check=False, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    (database,) = (tmp_path / "trackio").glob("*.db")
    with closing(sqlite3.connect(database)) as connection, connection:
        rows = [
            (step, json.loads(metrics))
            for step, metrics in connection.execute("select step, metrics from metrics order by step, id")
        ]
    assert [(step, metrics["reward"]) for step, metrics in rows if "reward" in metrics] == list(enumerate(REWARDS, 1))
    [(step, table)] = [(step, metrics["samples"]) for step, metrics in rows if "samples" in metrics]
    assert step == 1
    assert "one task" in json.dumps(table)


class Showing:
    """A tracker that takes samples."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, run: agl.Run, directory: Path | None) -> None:
        pass

    def on_event(self, event: Any) -> None:
        if event.kind == "step_finished":
            self.calls.append(event.step)

    def on_samples(self, step: int, samples: Any) -> None:
        self.calls.append((step, [make_row(*sample) for sample in samples]))

    def close(self) -> None:
        pass


def test_a_tracker_gets_the_last_rollouts_of_a_step_with_their_last_model_call() -> None:
    showing = Showing()

    def agent(task: int) -> float:
        for text in ("first", "last"):
            attributes = {
                "gen_ai.operation.name": "chat",
                "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": text}]}]),
                "gen_ai.output.messages": json.dumps(
                    [{"role": "assistant", "parts": [{"type": "text", "content": f"{text} answer"}]}]
                ),
            }
            with agl.operation(name="chat", **attributes):
                pass
        return task / 10

    @agl.algo
    async def training(store: agl.LightningStore) -> None:
        for step, tasks in ((1, range(10)), (2, range(0)), (3, range(10, 12))):
            rollouts = [await store.enqueue_rollout(task, mode="train") for task in tasks]
            await store.wait_for_rollouts([rollout.rollout_id for rollout in rollouts])
            await store.add_metrics(step, {"reward": 1.0})

    agl.Trainer(algorithm=training, strategy="shm", trackers=[showing]).fit(agent)
    assert [call if isinstance(call, int) else call[0] for call in showing.calls] == [1, 1, 2, 3, 3]
    first, second = (call[1] for call in showing.calls if not isinstance(call, int))
    assert (len(first), len(second)) == (8, 2)
    sample = next(sample for sample in second if sample["task"] == "11")
    assert tuple(sample.values())[1:] == ("train", "succeeded", 1.1, "11", "last", "last answer")


class Slow:
    """A tracker whose server does not answer until ``may_go_on`` is set, and then answers slowly."""

    def __init__(self) -> None:
        self.steps = 0
        self.may_go_on = threading.Event()

    def start(self, run: agl.Run, directory: Path | None) -> None:
        pass

    def on_event(self, event: Any) -> None:
        assert self.may_go_on.wait(LIMIT_S)
        time.sleep(0.1)
        self.steps += event.kind == "step_finished"

    def close(self) -> None:
        pass


def test_a_slow_tracker_does_not_delay_training_and_is_awaited_at_the_end(tmp_path: Path) -> None:
    slow = Slow()

    @agl.algo
    async def training(store: agl.LightningStore) -> None:
        for step in range(4):
            await store.add_metrics(step, {"reward": 1.0})
        slow.may_go_on.set()

    agl.Trainer(
        algorithm=training, strategy="shm", tracer="dummy", trackers=[slow, "jsonl"], run_dir=tmp_path / "r"
    ).fit(lambda task: 1.0)
    assert slow.steps == 4
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 5


def test_metrics_jsonl_holds_each_step_once_after_a_resume(tmp_path: Path) -> None:
    run, path = Run(name="r"), tmp_path / "metrics.jsonl"

    def write(steps: dict[int, float], *, is_killed: bool = False) -> None:
        tracker = JsonlTracker()
        tracker.start(run, tmp_path)
        for step, reward in steps.items():
            tracker.on_event(StepFinished(run_id="r", step=step, values={"reward": reward}))
        if not is_killed:
            tracker.on_event(RunFinished(run_id="r", status="succeeded"))
        tracker.close()

    write({0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3}, is_killed=True)
    with path.open("ab") as file:
        file.write(b'{"step":4,"rew')  # killed while it wrote
    write({2: 0.5, 3: 0.6, 4: 0.7})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["reward"]) for line in lines[:-1]] == [(0, 0.0), (1, 0.1), (2, 0.5), (3, 0.6), (4, 0.7)]
    assert lines[-1]["status"] == "succeeded"


@pytest.mark.parametrize("name", ["tensorboard", "jsonl"])
def test_a_tracker_without_a_path_is_dropped_with_the_reason(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert track([name], None).status == "succeeded"
    assert f"the tracker '{name}' needs a" in caplog.text


def test_the_trackers_setting_may_be_a_single_tracker(tmp_path: Path) -> None:
    agl.Trainer(algorithm=climbing, strategy="shm", tracer="dummy", trackers="jsonl", run_dir=tmp_path / "r").fit(
        lambda task: 1.0
    )
    assert (tmp_path / "r" / "metrics.jsonl").is_file()


def console_output(events: list[Any], monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> list[str]:
    """The output of the console tracker into a pipe; ``seconds`` is the time of the start and of each event."""
    output = io.StringIO()
    clock = iter(seconds)
    monkeypatch.setattr(console_tracker, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    tracker = console_tracker.ConsoleTracker(Console(file=output, width=80))
    tracker.start(Run(run_id="run", name="[a]"), None)
    for event in events:
        tracker.on_event(event)
    tracker.close()
    return output.getvalue().splitlines()


def test_the_time_left_ignores_the_start_and_the_steps_before_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [StepFinished(run_id="run", step=step, values={"progress": step / 10}) for step in (5, 6, 7)]
    lines = console_output(steps, monkeypatch, [0.0, 0.0, 1000.0, 1060.0, 1120.0])
    assert [line.rstrip() for line in lines[1:]] == [
        "step    5",
        "step    6  about 4 min 00 s left",
        "step    7  about 3 min 00 s left",
    ]


def test_a_notebook_shows_one_line_that_is_updated_in_place_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, str]] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            shown.append(("changed", data["text/plain"]))

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        shown.append(("new", data["text/plain"]))
        return Handle()

    clock = itertools.count(0.0, 30.0)
    monkeypatch.setattr(console_tracker, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    console = Console(file=io.StringIO(), width=80)
    console.is_jupyter = True
    monkeypatch.setattr(console, "print", lambda *args, **settings: None)  # it would need a notebook
    tracker = console_tracker.ConsoleTracker(console)
    tracker.start(Run(run_id="run", name="a"), None)
    for step in (1, 2):
        tracker.on_event(StepFinished(run_id="run", step=step, values={"reward": 0.5, "progress": step / 10}))
    tracker.close()
    assert [kind for kind, _ in shown] == ["new", "changed", "changed", "changed"]
    assert shown[0][1].startswith("waiting for the first step")
    last = " ".join(shown[-1][1].split())
    assert last.startswith("step 2 reward 0.5 ")
    assert re.search(r"elapsed, about \d+ min \d\d s left", last)


def screen(output: str) -> list[str]:
    """The lines that a terminal shows at the end; the live line moves up and erases with the three codes below."""
    lines, row = [""], 0
    for text in re.split("(\x1b\\[1A|\x1b\\[2K|\x1b\\[[?0-9;]*[a-zA-Z]|\n|\r)", output):
        if text == "\x1b[1A":
            row -= 1
        elif text in ("\r", "\x1b[2K"):
            lines[row] = ""
        elif text == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif not text.startswith("\x1b"):
            lines[row] += text
    return [line.rstrip() for line in lines if line.strip()]


def test_the_lines_of_steps_stay_on_a_terminal_and_the_live_line_does_not() -> None:
    output = io.StringIO()
    tracker = console_tracker.ConsoleTracker(Console(file=output, width=80, force_terminal=True))
    tracker.start(Run(run_id="run", name="a"), None)
    for step in (1, 2):
        tracker.on_event(StepFinished(run_id="run", step=step, values={"reward": step / 4}))
    tracker.on_event(RunFinished(run_id="run", status="succeeded"))
    assert "elapsed" in output.getvalue()
    tracker.close()
    assert screen(output.getvalue()) == [
        "run a", "step    1  reward 0.25", "step    2  reward 0.5", "run succeeded"
    ]  # fmt: skip


def test_lines_are_not_wrapped_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"reward": 0.123456, "val_reward": 0.123456, "success_rate": 0.5, "tokens_per_s": 123456.0, "seconds": 1.5}
    events = [
        StepFinished(run_id="run", step=1, values=values),
        AttemptFinished(
            run_id="run", rollout_id="ro-1", attempt_id="at-1", status="failed", error="ValueError: [x] " + "no " * 50
        ),
        RolloutFinished(run_id="run", rollout_id="ro-1", status="failed"),
    ]
    lines = console_output(events, monkeypatch, [0.0] * 5)
    assert lines[0] == "run [a]"
    assert lines[1].startswith("step    1  reward 0.123")
    assert "seconds 1.5" in lines[1]
    assert lines[2].startswith("rollout ro-1 failed: ValueError: [x] no")
    assert len(lines[2]) > 150


def test_errors_of_attempts_count_only_if_their_rollout_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[AttemptFinished | RolloutFinished | RunFinished] = []
    for number, statuses in enumerate([["succeeded"], ["failed", "succeeded"], ["failed", "failed"]]):
        about = {"run_id": "run", "rollout_id": f"ro-{number}"}
        for status in statuses:
            error = "LostClaim: the worker died" if status == "failed" else None
            events.append(AttemptFinished(**about, attempt_id="at-1", status=status, error=error))
        events.append(RolloutFinished(**about, status=statuses[-1]))
    lines = console_output([*events, RunFinished(run_id="run", status="succeeded")], monkeypatch, [0.0] * 20)
    assert [line for line in lines if "LostClaim" in line] == [
        "rollout ro-2 failed: LostClaim: the worker died", "1 of 3 rollouts: LostClaim: the worker died"
    ]  # fmt: skip
    check_messages("a Ray node is removed", *(line for line in lines if " failed:" in line))


def test_missing_rewards_and_a_run_without_success_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = StepFinished(run_id="run", step=1, values={"reward": 0.0, "rollouts_without_reward": 3.0})
    lines = console_output([silent, silent], monkeypatch, [0.0] * 3)
    assert [line for line in lines if "no reward" in line] == [
        "3 rollouts have no reward, which counts as 0: return a number from the agent, or call agl.emit_reward"
    ]
    failed = RolloutFinished(run_id="run", rollout_id="ro-1", status="failed")
    finished = RunFinished(run_id="run", status="succeeded")
    last = "no rollout succeeded; `agl doctor AGENT` runs one and reports the cause"
    lines = console_output(
        [failed, silent.model_copy(update={"values": {"rollouts_without_reward": 1}}), finished], monkeypatch, [0.0] * 5
    )
    assert lines == ["run [a]", "step    1  ", last, "run succeeded"]
    steps = [silent.model_copy(update={"values": {"rollouts_without_reward": count}}) for count in (10, 8)]
    lines = console_output([*[failed] * 10, *steps], monkeypatch, [0.0] * 13)
    assert [line.partition(",")[0] for line in lines if "no reward" in line] == ["8 rollouts have no reward"]
    succeeded = failed.model_copy(update={"status": "succeeded"})
    assert last not in console_output([failed, succeeded, finished], monkeypatch, [0.0] * 5)
