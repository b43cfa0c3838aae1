"""No exit below an agent, and no move of the clock, ends another attempt or a run; a user's Ctrl-C still works."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import opentelemetry.sdk.trace
import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.plugin.registry import get_manager
from agentlightning.testing.agent import Lab, ask
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.integrations import framework_agent
from tests.integrations.framework_agent import AGENTS
from tests.waiting import LIMIT_S, until

pytestmark = [
    pytest.mark.environment("main"),  # needs all frameworks
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Makes asyncio log the errors that no task awaited now, and not in the test of another file."""
    yield
    gc.collect()


class Unusual(BaseException):
    """An exception that ``except Exception`` does not catch."""


ERRORS: Final = {error.__name__: error for error in (SystemExit, KeyboardInterrupt, GeneratorExit, Unusual)}
SIGNALS: Final = dict(
    zip(ERRORS.values(), (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGHUP), strict=True)
)
PLACES: Final = (
    *("agent", "child", "group", "gather", "callback", "timer callback", "executor", "default executor"),
    *("thread", "timer", "finaliser", "generator", "signal handler", "stray task", "SIGINT"),
)


async def exiting(task: dict[str, str]) -> float:
    """Raises an error at a place, or works beside agents that do."""
    if task["place"] == "none":
        await asyncio.sleep(0.2)
        return 1.0
    with contextlib.ExitStack() as stack:
        await getattr(Exits(), task["place"].replace(" ", "_"))(ERRORS[task["error"]], stack)
    await asyncio.sleep(LIMIT_S)  # what the agent waits for never comes
    return 1.0


class Exits:
    """Raises an error at the place that a method is named after."""

    def fail(self, error: type[BaseException]) -> None:
        raise error("below")

    async def fail_later(self, error: type[BaseException]) -> None:
        await asyncio.sleep(0)
        raise error("below")

    async def agent(self, error: type[BaseException], stack: contextlib.ExitStack) -> None:
        self.fail(error)

    async def child(self, error: type[BaseException], stack: contextlib.ExitStack) -> None:
        await asyncio.create_task(self.fail_later(error))

    async def group(self, error: type[BaseException], stack: contextlib.ExitStack) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.fail_later(error))
            group.create_task(asyncio.sleep(LIMIT_S))

    async def gather(self, error: type[BaseException], stack: contextlib.ExitStack) -> None:
        await asyncio.gather(asyncio.sleep(LIMIT_S), self.fail_later(error))

    async def callback(self, error: type[BaseException], stack: contextlib.ExitStack) -> None:
        asyncio.get_running_loop().call_soon(self.fail, error)

    async def timer_callback(self, error: type[BaseException], stack: contextlib.ExitStack) -> None:
        asyncio.get_running_loop().call_later(0.01, self.fail, error)

    async def executor(self, error: type[BaseException], stack: contextlib.ExitStack) -> None:
        from concurrent.futures import ThreadPoolExecutor

        await asyncio.get_running_loop().run_in_executor(stack.enter_context(ThreadPoolExecutor(1)), self.fail, error)

    async def default_executor(self, error: type[BaseException], stack: contextlib.ExitStack) -> None:
        await asyncio.to_thread(self.fail, error)

    async def thread(self, error: type[BaseException], stack: contextlib.ExitStack) -> None:
        threading.Thread(target=self.fail, args=[error]).start()

    async def timer(self, error: type[BaseException], stack: contextlib.ExitStack) -> None:
        threading.Timer(0.01, self.fail, [error]).start()

    async def finaliser(self, error: type[BaseException], stack: contextlib.ExitStack) -> None:
        class Part:
            def __del__(part) -> None:  # the agent is self
                self.fail(error)

        Part()

    async def generator(self, error: type[BaseException], stack: contextlib.ExitStack) -> None:
        async def items() -> Any:
            try:
                yield 1
                yield 2
            finally:
                raise Unusual if error is GeneratorExit else error("below")  # GeneratorExit is its usual end

        async for _ in items():
            break

    async def signal_handler(self, error: type[BaseException], stack: contextlib.ExitStack) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.fail(error)
        number = SIGNALS[error]  # each its own, because handlers belong to the process
        stack.callback(signal.signal, number, signal.signal(number, lambda *_: self.fail(error)))
        await asyncio.to_thread(os.kill, os.getpid(), number)  # the main thread may run any attempt then
        await asyncio.sleep(LIMIT_S)

    async def stray_task(self, error: type[BaseException], stack: contextlib.ExitStack) -> None:
        is_shown_by_asyncio = issubclass(error, (SystemExit, KeyboardInterrupt))
        self.stray = asyncio.create_task(self.fail_later(error if is_shown_by_asyncio else SystemExit))

    async def SIGINT(self, error: type[BaseException], stack: contextlib.ExitStack) -> None:  # its name
        if threading.current_thread() is threading.main_thread():  # of a runner process, which no user interrupts
            os.kill(os.getpid(), signal.SIGINT)
        self.fail(error)


