"""Commands as agents: real processes, most of them Python with only the standard library."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.reward import Feedback, find_feedback
from agentlightning_plugins.shared.sandbox.process import Tail, run_group
from agentlightning_plugins.shared.scripted_model.server import EOS, Answer, ScriptedOpenAI, encode
from agentlightning_plugins.stores.http.client import LightningStoreClient
from agentlightning_plugins.stores.http.server import LightningStoreServer
from tests.plugins.agents.command_lab import (
    CALL_MODEL,
    are_gone,
    command_span,
    printed,
    processes_of,
    python,
    run,
    run_all,
    shell,
    store,
    tracer,
)
from tests.plugins.gateway.gateway_setup import gateway
from tests.process import count_open_files
from tests.waiting import LIMIT_S, until

__all__ = ["store", "tracer"]


@pytest.mark.parametrize(
    ("command", "task_via"),
    [
        (python("import sys; print(sys.argv[2])", "--task", "{task}"), None),
        (python("import sys; print(sys.argv[1])"), "argument"),
        (python("import sys; print(sys.stdin.read())"), None),
        (python("import os; print(os.environ['AGL_TASK'])"), "env"),
    ],
)
@pytest.mark.parametrize("task", ["3 + 4 = ? \u2211 {task}", {"question": "3 + 4", "answer": 7}])
async def test_a_task_is_passed_by_argument_stdin_or_environment(
    store: agl.LightningStore, command: list[str], task_via: Any, task: Any
) -> None:
    rollout, spans = await run(store, agl.CommandAgent(command, task_via=task_via), task)
    assert rollout.status == "succeeded"
    assert printed(spans) == (task if isinstance(task, str) else json.dumps(task)) + "\n"


@pytest.mark.parametrize(
    ("code", "reward", "expected"),
    [
        ("print('thinking'); print(0.25)", "stdout", 0.25),
        ("print('''thinking\\n{\"reward\": 0.5, \"format\": 1}\\n''')", "stdout", 0.5),
        ("import os; open(os.environ['AGL_REWARD_FILE'], 'w').write('-1')", "file", -1.0),
        ("", "exit_code", 1.0),
        ("raise SystemExit(1)", "exit_code", 0.0),
        ("print('ok')", lambda task, output, rollout: len(task) + len(output), 7.0),
    ],
)
async def test_the_reward_is_read_from_the_configured_source(
    store: agl.LightningStore, code: str, reward: Any, expected: float
) -> None:
    rollout, spans = await run(store, agl.CommandAgent(python(code), reward=reward))
    assert rollout.attempt.error is None
    assert agl.find_final_reward(spans) == expected


async def test_a_json_object_gives_several_rewards(store: agl.LightningStore) -> None:
    agent = agl.CommandAgent(python('print(\'{"format": 0.1, "reward": 0.5}\')'), reward="stdout")
    _, spans = await run(store, agent)
    (reward,) = agl.find_reward_spans(spans)
    assert {item.name: item.value for item in agl.get_rewards_from_span(reward)} == {"reward": 0.5, "format": 0.1}
    assert agl.get_reward_value(reward) == 0.5


@pytest.mark.parametrize(
    ("command", "reward"),
    [
        (python("import json; print(json.dumps({'reward': 0, 'feedback': 'test_sum failed'}))"), "stdout"),
        (python("import sys; print('test_sum failed', file=sys.stderr); sys.exit(1)"), "exit_code"),
        (python("print('test_sum failed')"), lambda task, output, rollout: (0.0, output.strip())),
    ],
)
async def test_feedback_comes_from_the_reward_the_stderr_of_a_failed_test_or_a_function(
    store: agl.LightningStore, command: list[str], reward: Any
) -> None:
    rollout, spans = await run(store, agl.CommandAgent(command, reward=reward))
    assert rollout.attempt.reward == 0.0
    assert find_feedback(spans) == [Feedback("test_sum failed", None)]


async def test_the_trainers_reward_function_judges_the_output_of_a_command(store: agl.LightningStore) -> None:
    async def reward(task: str, output: str, rollout: agl.Rollout) -> float:
        return float(output.strip() == task)

    agent = agl.wrap(agl.CommandAgent(python("import sys; print(sys.stdin.read())")), reward=reward)
    _, spans = await run(store, agent)
    assert agl.find_final_reward(spans) == 1.0


@pytest.mark.parametrize("code", ["", "print('no number')", "print('{\"score\": 1}')", "print('true')"])
async def test_a_command_without_a_valid_reward_fails_its_attempt_and_the_error_shows_its_output(
    store: agl.LightningStore, code: str
) -> None:
    rollout, _ = await run(store, agl.CommandAgent(python(code), reward="stdout"))
    assert rollout.status == "failed"
    assert rollout.attempt.error is not None
    assert "gave no reward: the last line of its stdout is" in rollout.attempt.error.message


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("os.mkfifo(path)", "is not a regular file"),
        ("os.mkdir(path)", "cannot be read as a regular file"),
        ("os.symlink('/dev/zero', path)", "cannot be read as a regular file"),
        ("os.symlink('/proc/self/environ', path)", "cannot be read as a regular file"),
        ("import socket; socket.socket(socket.AF_UNIX).bind(path)", "cannot be read as a regular file"),
        ("open(path, 'w').write('1' * (2**20 + 1))", "has more than 1048576 bytes"),
        ("open(path, 'w').write('[' * 2**20)", "gave no reward"),
    ],
)
async def test_a_reward_file_that_is_no_small_regular_file_fails_its_attempt(
    store: agl.LightningStore, code: str, problem: str
) -> None:
    agent = agl.CommandAgent(python(f"import os; path = os.environ['AGL_REWARD_FILE']; {code}"), reward="file")
    rollout, _ = await run(store, agent)
    assert rollout.status == "failed"
    assert rollout.attempt.error is not None
    assert problem in rollout.attempt.error.message


@pytest.mark.parametrize("source", ["stdout", "file"])
async def test_an_error_about_the_reward_does_not_show_the_providers_key(
    store: agl.LightningStore, source: Any
) -> None:
    place = "sys.stdout" if source == "stdout" else "open(os.environ['AGL_REWARD_FILE'], 'w')"
    code = f"import os, sys; print('bad key', os.environ['OPENAI_API_KEY'], file={place})"
    llm = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m", api_key="secret-of-the-provider")
    rollout, spans = await run(store, agl.CommandAgent(python(code), reward=source), resources={"llm": llm})
    assert rollout.attempt.error is not None
    assert "is 'bad key ***', not a number" in rollout.attempt.error.message
    assert "secret-of-the" not in rollout.attempt.model_dump_json() + "".join(span.model_dump_json() for span in spans)


async def test_calls_of_a_command_belong_to_its_attempt_and_become_triplets(tracer: agl.OtelTracer) -> None:
    code = CALL_MODEL + "\n    print(call(sys.argv[1]))\n    print(1.0)"
    async with ScriptedOpenAI([Answer("seven")]) as server, gateway(server) as case:
        agent = agl.CommandAgent(python(code, "{task}"), reward="stdout", name="solver")
        rollout, _ = await run(case.store, agent, "3 + 4", resources={"llm": case.proxy.as_resource(model="m")})
        spans = await case.spans(rollout)
    assert rollout.attempt.error is None
    (triplet,) = agl.TraceToTriplet().adapt(spans)
    assert triplet.prompt["token_ids"] == encode("<user>3 + 4<assistant>")
    assert triplet.response["token_ids"] == [*encode("seven"), EOS]
    assert triplet.metadata["agent_name"] == "solver"
    assert triplet.reward == 1.0


async def test_eight_concurrent_commands_never_mix(tracer: agl.OtelTracer) -> None:
    code = CALL_MODEL + "\n    print(call(sys.stdin.read()))\n    print(os.environ['AGL_ATTEMPT_ID'])"
    async with (
        ScriptedOpenAI(lambda request: Answer(request.body["messages"][-1]["content"] * 2, delay_s=0.3)) as server,
        gateway(server) as case,
    ):
        resources = {"llm": case.proxy.as_resource(model="m")}
        tasks = [f"task {i}" for i in range(8)]
        ended = await run_all(case.store, agl.CommandAgent(python(code)), tasks, resources=resources)
        for task, (rollout, spans) in zip(tasks, ended, strict=True):
            assert printed(spans).split("\n")[:2] == [task * 2, rollout.attempt.attempt_id]
            (triplet,) = agl.TraceToTriplet().adapt(await case.spans(rollout))
            assert triplet.response["token_ids"] == [*encode(task * 2), EOS]


_PROGRAM_OF_1_0 = """
import json, os, urllib.error, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["AGL_KEY"], "Content-Type": "application/json"}
    try:
        return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
    except urllib.error.HTTPError as error:
        print(error.code, json.load(error)["error"]["message"])

