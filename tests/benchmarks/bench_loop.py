"""CPU of the whole training loop: ``python tests/benchmarks/bench_loop.py [--steps 6] [--store memory://]``.

Trains the demo's agent by ``grpo`` without evaluations and prints the CPU of a model call by process and by part: the
trainer's threads by name, and for runner and policy server the main thread and the sum of the other threads (agents;
the model). The first step is excluded, and with it starting and importing.

The baseline is the sum of three bare parts, measured in the same run on the same model: a reused client of ``openai``
that gets answers of the same form from a bare server, the sampler without HTTP for 64 concurrent requests, and an
update in plain PyTorch. CPU time depends less on other work on the machine. Linux only; takes about a minute.

Targets (issue 16): 6 ms of CPU for a call.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import psutil
import torch

import agentlightning as agl
from agentlightning.event import Event, StepFinished
from agentlightning_algorithms.shared.policy.draw import SamplingParams
from agentlightning_algorithms.shared.policy.model import Policy, load_policy
from agentlightning_algorithms.shared.policy.sampler import Sampler
from agentlightning_plugins.demo.agent import CALCULATOR, SYSTEM_PROMPT, calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.demo.training import CHECKPOINT, GRPO_SETTINGS

BARE_CALLS = 300
PROMPT_TOKENS, REPLY_TOKENS = 24, 4
"""Approximate numbers of tokens in the demo's calls."""
TOOL_CALL = {"name": "calculator", "arguments": '{"expression": "2 * 13"}'}
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "policy",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "function", "function": TOOL_CALL}],
            },
        }
    ],
    "usage": {"prompt_tokens": 24, "completion_tokens": 4, "total_tokens": 28},
}
BARE_SERVER = """
import asyncio, sys

answer = sys.stdin.buffer.read()
head = b"HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n"
answer = head % len(answer) + answer

async def serve(reader, writer):
    while head := await reader.readuntil(b"\\r\\n\\r\\n"):
        length = next(l for l in head.lower().split(b"\\r\\n") if l.startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
        writer.write(answer)

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--concurrency", type=int, help="concurrent rollouts; default: the trainer's")
    parser.add_argument("--store", help="URL of the store, such as memory://; default: SQLite in the run's directory")
    arguments = parser.parse_args()
    meter = train(arguments.steps, arguments.concurrency, arguments.store)
    calls, tokens = meter.calls, meter.tokens
    print(f"{calls:.0f} model calls of {tokens / calls:.1f} tokens, {meter.wall_s:.1f} s; CPU of a call in ms:")
    spent = {part: 1000 * seconds / calls for part, seconds in meter.spent.items()}
    for process in ("runner", "policy server", "trainer"):
        parts = {part: ms for (owner, part), ms in spent.items() if owner == process and ms >= 0.01}
        print(f"{process:>16} {sum(parts.values()):6.2f}")
        for part, ms in sorted(parts.items(), key=lambda item: -item[1]):
            print(f"{ms:>30.2f}  {part}")
    policy = load_policy(str(CHECKPOINT))
    gc.collect()
    gc.freeze()  # otherwise, collecting the training's garbage would count as time of the bare client
    bare = {
        "openai client": 1000 * time_client(),
        "sampler": 1000 * time_sampler(policy) * tokens / calls,
        "update": 1000 * time_update(policy, round(calls / (arguments.steps - 1))),
    }
    total, ideal = sum(spent.values()), sum(bare.values())
    print(f"{'loop':>16} {total:6.2f}  (target 6)  {tokens / calls / total * 1000:.0f} tokens/s of CPU")
    listed = ", ".join(f"{part} {ms:.2f}" for part, ms in bare.items())
    print(f"{'bare parts':>16} {ideal:6.2f}  ({listed})  {tokens / calls / ideal * 1000:.0f} tokens/s of CPU")
    print(f"{'ratio':>16} {total / ideal:6.2f}")


class CpuMeter:
    """A tracker that measures the CPU of the run's threads and processes between its first and its last step."""

    def __init__(self) -> None:
        self.calls = self.tokens = self.wall_s = 0.0
        self.spent: Counter[tuple[str, str]] = Counter()
        self._first: tuple[float, Counter[tuple[str, str]]] | None = None

    def start(self, run: agl.Run, directory: Path | None) -> None:
        pass

    def on_event(self, event: Event) -> None:
        if not isinstance(event, StepFinished) or "calls" not in event.values:
            return
        now, spent = time.monotonic(), read_cpu()
        if self._first is None:
            self._first = now, spent
            return
        self.calls += float(str(event.values["calls"]))
        self.tokens += float(str(event.values["sampled_tokens"]))
        self.wall_s = now - self._first[0]
        self.spent = spent - self._first[1]

    def close(self) -> None:
        pass


