"""`agl rollouts`, `spans`, `resources` and `workers`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import agentlightning as agl
from agentlightning.cli import cli
from agentlightning.errors import ConfigError, LightningError
from agentlightning.event import Event
from agentlightning.plugin.registry import get_manager
from agentlightning.types import Span
from agentlightning_plugins.commands.inspect import rollouts as rollouts_module
from agentlightning_plugins.shared import terminal
from tests.waiting import LIMIT_S, until


@pytest.fixture(scope="module", autouse=True)
def commands() -> None:
    for implementation in get_manager().hook.add_commands.get_hookimpls():
        implementation.function(cli)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A run's directory: one rollout succeeded with a reward, one failed, one waits; two versions of a prompt."""

    async def fill() -> None:
        store = agl.create_store(f"sqlite:///{tmp_path / 'store.db'}")
        llm = agl.LLM(endpoint="http://h/v1", model="m", api_key="sk-secret")
        update = await store.add_resources({"prompt": "first", "llm": llm})
        await store.update_resources(update.resources_id, {"prompt": "second", "llm": llm})
        for number, status in enumerate(("succeeded", "failed", None)):
            await store.enqueue_rollout({"n": number}, mode="train", metadata={"step": number})
            if status is None:
                continue
            (claimed,) = await store.dequeue_many_rollouts(worker_id="w-1")
            where = {"rollout_id": claimed.rollout_id, "attempt_id": claimed.attempt.attempt_id}
            reward = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 0.5}
            await store.add_span(Span.from_attributes(attributes=reward, name="agentlightning.annotation", **where))
            error = agl.types.AttemptFailure(type="KeyError", message="'x'", traceback="Traceback: KeyError: 'x'")
            await store.update_attempt(
                claimed.rollout_id, "latest", status=status, error=error if status == "failed" else None
            )
        await store.close()

    asyncio.run(fill())
    return tmp_path


def run(place: Path, *arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, [*arguments, "--store", str(place)], env={"COLUMNS": "200"})
    if isinstance(result.exception, LightningError):
        assert code == 2, result.exception
    else:
        assert result.exit_code == code, result.output
    return result


def listed(place: Path, *arguments: str) -> Any:
    return json.loads(run(place, *arguments, "--json").stdout)


def test_rollouts_are_listed_newest_first_with_reward_and_error(place: Path) -> None:
    assert [rollout["input"]["n"] for rollout in listed(place, "rollouts", "list")] == [2, 1, 0]
    assert [rollout["status"] for rollout in listed(place, "rollouts", "list", "--status", "failed")] == ["failed"]
    assert [rollout["input"]["n"] for rollout in listed(place, "rollouts", "list", "--step", "0")] == [0]
    lines = run(place, "rollouts", "list").stdout.splitlines()
    assert lines[0].split()[:5] == ["rollout", "status", "mode", "attempt", "reward"]
    assert lines[3].split()[1:5] == ["succeeded", "train", "1", "0.5"]
    assert "2 of 3" in run(place, "rollouts", "list", "--limit", "2").stderr


def test_a_rollout_is_shown_with_attempts_spans_and_traceback(place: Path) -> None:
    (failed,) = listed(place, "rollouts", "list", "--status", "failed")
    shown = run(place, "rollouts", "show", failed["rollout_id"]).stdout
    assert "Traceback: KeyError: 'x'" in shown
    assert "agentlightning.annotation" in shown
    whole = listed(place, "rollouts", "show", failed["rollout_id"])
    assert whole["attempts"][0]["error"]["type"] == "KeyError"
    (span,) = whole["spans"]
    assert listed(place, "spans", "show", failed["rollout_id"], span["span_id"]) == span
    assert listed(place, "spans", "list", failed["rollout_id"], "--name", "annotation") == [span]
    assert listed(place, "spans", "list", failed["rollout_id"], "--name", "no such") == []
    assert "agentlightning.reward.0.value" in run(place, "spans", "show", failed["rollout_id"], span["span_id"]).stdout