events = os.environ["AGL_EVENT_URL"]
question = json.loads(os.environ["AGL_TASK_INPUT"])["question"]
call = {"model": os.environ["AGL_MODEL_NAME"], "messages": [{"role": "user", "content": question}]}
answer = post(os.environ["AGL_OPENAI_BASE_URL"] + "/chat/completions", call)["choices"][0]["message"]["content"]
post(events, {"event_type": "agent_output", "data": {"answer": answer}})
post(events, {"event_type": "reward", "data": {"value": "high"}})
post(events, ["reward"])
post(events.replace(os.environ["AGL_ATTEMPT_ID"], "another"), {"event_type": "reward", "data": {"value": 1}})
post(events, {"event_type": "reward", "data": {"value": 0.75, "why": "close"}})
"""


async def test_a_program_of_1_0_runs_unchanged_and_its_reward_event_is_the_reward() -> None:
    async with ScriptedOpenAI([Answer("5")]) as server, gateway(server) as case:
        agent = agl.CommandAgent(python(_PROGRAM_OF_1_0), task_via="env")
        resources = {"llm": case.proxy.as_resource(model="m")}
        ((rollout, _),) = await run_all(case.store, agent, [{"question": "2+3?"}], resources=resources)
        spans = await case.spans(rollout)
    assert rollout.status == "succeeded", rollout.attempt.error
    said = printed(spans).splitlines()
    assert [line[:3] for line in said] == ["400", "400", "403"], said
    assert "event 'reward': reward = 'high' is not a number" in said[0]
    (triplet,) = agl.TraceToTriplet().adapt(spans)
    assert (triplet.reward, agl.find_final_reward(spans)) == (0.75, 0.75)
    outputs = [span.attributes for span in spans if span.attributes.get("event_type") == "agent_output"]
    assert [attributes["event.answer"] for attributes in outputs] == ["5"]


async def test_a_command_inherits_only_the_variables_that_it_needs_and_no_keys(
    store: agl.LightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "DATABASE_URL", "AGL_TOKEN"):
        monkeypatch.setenv(name, "ours")
    agent = agl.CommandAgent(
        python("import json, os; print(json.dumps(dict(os.environ)))"),
        inherit_env=["DATABASE_*", "AWS_REGION"],
        env={"MODE": "fast", "OPENAI_MODEL": "mine"},
    )
    llm = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m", sampling_parameters={"temperature": 0.5})
    rollout, spans = await run(store, agent, resources={"llm": llm})
    env = json.loads(printed(spans))
    assert {name for name, value in env.items() if value == "ours"} == {"DATABASE_URL", "AWS_REGION"}
    assert env["PATH"] == os.environ["PATH"]
    assert (env["MODE"], env["OPENAI_MODEL"]) == ("fast", "mine")
    assert (env["AGL_OPENAI_BASE_URL"], env["AGL_KEY"]) == (env["OPENAI_BASE_URL"], env["OPENAI_API_KEY"])  # of 1.0
    assert env["OPENAI_BASE_URL"] == "http://127.0.0.1:1/v1"
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1"
    assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"] == "none"
    assert json.loads(env["AGL_SAMPLING_PARAMETERS"]) == {"temperature": 0.5}
    assert (env["AGL_ROLLOUT_ID"], env["AGL_ATTEMPT_ID"]) == (rollout.rollout_id, rollout.attempt.attempt_id)
    assert env["AGL_ROLLOUT_MODE"] == "train"


_SPYING_PROGRAM = """
import sys, pathlib
import agentlightning as agl
spy = '''
import os, pathlib
pid = os.getppid()
while pid not in (0, int(os.environ["LAST"])):
    try:
        shown = pathlib.Path(f"/proc/{pid}/environ").read_text()
    except PermissionError:
        shown = "hidden"
    print("STOLEN" if "hunter2" in shown else "own" if "AGL_ROLLOUT_ID" in shown else shown[:20])
    pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
'''
seen = pathlib.Path("seen.txt")
def reward(task, output, rollout):
    seen.write_text(output)
    return 1.0