@pytest.mark.parametrize("strategy", ["shm", "cs", pytest.param("ray", marks=pytest.mark.soak)])
def test_what_exits_below_an_agent_fails_its_attempt_and_no_other_attempt_and_no_run(strategy: str) -> None:
    cells = [{"place": place, "error": error} for place in PLACES for error in ERRORS]
    tasks = [task for cell in cells for task in (cell, {"place": "none", "error": ""})]
    store = agl.create_store("memory://")
    trainer = agl.Trainer(algorithm="baseline", store=store, strategy=strategy, tracer="dummy", trackers=[])
    assert trainer.fit(exiting, tasks).status == "succeeded"
    rollouts = asyncio.run(store.query_rollouts()).items
    assert len(rollouts) == len(tasks)
    for rollout in rollouts:
        assert isinstance(rollout, agl.AttemptedRollout)
        task, attempt = dict(rollout.input), rollout.attempt
        assert attempt.sequence_id == 1, f"no runner died: {task}"
        if task["place"] == "none":
            assert (rollout.status, attempt.reward) == ("succeeded", 1.0), attempt.error
            continue
        assert rollout.status == "failed", task
        assert attempt.error is not None
        expected = {task["error"]}
        if task["place"] == "group":
            expected.add("BaseExceptionGroup")
        if (task["place"], task["error"]) == ("generator", "GeneratorExit"):
            expected = {"Unusual"}
        if task["place"] == "stray task" and task["error"] not in ("SystemExit", "KeyboardInterrupt"):
            expected = {"SystemExit"}
        assert attempt.error.type in expected, (task, attempt.error)


async def leave(a: int, b: int) -> int:
    """Adds two numbers."""
    await asyncio.sleep(0)
    sys.exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["agent-framework", "autogen", "langchain", "openai-agents"])
async def test_an_async_tool_that_exits_fails_the_attempt_of_its_framework_only(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave.__name__ = "add"
    with monkeypatch.context() as patch:
        patch.setattr(framework_agent, "add", leave)
        leaving = agl.wrap(AGENTS[framework](), reward=lambda task, output, rollout: 1.0)
    staying = agl.wrap(AGENTS[framework](), reward=lambda task, output, rollout: 1.0)

    class Either(agl.LitAgent[Any]):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
            agent = leaving if task in tasks[::2] else staying
            return await agent.rollout_async(task, resources, rollout)

    tasks = [ask(number, 3) for number in range(4)]
    async with Lab(Either(), reward=lambda task, output, rollout: 1.0) as lab:
        rollouts = await asyncio.wait_for(lab.run(*tasks), LIMIT_S)
    assert [rollout.status for rollout in rollouts] == ["failed", "succeeded"] * 2, [
        rollout.attempt.error for rollout in rollouts
    ]
    for rollout in rollouts[::2]:
        assert rollout.attempt.error is not None
        assert rollout.attempt.error.type == "SystemExit"


_INTERRUPTED: Final = """
import sys, time
import agentlightning as agl

async def agent(task):
    print("blocked", flush=True)
    while True:
        time.sleep(0.01)

strategy = {"name": sys.argv[1], "main_thread" if sys.argv[1] == "shm" else "main_process": "runner"}
agl.Trainer(algorithm="baseline", strategy=strategy, tracer="dummy", trackers=[]).fit(agent, range(3))
"""


@pytest.mark.parametrize("strategy", ["shm", "cs"])
async def test_the_second_ctrl_c_of_a_user_ends_a_run_whose_agent_blocks_the_main_thread(
    strategy: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(_INTERRUPTED)
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "program.py", strategy), cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        await until(lambda: b"blocked" in output.read_bytes(), LIMIT_S)
        while process.returncode is None:  # a user who presses it until the program ends
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 1)
    finally:
        if process.returncode is None:
            process.kill()
    assert output.read_bytes().rstrip().endswith(b"KeyboardInterrupt")


@pytest.mark.parametrize("shift_s", [3600.0, -3600.0])
@pytest.mark.parametrize("tracer", ["otel", "dummy"])
async def test_a_move_of_the_wall_clock_ends_no_attempt_and_no_span_before_its_start(
    tracer: str, shift_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clocks of stores have tests of their own, so this store checks no deadlines."""
    store = InMemoryLightningStore(lease_s=1e6, watchdog_interval_s=1e6)
    now, now_ns = time.time, time.time_ns

    async def agent(task: str, llm: agl.LLM) -> float:
        client = openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key)
        with agl.operation(name="work"):
            answer = asyncio.create_task(client.responses.with_raw_response.create(model=llm.model, input=task))
            await asyncio.wait_for(asked.wait(), LIMIT_S)
            monkeypatch.setattr(time, "time", lambda: now() + shift_s)
            monkeypatch.setattr(opentelemetry.sdk.trace, "time_ns", lambda: now_ns() + int(shift_s * 1e9))
            go_on.set()
            await answer
        await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
        await client.close()
        return 1.0

    asked, go_on = asyncio.Event(), asyncio.Event()

    def script(request: RecordedRequest) -> Answer:
        asked.set()
        return Answer(until=go_on)

    async with ScriptedOpenAI(script) as server:
        models = [{"model": "m", "endpoint": server.endpoint, "api_key": "any"}]
        proxy = agl.LLMProxy(model_list=models, store=store, budget={"calls": 2})
        await proxy.start()
        runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(get_manager().create("tracer", tracer))
        with runner.run_context(agent=agl.wrap(agent), store=store):
            rollout = await runner.step("task", {"llm": proxy.as_resource(model="m")})
        await proxy.stop()
    spans = (await store.query_spans(rollout.rollout_id)).items
    await store.close()
    assert rollout.status == "succeeded", rollout
    assert len(spans) >= 5
    for span in spans:
        assert span.start_time is not None
        assert span.end_time is not None
        assert 0 <= span.end_time - span.start_time <= LIMIT_S or (shift_s > 0 and not semconv.is_gateway_call(span))