def test_a_rollout_is_shown_with_its_conversation_and_reward(tmp_path: Path) -> None:
    async def fill() -> str:
        store = agl.create_store(f"sqlite:///{tmp_path / 'store.db'}")
        rollout = await store.start_rollout({"n": 1})
        where = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        question = [{"role": "user", "parts": [{"type": "text", "content": "2 + 3?"}]}]
        call = {"type": "tool_call", "id": "c", "name": "add", "arguments": '{"a": 2}'}
        calls = [{"role": "assistant", "parts": [call], "finish_reason": "tool_call"}]
        result = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "5"}]}
        answer = [{"role": "assistant", "parts": [{"type": "text", "content": "It is 5."}], "finish_reason": "stop"}]
        for seen, said in ((question, calls), ([*question, *calls, result], answer)):
            attributes = {
                "gen_ai.operation.name": "chat",
                "gen_ai.input.messages": json.dumps(seen),
                "gen_ai.output.messages": json.dumps(said),
            }
            await store.add_span(Span.from_attributes(attributes=attributes, name="chat m", **where))
        reward = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 0.5}
        await store.add_span(Span.from_attributes(attributes=reward, name="agentlightning.annotation", **where))
        feedback = {"agentlightning.feedback.text": "correct, but short", "agentlightning.feedback.prompt": "solver"}
        await store.add_span(Span.from_attributes(attributes=feedback, name="agentlightning.feedback", **where))
        await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
        await store.close()
        return rollout.rollout_id

    rollout_id = asyncio.run(fill())
    shown = run(tmp_path, "rollouts", "show", rollout_id).stdout
    assert "reward 0.5\nfeedback on solver: correct, but short\n" in shown
    assert shown.count("[user] 2 + 3?") == 1, "a conversation of several calls is printed once"
    assert '  calls add({"a": 2})\n[tool] 5\n[assistant] It is 5.\n' in shown
    (attempt,) = listed(tmp_path, "rollouts", "show", rollout_id)["attempts"]
    assert attempt["reward"] == 0.5
    assert [message["role"] for message in attempt["conversations"][0]["messages"]] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip


def test_the_runs_of_a_store_are_listed_with_their_scores(tmp_path: Path) -> None:
    async def fill() -> None:
        store = agl.create_store(f"sqlite:///{tmp_path / 'store.db'}")
        for name, status, rewards in (("first", "succeeded", (0.25, 0.5)), ("second", "failed", ())):
            own = store.with_run(name)
            await own.create_run(name, run_id=name, config={"algorithm": {"name": "apo"}})
            await own.enqueue_rollout({"n": 1})
            for step, reward in enumerate(rewards):
                await own.add_metrics(step, {"reward": reward})
            await own.update_run(name, status)
        await store.close()

    asyncio.run(fill())
    lines = run(tmp_path, "runs", "list").stdout.splitlines()
    assert lines[0].split() == ["run", "name", "status", "algorithm", "started", "rollouts", "score"]
    assert [line.split()[:4] for line in lines[1:]] == [
        ["first", "first", "succeeded", "apo"],
        ["second", "second", "failed", "apo"],
    ]
    assert lines[1].split()[-2:] == ["1", "0.5"]
    assert listed(tmp_path, "runs", "show", "first")["scores"] == {"reward": 0.5}
    assert "status                 failed" in run(tmp_path, "runs", "show", "second").stdout
    assert "no run 'third'" in str(run(tmp_path, "runs", "show", "third", code=2).exception)