agent = agl.CommandAgent([sys.executable, "-c", spy], reward=reward, env={"LAST": sys.argv[2]})
agl.Trainer(algorithm="baseline", tracer="dummy", trackers=[], strategy=sys.argv[1]).fit(agent, ["task"])
"""


@pytest.mark.parametrize(
    ("strategy", "path", "seen"),
    [
        ("cs", os.environ["PATH"], "own\n"),
        ("cs", "/there/is/no/unshare", "own\nhidden\nhidden\n"),
        ("shm", "/there/is/no/unshare", "own\nhidden\n"),
    ],
    ids=["namespaces", "cs", "shm"],
)
def test_a_command_cannot_read_the_environment_of_its_runner_and_trainer(
    tmp_path: Path, strategy: str, path: str, seen: str
) -> None:
    (tmp_path / "program.py").write_text(_SPYING_PROGRAM)
    # Root may read every process, so the program runs without these capabilities: SYS_PTRACE, SYS_ADMIN and PERFMON.
    drop = (
        "import ctypes, os, sys; drop = ctypes.CDLL(None).prctl\n"
        "for capability in (19, 21, 38): drop(24, capability, 0, 0, 0)\n"
        "os.execv(sys.executable, sys.argv[1:])"
    )
    command = [sys.executable, "program.py", strategy, str(os.getpid())]
    done = subprocess.run(
        [sys.executable, "-c", drop, *command],
        cwd=tmp_path,
        env={**os.environ, "PROVIDER_KEY": "hunter2", "PATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen.txt").read_text() == seen


async def test_keys_in_the_output_of_a_command_are_redacted(store: agl.LightningStore) -> None:
    code = "import os, sys; print(os.environ['OPENAI_API_KEY']); sys.exit('bad key ' + os.environ['OPENAI_API_KEY'])"
    llm = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m", api_key="secret-of-this-attempt")
    rollout, spans = await run(store, agl.CommandAgent(python(code)), resources={"llm": llm})
    assert printed(spans) == "***\n"
    assert rollout.attempt.error is not None
    assert rollout.attempt.error.message.endswith("bad key ***")
    assert all("secret-of-this" not in span.model_dump_json() for span in spans)


async def test_prompts_and_other_resources_reach_a_command_by_environment_and_file(store: agl.LightningStore) -> None:
    code = """
        import json, os
        with open(os.environ["AGL_RESOURCES_FILE"]) as file:
            resources = json.load(file)
        long = len(resources["long"]["template"])
        print(os.environ["AGL_PROMPT_SYSTEM_STYLE"], long, "AGL_PROMPT_LONG" in os.environ)
    """
    agent = agl.CommandAgent(python(code))
    _, first = await run(store, agent, resources={"system.style": "Be brief.", "long": "x" * 200_000})
    _, second = await run(store, agent, resources={"system.style": "Be kind.", "long": "x"})
    _, third = await run(store, agent, resources={"system.style": "Say {{}}.", "long": "Say {{}}, {name}."})
    assert [printed(each) for each in (first, second, third)] == [
        "Be brief. 200000 False\n", "Be kind. 1 True\n", "Say {}. 17 True\n"
    ]  # fmt: skip


async def test_the_trace_continues_in_the_command(store: agl.LightningStore) -> None:
    _, spans = await run(store, agl.CommandAgent(python("import os; print(os.environ['TRACEPARENT'])")))
    span = command_span(spans)
    assert printed(spans).startswith(f"00-{span.trace_id}-{span.span_id}-")


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import sys; print('one', file=sys.stderr); sys.exit('no such tool')", "exited with code 1"),
        ("import os, sys; sys.stderr.write('no such tool'); sys.stderr.flush(); os.abort()", "was ended by SIGABRT"),
    ],
)
async def test_a_failing_command_fails_its_attempt_with_the_end_of_its_stderr(
    store: agl.LightningStore, code: str, how: str
) -> None:
    rollout, spans = await run(store, agl.CommandAgent(python(code), reward="stdout", name="solver"))
    assert (rollout.status, rollout.attempt.status) == ("failed", "failed")
    error = rollout.attempt.error
    assert error is not None
    assert error.type == "RolloutError"
    assert f"the command 'solver' {how}; its stderr ends with:" in error.message
    assert error.message.endswith("no such tool")
    assert command_span(spans).status.status_code == "ERROR"


async def test_a_command_that_does_not_exist_is_named(store: agl.LightningStore, tmp_path: Path) -> None:
    rollout, _ = await run(store, agl.CommandAgent(["no-such-program"]))
    assert rollout.attempt.error is not None
    assert "'no-such-program' cannot be started" in rollout.attempt.error.message
    rollout, _ = await run(store, agl.CommandAgent(python(""), cwd=tmp_path / "missing"))
    assert rollout.attempt.error is not None
    assert str(tmp_path / "missing") in rollout.attempt.error.message


async def test_the_error_for_a_task_too_long_for_an_argument_suggests_stdin(store: agl.LightningStore) -> None:
    rollout, _ = await run(store, agl.CommandAgent(python("", "{task}")), "x" * 1_000_000)
    assert rollout.attempt.error is not None
    assert "task_via='stdin'" in rollout.attempt.error.message
    rollout, spans = await run(store, agl.CommandAgent(python("print(len(input()))")), "x" * 1_000_000)
    assert printed(spans) == "1000000\n"


# A shell script, because a shell sets its trap long before the timeout, however busy the machine is.
STUBBORN = """
    trap 'echo told to end' TERM
    (trap '' TERM; exec sleep 60) &
    echo > "$1"
    while :; do sleep 0.05; done