def read_cpu() -> Counter[tuple[str, str]]:
    """Returns the CPU seconds so far of this process and of its children, by process and part."""
    spent: Counter[tuple[str, str]] = Counter()
    names = {thread.native_id: re.sub(r"[_-]?\d+$", "", thread.name) for thread in threading.enumerate()}
    own = psutil.Process()
    left: Any = sum(own.cpu_times()[:2])
    for thread in own.threads():
        spent["trainer", names.get(thread.id, "native threads")] += thread.user_time + thread.system_time
        left -= thread.user_time + thread.system_time
    spent["trainer", "threads that have ended"] += max(left, 0)
    for child in own.children(recursive=True):
        command = " ".join(child.cmdline())
        process = "policy server" if "policy.server" in command else "runner" if "job_process" in command else "other"
        main: Any = next((t.user_time + t.system_time for t in child.threads() if t.id == child.pid), 0.0)
        spent[process, "event loop"] += main
        spent[process, "model" if process == "policy server" else "agents and spans"] += (
            sum(child.cpu_times()[:2]) - main
        )
    return spent


def train(steps: int, concurrency: int | None, store: str | None) -> CpuMeter:
    meter = CpuMeter()
    settings = {**GRPO_SETTINGS, "model": str(CHECKPOINT), "steps": steps, "eval_every": 0}
    with tempfile.TemporaryDirectory() as folder:
        agl.Trainer(
            algorithm=settings,
            store=None if store is None else agl.create_store(store),
            run_dir=Path(folder) / "run",
            trackers=[meter],
            max_concurrency=concurrency,
        ).fit(calculator_agent, make_problems("train", 512))
    return meter


def time_client() -> float:
    """Returns the CPU seconds of a call with a reused client."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "2 boxes of 13?"}]
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    server = subprocess.Popen(
        [sys.executable, "-c", BARE_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        server.stdin.write(json.dumps(ANSWER).encode())
        server.stdin.close()
        with openai.OpenAI(base_url=f"http://127.0.0.1:{int(server.stdout.readline())}/v1", api_key="any") as client:
            for warm_up in (True, False):
                started = time.process_time()
                for _ in range(20 if warm_up else BARE_CALLS):
                    client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
            return (time.process_time() - started) / BARE_CALLS
    finally:
        server.kill()
        server.wait()


def time_sampler(policy: Policy) -> float:
    """Returns the CPU seconds of a token for 64 concurrent requests."""
    torch.set_num_threads(1)
    sampler = Sampler(policy, prefix_cache_bytes=0, seed=0)
    size = int(policy.model.config.vocab_size)
    tokens = 0
    try:
        for warm_up in (True, False):
            started = time.process_time()
            for number in range(1 if warm_up else 8):
                prompts = [[(7 * number + 13 * i + 5 * j) % size for j in range(PROMPT_TOKENS)] for i in range(64)]
                params = SamplingParams(max_tokens=REPLY_TOKENS)
                answers = [sampler.submit(prompt, params) for prompt in prompts]
                tokens += sum(len(answer.result().tokens) for answer in answers) * (not warm_up)
        return (time.process_time() - started) / tokens
    finally:
        sampler.close()


def time_update(policy: Policy, rows: int) -> float:
    """Returns the CPU seconds per row of an update in plain PyTorch, with as many minibatches as in the demo."""
    torch.manual_seed(0)
    model: Any = policy.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.randint(0, int(model.config.vocab_size), (rows, PROMPT_TOKENS + REPLY_TOKENS))
    for warm_up in (True, False):
        started = time.process_time()
        for batch in tokens.chunk(8)[: 1 if warm_up else 8]:
            logprobs = model(batch).logits[:, PROMPT_TOKENS - 1 : -1].log_softmax(-1)
            chosen = logprobs.gather(-1, batch[:, PROMPT_TOKENS:, None]).squeeze(-1)
            (-(chosen - chosen.detach()).exp().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return (time.process_time() - started) / rows


if __name__ == "__main__":
    main()
