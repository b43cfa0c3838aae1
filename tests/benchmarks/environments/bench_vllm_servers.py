"""Policy server and vLLM on one CPU: ``python tests/benchmarks/environments/bench_vllm_servers.py``.

Runs in the environment `vllm`. Sends the same requests to both over HTTP (float32, one thread): 64 concurrent requests
with replies of 64 tokens to prompts of 32, and 32 concurrent requests with replies of 32 tokens, 8 for each of 4
prompts of 1,024 tokens. Rounds are interleaved; medians of tokens per second are printed, with the CPU seconds of the
server's processes for 1,000 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.benchmarks.bench_sampling import VOCABULARY, save_model
from tests.port import reserve_port
from tests.vllm.vllm_process import OPTIONS, wait_until_ready

LOADS = {"64 short prompts": (64, 32, 1, 64), "4 long prompts, 8 times each": (4, 1024, 8, 32)}
"""Number of different prompts, tokens of a prompt, concurrent requests for each, and tokens of a reply, by name."""


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **OPTIONS, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    parent = psutil.Process(process.pid)
    times = [each.cpu_times() for each in (parent, *parent.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


async def measure(url: str, load: tuple[int, int, int, int], seed: int) -> float:
    """Returns the seconds that the server takes for the load."""
    count, length, times, reply = load
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for _ in range(count)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:

        async def ask(prompt: list[int]) -> None:
            body = {"model": "policy", "prompt": prompt, "max_tokens": reply, "logprobs": 0, "return_token_ids": True}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                answer = await response.json()
                assert len(answer["choices"][0]["token_ids"]) == reply, answer

        started = time.perf_counter()
        await asyncio.gather(*(ask(prompt) for prompt in prompts for _ in range(times)))
        return time.perf_counter() - started


def main(rounds: int, hidden: int, layers: int, agl: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        size = save_model(model, hidden, layers)
        ports = [reserve_port(), reserve_port()]
        own = [agl, "serve", str(model), "--port", str(ports[0])]
        vllm = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32"),
            *("--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(ports[1]), "--enforce-eager"),
            *("--max-model-len", "2048", "--max-num-seqs", "64", "--logprobs-mode", "processed_logprobs"),
        ]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for name, command, port in (("own", own, ports[0]), ("vllm", vllm, ports[1])):
                processes.append(start(command, Path(folder, f"{name}.log")))
                path = "/v1/models" if name == "own" else "/health"
                wait_until_ready(f"http://127.0.0.1:{port}{path}", processes[-1], Path(folder, f"{name}.log"))
            print(f"model of {size / 1e6:.1f}M weights, float32, 1 thread")
            for name, load in LOADS.items():
                tokens = load[0] * load[2] * load[3]
                speeds: list[list[float]] = [[], []]
                costs: list[list[float]] = [[], []]
                for number in range(rounds + 1):  # the first round warms up
                    for place, (process, port) in enumerate(zip(processes, ports, strict=True)):
                        before = cpu_seconds(process)
                        seconds = asyncio.run(measure(f"http://127.0.0.1:{port}", load, number))
                        speeds[place].append(tokens / seconds)
                        costs[place].append((cpu_seconds(process) - before) / tokens * 1000)
                (ours, theirs), (our_cost, their_cost) = (
                    [statistics.median(values[1:]) for values in each] for each in (speeds, costs)
                )
                print(f"{name:<30} ours {ours:6.0f} tokens/s, {our_cost:.2f} s of CPU per 1,000 tokens")
                print(f"{'':<30} vLLM {theirs:6.0f} tokens/s, {their_cost:.2f} s; ratio {ours / theirs:.2f}")
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    beside = str(Path(sys.executable).with_name("agl"))
    parser.add_argument("--agl", default=beside, help="the command of another environment, with a newer transformers")
    options = parser.parse_args()
    main(options.rounds, options.hidden, options.layers, options.agl)