def test_rollouts_are_cancelled_retried_and_deleted(place: Path) -> None:
    waiting, failed, succeeded = (rollout["rollout_id"] for rollout in listed(place, "rollouts", "list"))
    assert run(place, "rollouts", "cancel", waiting).stdout == f"{waiting}: cancelled\n"
    assert run(place, "rollouts", "retry", failed).stdout == f"{failed}: requeuing\n"
    refused = run(place, "rollouts", "retry", succeeded, waiting, code=1)
    assert "is succeeded; only failed and cancelled rollouts can be retried" in refused.stderr
    assert f"{waiting}: requeuing" in refused.stdout
    assert run(place, "rollouts", "delete", "--status", "succeeded", "--yes").stdout == "1 deleted\n"
    assert CliRunner().invoke(cli, ["rollouts", "delete", "--keep", "0", "--store", str(place)], input="n\n").exit_code
    assert len(listed(place, "rollouts", "list")) == 2
    assert isinstance(run(place, "rollouts", "delete", "--yes", code=2).exception, ConfigError)
    assert len(listed(place, "rollouts", "list")) == 2


def test_deleting_many_rollouts_shows_its_progress(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts_module, "_DELETED_AT_ONCE", 1)
    waiting = next(rollout for rollout in listed(place, "rollouts", "list") if rollout["status"] == "queuing")
    run(place, "rollouts", "cancel", waiting["rollout_id"])
    deleted = run(place, "rollouts", "delete", "--keep", "0", "--yes")
    assert deleted.stdout == "3 deleted\n"
    assert deleted.stderr.splitlines() == ["2 deleted so far", "3 deleted so far"]


def test_resources_are_shown_and_rolled_back_without_showing_a_key(place: Path) -> None:
    update, older = listed(place, "resources", "list")
    assert (update["version"], older["version"]) == (2, 1)
    resources_id = update["resources_id"]
    assert (
        listed(place, "resources", "show", resources_id, "--version", "1")["resources"]["prompt"]["template"] == "first"
    )
    assert "version 3 equals version 1" in run(place, "resources", "rollback", resources_id, "1").stdout
    latest = listed(place, "resources", "show")
    assert (latest["version"], latest["resources"]["prompt"]["template"]) == (3, "first")
    for shown in (("resources", "show"), ("resources", "show", "--json"), ("resources", "list", "--json")):
        assert "sk-secret" not in run(place, *shown).output
    assert "no version 9" in str(run(place, "resources", "rollback", resources_id, "9", code=2).exception)


def test_workers_are_filtered(place: Path) -> None:
    (worker,) = listed(place, "workers", "list")
    assert worker["worker_id"] == "w-1"
    assert listed(place, "workers", "list", "--status", "busy", "--contains", "w-2") == []
    assert listed(place, "workers", "list", "--contains", "w-", "--limit", "5") == [worker]


def test_a_worker_with_several_rollouts_is_listed_with_their_number(place: Path) -> None:
    async def begin() -> None:
        store = agl.create_store(f"sqlite:///{place / 'store.db'}")
        await store.enqueue_many_rollouts([agl.types.EnqueueRolloutRequest(input=n) for n in range(2)])
        claimed = await store.dequeue_many_rollouts(limit=3, worker_id="w-9")
        await store.update_worker("w-9", attempt_ids=[each.attempt.attempt_id for each in claimed])
        await store.close()

    asyncio.run(begin())
    assert "and 2 more" in run(place, "workers", "list", "--status", "busy").stdout


def test_a_worker_is_ended(place: Path) -> None:
    assert run(place, "workers", "end", "w-1").stdout == "0 attempts ended\n"
    assert "no worker 'w-2'" in str(run(place, "workers", "show", "w-2", code=2).exception)


