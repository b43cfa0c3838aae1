"""A store, a runner and an algorithm, each started in a separate terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.port import reserve_port
from tests.process import wait_for
from tests.source import run_python

RUNNER = """
import asyncio

from agentlightning import LitAgentRunner, LightningStoreClient, OtelTracer
from agentlightning.types import PromptTemplate


def simple_agent(task: str, prompt_template: PromptTemplate) -> float:
    return len(prompt_template.format(x=task)) / 10


async def run() -> None:
    store = LightningStoreClient("http://127.0.0.1:PORT")
    runner = LitAgentRunner[str](tracer=OtelTracer())
    with runner.run_context(agent=simple_agent, store=store):
        await runner.iter()


asyncio.run(run())
"""

ALGORITHM = """
import asyncio

from agentlightning import LightningStoreClient, find_final_reward


async def find_best_prompt(store: LightningStoreClient) -> None:
    best = {}
    for prompt in ["plain text {x}", "{x}", "a much longer text {x}"]:
        update = await store.add_resources({"prompt_template": prompt})
        rollout = await store.enqueue_rollout(input="ab", mode="train", resources_id=update.resources_id)
        (ended,) = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=300)
        spans = await store.query_spans(rollout.rollout_id)
        best[prompt] = (ended.status, find_final_reward(spans))
    print(best)
    await store.close()


asyncio.run(find_best_prompt(LightningStoreClient("http://127.0.0.1:PORT")))
"""


@contextlib.contextmanager
def terminal(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program in a terminal, whose contents are copied to a file, until the block ends."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, *arguments], stdout=theirs, stderr=theirs, env=dict(os.environ))
    os.close(theirs)

    def copy() -> None:
        with log.open("wb", buffering=0) as output, contextlib.suppress(OSError):  # the process ended
            while data := os.read(ours, 65536):
                output.write(data)

    copying = threading.Thread(target=copy)
    copying.start()
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        copying.join()
        os.close(ours)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--log-level", "warning")], ids=["default", "silent"])
def test_store_runner_and_algorithm_run_in_three_terminals(tmp_path: Path, options: tuple[str, ...]) -> None:
    port = str(reserve_port())
    for name, program in (("runner.py", RUNNER), ("algorithm.py", ALGORITHM)):
        (tmp_path / name).write_text(textwrap.dedent(program).replace("PORT", port))
    log = tmp_path / "store.log"
    serve = ("-m", "agentlightning", "store", "--port", port, "--backend", "memory://", *options)
    with terminal(log, *serve) as store:
        wait_for(lambda: log.exists() and b"http://" in log.read_bytes(), store, log)
        with terminal(tmp_path / "runner.log", str(tmp_path / "runner.py")):
            output = run_python(str(tmp_path / "algorithm.py"))
        if not options:
            wait_for(lambda: b"reward 2.1" in log.read_bytes(), store, log)
    rewards = {"plain text {x}": ("succeeded", 1.3), "{x}": ("succeeded", 0.2)}
    assert output.strip() == str({**rewards, "a much longer text {x}": ("succeeded", 2.1)})
    said = log.read_text()
    steps = re.findall(r"INFO (?:ro-|resources rs-)[0-9a-f]+ (.*?)\s*$", said, re.MULTILINE)
    if options:
        assert steps == []
        return
    steps = [re.sub(r"claimed by .+", "claimed by a worker", step) for step in steps]
    one = ["published, version 1", "queued", "claimed by a worker"]
    ends = [f"succeeded with 2 spans, reward {reward}" for reward in ("1.3", "0.2", "2.1")]
    assert steps == [step for end in ends for step in (*one, end)]
