"""Speed of the policy server: ``python tests/benchmarks/bench_sampling.py [--rounds 3] [--hidden 256] [--layers 6]``.

1. Tokens per second of 64 concurrent requests with replies of 64 tokens, and of one request at a time, over HTTP.
2. The same 64 requests in this process, without HTTP: our running batch and transformers' continuous batching
   (paged attention, log-probabilities on), in tokens per second of CPU; on a GPU, of wall time.
3. Replies of 32 tokens to prompts of 1,024 tokens: groups of 8 for 4 prompts, and 32 prompts that differ in their last
   32 tokens; compared with ``generate`` of transformers on one batch of all prompts, in the same unit.
4. 16 concurrent conversations of 6 turns, each turn adding 64 tokens: seconds with and without the prefix cache, and
   the share of prompt tokens that were not computed again.

Rounds are interleaved and medians are printed. The model has random weights and no end token, so that every reply
has its full length. On a GPU: ``--device cuda:0 --dtype bfloat16 --hidden 1024 --layers 24``. ``--only prompts``
runs only part 3.

Targets (issues 8 and 16): 64 concurrent requests reach at least 5 times the tokens per second of one at a time; with
shared prompts, at least 3 times the tokens per second of ``generate``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from agentlightning_algorithms.grpo.transformers_backend import TransformersBackend
from agentlightning_algorithms.shared.policy.draw import SamplingParams
from agentlightning_algorithms.shared.policy.model import load_policy
from agentlightning_algorithms.shared.policy.sampler import Sampler
from agentlightning_algorithms.shared.policy_backend import PolicySetup

REPLY_TOKENS = 64
CONCURRENT = 64
VOCABULARY = 8192
TURNS, CONVERSATIONS, TURN_TOKENS = 6, 16, 64
SHARED_TOKENS, OWN_TOKENS, GROUPS, REPETITIONS, SHORT_REPLY = 1024, 32, 4, 8, 32


def save_model(directory: Path, hidden: int, layers: int) -> int:
    """Writes a model with random weights; returns their number."""
    torch.manual_seed(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters += [f"unused {i}" for i in range(len(letters), VOCABULARY)]  # no logit is left for the end token
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            max_position_embeddings=2048,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


async def complete(session: aiohttp.ClientSession, server: TransformersBackend, prompt: list[int], n: int) -> list[int]:
    body = {"prompt": prompt, "max_tokens": n, "return_token_ids": True}
    async with session.post(f"{server.endpoint}/completions", json=body) as response:
        answer: Any = await response.json()
        assert response.status == 200, answer
        ids: list[int] = answer["choices"][0]["token_ids"]
        assert len(ids) == n
        return ids


async def measure_tokens_per_s(
    session: aiohttp.ClientSession, server: TransformersBackend, at_once: int, count: int
) -> float:
    rng = random.Random(at_once)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(32)] for _ in range(count)]
    started = time.perf_counter()
    for begin in range(0, count, at_once):
        await asyncio.gather(*(complete(session, server, p, REPLY_TOKENS) for p in prompts[begin : begin + at_once]))
    return count * REPLY_TOKENS / (time.perf_counter() - started)


async def measure_conversations(
    session: aiohttp.ClientSession, server: TransformersBackend, seed: int
) -> tuple[float, float]:
    """Returns seconds, and the share of prompt tokens that were reused from the cache."""
    rng = random.Random(seed)
    before = await server.statistics()

    async def talk() -> None:
        prompt: list[int] = []
        for _ in range(TURNS):
            prompt += [rng.randrange(VOCABULARY) for _ in range(TURN_TOKENS)]
            prompt += await complete(session, server, prompt, 4)

    started = time.perf_counter()
    await asyncio.gather(*(talk() for _ in range(CONVERSATIONS)))
    seconds = time.perf_counter() - started
    after = await server.statistics()
    prompted = after["prompt_tokens"] - before["prompt_tokens"]
    return seconds, (after["reused_tokens"] - before["reused_tokens"]) / prompted


def compare_with_transformers(folder: str, rounds: int, device: str, dtype: str) -> tuple[float, float]:
    """Returns tokens per second of our running batch and of transformers' continuous batching."""
    torch.set_num_threads(1)
    clock = time.process_time if device == "cpu" else time.perf_counter
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(32)] for _ in range(CONCURRENT)]
    sampler = Sampler(load_policy(folder, dtype=dtype, device=device), max_batch_size=CONCURRENT, seed=0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device)
    generation = GenerationConfig(max_new_tokens=REPLY_TOKENS, do_sample=True, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(return_logprobs=True, num_blocks=512, max_batch_tokens=4096)

    def ours() -> list[int]:
        params = SamplingParams(max_tokens=REPLY_TOKENS)
        return [len(f.result().token_ids) for f in [sampler.submit(prompt, params) for prompt in prompts]]

    def theirs() -> list[int]:
        answers = model.generate_batch(
            inputs=prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False
        )
        return [len(answer.generated_tokens) for answer in answers.values()]

    speeds: list[list[float]] = [[], []]
    for _ in range(rounds + 1):  # the first round warms up
        for run, found in zip((ours, theirs), speeds, strict=True):
            started = clock()
            assert run() == [REPLY_TOKENS] * CONCURRENT
            found.append(CONCURRENT * REPLY_TOKENS / (clock() - started))
    sampler.close()
    return statistics.median(speeds[0][1:]), statistics.median(speeds[1][1:])


def compare_with_generate(folder: str, rounds: int, device: str, dtype: str) -> dict[str, tuple[float, float]]:
    """Returns tokens per second of our sampler and of ``generate`` for equal prompts and for an equal prefix."""
    torch.set_num_threads(1)
    clock = time.process_time if device == "cpu" else time.perf_counter
    rng = random.Random(0)
    sampler = Sampler(load_policy(folder, dtype=dtype, device=device), max_batch_size=GROUPS * REPETITIONS, seed=0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device)

    def draw(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    def groups() -> list[list[int]]:
        return [prompt for prompt in (draw(SHARED_TOKENS) for _ in range(GROUPS)) for _ in range(REPETITIONS)]

    def prefix() -> list[list[int]]:
        shared = draw(SHARED_TOKENS - OWN_TOKENS)
        return [shared + draw(OWN_TOKENS) for _ in range(GROUPS * REPETITIONS)]

    def ours(prompts: list[list[int]]) -> None:
        params = SamplingParams(max_tokens=SHORT_REPLY)
        replies = [future.result().token_ids for future in [sampler.submit(prompt, params) for prompt in prompts]]
        assert all(len(reply) == SHORT_REPLY for reply in replies)

    def theirs(prompts: list[list[int]]) -> None:
        ids = torch.tensor(prompts, device=device)
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=SHORT_REPLY, do_sample=True, pad_token_id=0)

    speeds = {}
    for name, make in (("equal prompts", groups), ("equal prefix", prefix)):
        seconds: list[list[float]] = [[], []]
        for _ in range(rounds + 1):  # the first round warms up; no round's prompts are in a cache
            prompts = make()
            for run, found in zip((ours, theirs), seconds, strict=True):
                started = clock()
                run(prompts)
                found.append(clock() - started)
        n_tokens = GROUPS * REPETITIONS * SHORT_REPLY
        speeds[name] = n_tokens / statistics.median(seconds[0][1:]), n_tokens / statistics.median(seconds[1][1:])
    sampler.close()
    return speeds


def print_shared_prompts(folder: str, rounds: int, device: str, dtype: str) -> None:
    unit = "tokens/s of CPU" if device == "cpu" else "tokens/s"
    for name, (mine, theirs) in compare_with_generate(folder, rounds, device, dtype).items():
        print(f"{name:<15} {mine:9.0f} {unit}, generate {theirs:.0f}   {mine / theirs:.1f} times")


async def main(rounds: int, hidden: int, layers: int, device: str, dtype: str, only: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        size = save_model(Path(folder), hidden, layers)
        if only == "prompts":
            print_shared_prompts(folder, rounds, device, dtype)
            return
        servers = [TransformersBackend(prefix_cache_mb=mb) for mb in (512, 0)]
        setup = PolicySetup(
            model=folder, model_name="policy", directory=Path(folder), dtype=dtype, device=device, threads=1, seed=0
        )
        one: list[float] = []
        many: list[float] = []
        talks: list[list[tuple[float, float]]] = [[], []]
        async with contextlib.AsyncExitStack() as stack:
            for server in servers:
                stack.push_async_callback(server.stop)
                await server.start(setup)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            for number in range(rounds + 1):  # the first round warms up
                one.append(await measure_tokens_per_s(session, servers[0], 1, 4))
                many.append(await measure_tokens_per_s(session, servers[0], CONCURRENT, CONCURRENT))
                for server, talk in zip(servers, talks, strict=True):
                    talk.append(await measure_conversations(session, server, number))
        single, batched = statistics.median(one[1:]), statistics.median(many[1:])
        where = "1 thread" if device == "cpu" else torch.cuda.get_device_name(device)
        print(f"model of {size / 1e6:.1f}M weights, {dtype}, {where}")
        print(f"one at a time    {single:9.0f} tokens/s")
        print(f"{CONCURRENT} at once       {batched:9.0f} tokens/s   {batched / single:.1f} times")
        mine, theirs = compare_with_transformers(folder, rounds, device, dtype)
        unit = "tokens/s of CPU" if device == "cpu" else "tokens/s"
        print(f"running batch, in process       {mine:9.0f} {unit}   {mine / theirs:.1f} times")
        print(f"transformers' continuous batch  {theirs:9.0f} {unit}")
        print_shared_prompts(folder, rounds, device, dtype)
        with_cache, without = (statistics.median(seconds for seconds, _ in talk[1:]) for talk in talks)
        reused = statistics.median(share for _, share in talks[0][1:])
        print(f"{TURNS} turns without prefix cache {without:7.2f} s")
        gain = f"{without / with_cache:.1f} times, {reused:.0%} of the prompts reused"
        print(f"{TURNS} turns with prefix cache    {with_cache:7.2f} s   {gain}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--device", default="cpu", help="such as cpu or cuda:0")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--only", choices=["prompts"])
    options = parser.parse_args()
    asyncio.run(main(options.rounds, options.hidden, options.layers, options.device, options.dtype, options.only))