@pytest.mark.parametrize(("what", "count"), [("rollouts", 3), ("spans", 2), ("resources", 2), ("workers", 1)])
def test_exports_hold_every_record(place: Path, what: str, count: int) -> None:
    import pyarrow.parquet

    assert listed(place, what, "export", str(place / "out.jsonl")) == {"path": str(place / "out.jsonl"), "count": count}
    lines = [json.loads(line) for line in (place / "out.jsonl").read_text().splitlines()]
    assert len(lines) == count
    assert "sk-secret" not in (place / "out.jsonl").read_text()
    run(place, what, "export", str(place / "out.parquet"))
    rows = pyarrow.parquet.read_table(place / "out.parquet").to_pylist()
    assert len(rows) == count
    key = {"rollouts": "rollout_id", "spans": "span_id", "resources": "resources_id", "workers": "worker_id"}[what]
    assert [row[key] for row in rows] == [line[key] for line in lines]
    assert "must end in .jsonl or .parquet" in str(run(place, what, "export", str(place / "out.txt"), code=2).exception)


def columns(place: Path, what: str) -> list[str]:
    import pyarrow.parquet

    run(place, what, "export", str(place / "out.parquet"))
    names: list[str] = pyarrow.parquet.read_schema(place / "out.parquet").names
    return names


def test_a_parquet_export_has_all_columns_whatever_its_first_record_is(tmp_path: Path) -> None:
    async def fill() -> None:
        store = agl.create_store(f"sqlite:///{tmp_path / 'store.db'}")
        waiting = await store.enqueue_rollout({"n": 0})
        await store.cancel_rollout(waiting.rollout_id)  # it has no attempt
        await store.start_rollout({"n": 1})
        await store.close()

    asyncio.run(fill())
    assert columns(tmp_path, "rollouts") == list(agl.AttemptedRollout.model_fields)
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["attempt"] is None for row in rows] == [True, False]
    for what, record in (("spans", Span), ("resources", agl.ResourcesUpdate)):
        assert columns(tmp_path, what) == list(record.model_fields), "an export without records has all columns too"


async def run_one(store: agl.LightningStore, shown: Callable[[str], Awaitable[None]]) -> None:
    """Runs a rollout from beginning to end, as another process might; ``shown`` waits in the middle of it."""
    await store.add_resources({"prompt": "text"})
    await store.enqueue_rollout({"n": 9})
    (claimed,) = await store.dequeue_many_rollouts(worker_id="w-9")
    where = {"rollout_id": claimed.rollout_id, "attempt_id": claimed.attempt.attempt_id}
    await store.add_span(Span.from_attributes(attributes={}, name="work", **where))
    await shown(claimed.rollout_id)
    await store.update_attempt(claimed.rollout_id, "latest", status="succeeded")


@pytest.mark.parametrize(
    ("what", "shown", "fields"),
    [
        ("rollouts", "rollout_enqueued     rollout_id=ro-", {"kind", "time"}),
        ("spans", " work {}", {"span_id", "attributes"}),
        ("resources", '"template": "text"', {"resources_id", "version"}),
        ("workers", " w-9 busy ro-", {"worker_id", "status"}),
    ],
)
def test_following_prints_changes_by_others_as_they_happen(
    monkeypatch: pytest.MonkeyPatch, what: str, shown: str, fields: set[str]
) -> None:
    def follow(*options: str) -> str:
        store = agl.create_store("memory://")
        enough, subscribe, started = threading.Event(), store.subscribe, set[str]()

        async def subscribe_for_a_while(kinds: Sequence[str] | None = None) -> AsyncIterator[Event]:
            async with contextlib.aclosing(subscribe(kinds)) as events:
                for _ in range(20):
                    event = await anext(events)
                    yield event
                    if event.kind == "rollout_started":
                        started.add(event.rollout_id)
            enough.set()

        async def shown(rollout_id: str) -> None:
            """Waits until the follower has shown the start of a rollout, if it has shown that of an earlier one."""
            if started:
                await until(lambda: rollout_id in started or enough.is_set())

        async def play() -> None:
            while not enough.is_set():  # the follower does not report when it begins to listen
                await run_one(store, shown)
                await asyncio.sleep(0.01)
            await store.close()

        monkeypatch.setattr(store, "subscribe", subscribe_for_a_while)
        monkeypatch.setattr(terminal, "open_store", lambda where, run: store)
        others = threading.Thread(target=lambda: asyncio.run(play()))
        others.start()
        output = CliRunner().invoke(cli, [what, "follow", *options], catch_exceptions=False).stdout
        others.join()
        return output

    assert shown in follow()
    lines = follow("--json").splitlines()
    assert lines
    assert all(fields <= json.loads(line).keys() for line in lines)