"""


async def test_a_timeout_kills_the_whole_process_group_and_keeps_its_output(
    store: agl.LightningStore, tmp_path: Path
) -> None:
    agent = agl.CommandAgent(shell(STUBBORN, str(tmp_path / "started")), kill_after_s=0.3)
    rollout, spans = await run(store, agent, timeout_s=1.5)
    assert rollout.attempt.status == "timeout"
    assert printed(spans) == "told to end\n"
    assert (tmp_path / "started").exists()
    assert await are_gone(rollout.rollout_id)


async def test_cancelling_a_rollout_kills_the_whole_process_group(store: agl.LightningStore, tmp_path: Path) -> None:
    path = tmp_path / "started"
    agent = agl.CommandAgent(shell(STUBBORN, str(path)), kill_after_s=0.1)
    rollout = await store.enqueue_rollout("task")
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.OtelTracer(), max_rollouts=1)
    with runner.run_context(agent=agl.wrap(agent), store=store):
        running = asyncio.create_task(runner.iter())
        await until(path.exists)
        assert len(processes_of(rollout.rollout_id)) >= 2
        await store.cancel_rollout(rollout.rollout_id)
        await running
    assert await are_gone(rollout.rollout_id)


async def test_a_second_cancellation_leaves_no_process_running_and_no_pipe_open(tmp_path: Path) -> None:
    path = tmp_path / "started"
    agent = agl.CommandAgent(shell(STUBBORN, str(path)), kill_after_s=100_000)
    open_files = count_open_files()
    rollout = agl.Rollout(rollout_id=f"ro-{uuid.uuid4().hex}", input="", start_time=0.0)
    work = asyncio.create_task(agent.rollout_async("", {}, rollout))
    await until(path.exists)
    work.cancel()
    await asyncio.sleep(0.2)
    assert not work.done(), "the agent waits for the command to end by itself"
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert await are_gone(rollout.rollout_id)
    assert count_open_files() <= open_files


async def test_a_command_that_is_cancelled_at_its_start_can_print_while_it_cleans_up(tmp_path: Path) -> None:
    path = tmp_path / "started"

    class CancelsAtTheStart(Tail):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            while not path.exists():
                time.sleep(0.01)
            work.cancel()

    code = """
        trap 'echo cleaning; sleep 0.1; echo cleaned up; exit 0' TERM
        echo > "$1"
        while :; do sleep 0.05; done
    """
    stdout = CancelsAtTheStart(1000)
    command = run_group(
        shell(code, str(path)),
        env=os.environ,
        cwd=None,
        stdin=Path(os.devnull),
        stdout=stdout,
        stderr=Tail(1000),
        kill_after_s=LIMIT_S,
    )
    work = asyncio.create_task(command)
    await asyncio.gather(work, return_exceptions=True)
    assert stdout.text == "cleaning\ncleaned up\n"


async def test_a_command_that_ends_on_sigterm_is_not_killed(store: agl.LightningStore) -> None:
    code = """
        trap 'echo cleaned up; exit 0' TERM
        while :; do sleep 0.05; done
    """
    _, spans = await run(store, agl.CommandAgent(shell(code), kill_after_s=100_000), timeout_s=1.5)
    assert printed(spans) == "cleaned up\n"


async def test_processes_left_behind_are_killed_without_delay(store: agl.LightningStore) -> None:
    code = """
        import subprocess, sys
        for in_session in (False, True):  # both hold our stdout open
            command = [sys.executable, "-c", "import time; time.sleep(100_000)"]
            subprocess.Popen(command, start_new_session=in_session)
    """
    rollout, _ = await run(store, agl.CommandAgent(python(code)), timeout_s=LIMIT_S)
    assert rollout.status == "succeeded"
    assert await are_gone(rollout.rollout_id)


async def test_the_end_of_long_output_is_kept(store: agl.LightningStore) -> None:
    code = "import sys\nfor i in range(200_000): print(i)\nsys.stderr.buffer.write(b'x' * 3000 + b'\\xff')"
    _, spans = await run(store, agl.CommandAgent(python(code), max_output_bytes=1000))
    span = command_span(spans)
    assert printed(spans).endswith("\n199998\n199999\n")
    assert len(printed(spans)) == 1000
    assert span.attributes["agentlightning.command.stderr"] == "x" * 999 + "\ufffd"
    total = sum(len(f"{i}\n") for i in range(200_000)) + 3001
    assert span.attributes["agentlightning.command.dropped_bytes"] == total - 2000


async def test_a_command_must_name_its_model_if_there_are_several(store: agl.LightningStore) -> None:
    models = {name: agl.LLM(endpoint=f"http://{name}/v1", model=name) for name in ("small", "large")}
    code = "import os; print(os.environ['OPENAI_BASE_URL'])"
    rollout, _ = await run(store, agl.CommandAgent(python(code)), resources=models)
    assert rollout.attempt.error is not None
    assert "2 models match: small, large" in rollout.attempt.error.message
    _, spans = await run(store, agl.CommandAgent(python(code), llm="large"))
    assert printed(spans) == "http://large/v1\n"
    rollout, _ = await run(store, agl.CommandAgent(python(code), llm="huge"))
    assert rollout.attempt.error is not None
    assert "no such model; models among the resources: small, large" in rollout.attempt.error.message


SEND = """
    import json, os, urllib.parse, urllib.request
    _, trace_id, parent_id, _ = os.environ["TRACEPARENT"].split("-")
    def send(url, body, authorization):
        headers = {"Authorization": authorization, "Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).close()
"""
SEND_SPAN = (
    SEND
    + """
    span = {
        "rollout_id": os.environ["AGL_ROLLOUT_ID"], "attempt_id": os.environ["AGL_ATTEMPT_ID"],
        "trace_id": trace_id, "span_id": "00000000000000aa", "parent_id": parent_id, "name": "agentlightning.reward",
        "attributes": {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 0.75},
    }
    send(os.environ["AGL_STORE_URL"] + "/v1/agl/spans", span, "Bearer " + os.environ["AGL_TOKEN"])
    print(os.environ["AGL_TOKEN"])
"""
)
SEND_OTLP = (
    SEND
    + """
    pairs = [pair.split("=") for pair in os.environ["OTEL_RESOURCE_ATTRIBUTES"].split(",")]
    resource = {"attributes": [{"key": key, "value": {"stringValue": value}} for key, value in pairs]}
    reward = {"key": "agentlightning.reward.0.value", "value": {"doubleValue": 0.75}}
    span = {"traceId": trace_id, "spanId": "00000000000000aa", "parentSpanId": parent_id, "attributes": [reward],
            "name": "agentlightning.reward", "startTimeUnixNano": "1", "endTimeUnixNano": "2"}
    header = urllib.parse.unquote(os.environ["OTEL_EXPORTER_OTLP_TRACES_HEADERS"].removeprefix("authorization="))
    body = {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [span]}]}]}
    send(os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"], body, header)
    print(os.environ["AGL_TOKEN"])
"""
)


@pytest.mark.parametrize("code", [SEND_SPAN, SEND_OTLP], ids=["as a span", "by OTLP"])
async def test_a_command_sends_its_reward_to_the_store_with_the_token_of_its_attempt(code: str) -> None:
    token = "the-whole-stores-token"
    backing = agl.InMemoryLightningStore()
    async with LightningStoreServer(backing, port=0, token=token) as server:
        store = LightningStoreClient(server.endpoint, token=token)
        try:
            rollout, spans = await run(store, agl.CommandAgent(python(code)))
        finally:
            await store.close()
    await backing.close()
    assert rollout.attempt.error is None
    assert agl.find_final_reward(spans) == 0.75
    (reward,) = agl.find_reward_spans(spans)
    assert reward.parent_id == command_span(spans).span_id
    assert printed(spans) == "***\n", "the attempt's token is redacted; the store's token would be shown"


def test_a_command_agent_trains_through_the_trainer(tmp_path: Path) -> None:
    seen: list[float] = []

    class Look(agl.Hook):
        async def on_rollout_end(self, **arguments: Any) -> None:
            seen.append(agl.find_final_reward(arguments["spans"]) or 0.0)

    trainer = agl.Trainer(algorithm="baseline", strategy="shm", trackers=[], hooks=Look())
    run = trainer.fit(agl.CommandAgent(["echo", "0.5"], reward="stdout"), ["a", "b"])
    assert run.status == "succeeded"
    assert seen == [0.5, 0.5]


def test_a_command_agent_travels_to_runner_processes() -> None:
    agent = pickle.loads(pickle.dumps(agl.CommandAgent(["echo", "{task}"], reward="stdout")))
    assert repr(agent) == "<CommandAgent echo>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"argv": "python agent.py"}, "give a list of strings"),
        ({"argv": []}, "give a list of strings"),
        ({"argv": ["a", Path("b")]}, "give a list of strings"),
        ({"argv": ["a"], "reward": "stdin"}, "stdout, exit_code, file"),
        ({"argv": ["a"], "task_via": "files"}, "argument, stdin, env, file"),
        ({"argv": ["a", "{task}"], "task_via": "stdin"}, "leave one of them out"),
        ({"argv": ["a"], "max_output_bytes": 0}, "too small"),
    ],
)
def test_invalid_arguments_of_a_command_are_refused_immediately(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(agl.ConfigError, match=message):
        agl.CommandAgent(**arguments)


def test_signals_without_a_name_are_numbered() -> None:
    from agentlightning_plugins.agents.command.agent import _name_signal

    assert _name_signal(signal.SIGKILL) == "SIGKILL"
    assert _name_signal(40) == "signal 40"