def test_following_ends_with_ctrl_c_and_exit_code_130(place: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "agentlightning", "rollouts", "follow", "--store", str(place)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
    reader.start()

    async def play() -> None:
        store = agl.create_store(f"sqlite:///{place / 'store.db'}")
        while not lines:
            await store.enqueue_rollout({"n": 9})
            await asyncio.sleep(0.1)
        await store.close()

    asyncio.run(play())
    process.send_signal(signal.SIGINT)
    reader.join(LIMIT_S)
    process.stdout.close()
    assert process.wait(LIMIT_S) == 130
    assert any("rollout_enqueued" in line for line in lines)


def test_every_command_has_a_json_option() -> None:
    groups = {name: cli.commands[name] for name in ("rollouts", "runs", "spans", "resources", "workers")}
    for name, group in groups.items():
        assert isinstance(group, click.Group)
        for action, command in group.commands.items():
            options = {option for parameter in command.params for option in parameter.opts}
            assert "--json" in options, f"agl {name} {action}"


def test_results_are_printed_as_json(place: Path) -> None:
    waiting, failed, succeeded = (rollout["rollout_id"] for rollout in listed(place, "rollouts", "list"))
    assert listed(place, "rollouts", "cancel", waiting) == [{"rollout_id": waiting, "status": "cancelled"}]
    mixed = json.loads(run(place, "rollouts", "retry", succeeded, failed, "--json", code=1).stdout)
    assert [set(outcome) for outcome in mixed] == [{"rollout_id", "error"}, {"rollout_id", "status"}]
    assert listed(place, "rollouts", "delete", waiting, "--yes") == {"deleted": 1}
    assert listed(place, "workers", "end", "w-1") == {"ended": 0}
    (update, _) = listed(place, "resources", "list")
    assert listed(place, "resources", "rollback", update["resources_id"], "1")["version"] == 3
    assert listed(place, "resources", "promote", f"{update['resources_id']}@2")["resources"]["llm"]["api_key"] is None


def test_a_missing_store_is_reported(tmp_path: Path) -> None:
    missing = CliRunner().invoke(cli, ["rollouts", "list", "--store", f"sqlite:///{tmp_path}/none.db"])
    assert (missing.exit_code, "the file does not exist" in missing.output) == (2, True)
    assert not (tmp_path / "none.db").exists()
    missing = CliRunner().invoke(cli, ["rollouts", "list", "--store", str(tmp_path)])
    assert isinstance(missing.exception, ConfigError)
    assert f"{str(tmp_path)!r} is neither a URL nor a directory with a store.db" in str(missing.exception)


ARGUMENTS = {
    "agent": ["agent.py:agent"], "path": ["out.jsonl"], "resources_id": ["rs-1"], "rollout_id": ["ro-1"],
    "rollout_ids": ["ro-1"], "run_id": ["default"], "sources": ["control", "treatment"], "span_id": ["s-1"],
    "version": ["1"], "worker_id": ["w-1"],
}  # fmt: skip
OPTIONS = {"gateway": ["--model", "m=http://127.0.0.1:9"], "rollouts delete": ["--yes"]}


def walk(group: click.Group, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yields each command below a group, with its names; a group that works without a command counts as one."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield (*names, name), command
        if isinstance(command, click.Group):
            yield from walk(command, (*names, name))


def test_every_command_finds_its_store_by_one_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*arguments: str, **variables: str) -> str:
        result = CliRunner().invoke(cli, arguments, env={"AGL_STORE": "", "COLUMNS": "1000", **variables})
        assert result.exit_code, arguments
        return result.stderr + str(result.exception or "")

    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text("def agent(task):\n    return 1.0\n")
    found = [(names, command) for names, command in walk(cli) if any(each.name == "where" for each in command.params)]
    assert {names for names, command in walk(cli) if "--store" in command.get_help(click.Context(command))} == {
        *(names for names, _ in found), ("trace",), ("import",),
    }  # fmt: skip
    assert len(found) > 30
    lines = []
    for names, command in found:
        arguments = [each.name for each in command.params if isinstance(each, click.Argument)]
        given = [text for name in arguments for text in ARGUMENTS.get(name or "", ())]
        lines.append((names, [*names, *given, *OPTIONS.get(" ".join(names), ())]))
    for _, line in lines:
        assert "name the directory of a run or the URL of a store, such as runs/NAME" in said(*line), line
    Path("secret").write_text("")
    for name in ("old", "new"):
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        (directory / "run.json").write_text('{"key": "k"}')
        (directory / "store.db").symlink_to(tmp_path / "secret")  # is refused, by an error that names the directory
        os.utime(directory / "run.json", (len(name), len(name) + (name == "new")))
    for names, line in lines:
        newest = said(*line)
        assert "store: runs/new, the newest run; another one: --store URL or --store runs/NAME" in newest, line
        assert "runs/new, so it is not opened" in newest, line
        assert "runs/old, so it is not opened" in said(*line, AGL_STORE="runs/old"), line
        assert "runs/old, so it is not opened" in said(*line, "--store", "runs/old", AGL_STORE="runs/new"), line
        assert "'nothing'" in said(*line, "--store=nothing://a"), line
        if names != ("gateway",):  # a group, whose commands have the gateway's URL as argument
            assert "runs/old, so it is not opened" in said(*line, "runs/old"), line
            assert "'nothing'" in said(*names, "nothing://a", *line[len(names) :], AGL_STORE="runs/old"), line
    for names, command in found:
        shown = command.get_help(click.Context(command, terminal_width=1000, max_content_width=1000))
        assert re.search(rf"AGL_STORE, else .*{re.escape(terminal.DEFAULT_STORE)}\.", shown), names
        assert ("[RUN_DIR|URL]" in shown and "also without --store" in shown) == (names != ("gateway",)), names


def test_without_a_store_a_command_takes_the_newest_run_and_says_so(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(*arguments: str) -> Result:
        return CliRunner().invoke(cli, arguments, env={"COLUMNS": "200"})

    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.delenv("AGL_STORE", raising=False)
    for age, name in enumerate(("old", "new", "elsewhere")):
        run_directory = home / "runs" / name
        run_directory.mkdir(parents=True)
        (run_directory / "run.json").write_text('{"key": "k"}')
        os.utime(run_directory / "run.json", (age, age))
        if name != "elsewhere":  # the store of that run is on another machine
            shutil.copy(place / "store.db", run_directory)
    listed = show("rollouts", "list", "--json")
    assert listed.stderr == "store: runs/new, the newest run; another one: --store URL or --store runs/NAME\n"
    assert len(json.loads(listed.stdout)) == 3
    assert "store: runs/new, the newest run" in show("top", "--once").stderr
    for named in (["runs/old"], ["--store", "runs/old"], [f"sqlite:///{home}/runs/old/store.db"]):
        found = show("rollouts", "list", *named, "--json", "--limit", "2")
        assert (len(json.loads(found.stdout)), found.stderr) == (2, "")
    assert json.loads(show("rollouts", "show", json.loads(listed.stdout)[0]["rollout_id"], "runs/old", "--json").stdout)
    assert "(runs/typo); the directory of a run has a store.db" in show("rollouts", "list", "runs/typo").stderr
    assert "if it has a store.db" in str(show("spans", "list", "runs/typo").exception)
    monkeypatch.setenv("AGL_STORE", "runs/old")
    assert show("rollouts", "list").stderr == ""
