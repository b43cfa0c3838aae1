from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentlightning.errors import ConfigError
from agentlightning_algorithms.shared.policy import decode
from agentlightning_algorithms.shared.policy.decode import Decoder
from agentlightning_algorithms.shared.policy.draw import Generation, SamplingParams, Token, draw_tokens
from agentlightning_algorithms.shared.policy.kv_cache import BLOCK, PrefixCache, SlotCache
from agentlightning_algorithms.shared.policy.model import Policy, load_policy
from agentlightning_algorithms.shared.policy.sampler import Sampler
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from tests.waiting import LIMIT_S, blocking_until

TOLERANCE = 1e-5
"""Largest allowed difference between log-probabilities of sampler and trainer in float32."""


@pytest.fixture
def sampler(tiny_policy: Policy) -> Iterator[Sampler]:
    sampler = Sampler(tiny_policy, max_batch_size=5, seed=0)
    yield sampler
    sampler.close()


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, 60))] for _ in range(count)]


def collect(futures: list[Future[Generation]]) -> list[Generation]:
    return [future.result(timeout=LIMIT_S) for future in futures]


def largest_gap(policy: Policy, prompts: list[list[int]], generations: list[Generation], temperature: float) -> float:
    rows = [
        TrainingRow(p, g.token_ids, [t.logprob for t in g.tokens], 0.0)
        for p, g in zip(prompts, generations, strict=True)
    ]
    scores = policy.score(rows, temperature)
    return max(
        abs(a - b) for row, score in zip(rows, scores, strict=True) for a, b in zip(row.logprobs, score, strict=True)
    )


# Drawing


def naive_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Returns the distribution by the definitions of top_k and top_p, token by token from the likeliest."""
    kept = torch.zeros_like(logits)
    probability = (logits.double() / params.temperature).softmax(-1)
    order = sorted(range(len(logits)), key=lambda i: -probability[i].item())[: params.top_k or None]
    total = sum(probability[i].item() for i in order)
    reached = 0.0
    for i in order:
        if reached >= params.top_p:
            break
        kept[i] = probability[i]
        reached += probability[i].item() / total
    return (kept / kept.sum()).float()


settings_of_a_row = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.integers(0, 12),
)


@given(st.lists(settings_of_a_row, min_size=1, max_size=5), st.integers(0, 1000))
def test_each_row_is_drawn_from_its_own_filtered_distribution(rows: list[SamplingParams], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 10, generator=generator)
    uniform = torch.rand(len(rows), generator=generator).tolist()
    drawn = draw_tokens(logits, rows, uniform)
    for i, params in enumerate(rows):
        expected = naive_distribution(logits[i], params)
        torch.testing.assert_close(drawn.logprobs_nV[i].exp(), expected, atol=1e-5, rtol=1e-5)
        token = int(drawn.token_n[i])
        assert drawn.logprob_n[i] == drawn.logprobs_nV[i, token]
        below = expected[:token].sum().item()
        assert below - 1e-5 <= uniform[i] <= below + expected[token].item() + 1e-5


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-53])
def test_filtered_tokens_are_never_drawn(uniform: float) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0, 0.0, 0.0]])
    drawn = draw_tokens(logits, [SamplingParams(max_tokens=1, top_k=3)], [uniform])
    assert int(drawn.token_n[0]) in (1, 2, 3)
    assert torch.isfinite(drawn.logprob_n).all()


def test_a_greedy_row_takes_the_likeliest_token_in_a_batch_with_sampled_rows() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0], [0.0, 0.0, 0.1]])
    drawn = draw_tokens(
        logits, [SamplingParams(max_tokens=1, temperature=0.0, top_p=0.1), SamplingParams(max_tokens=1)], [0.0, 0.0]
    )
    assert drawn.token_n.tolist() == [1, 0]
    torch.testing.assert_close(drawn.logprobs_nV, logits.log_softmax(-1))


# The running batch


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_sampler_and_trainer_agree_on_logprobs_of_rows_that_share_a_batch(
    tiny_policy: Policy, sampler: Sampler, temperature: float
) -> None:
    prompts = random_prompts(24)
    prompts += prompts[:4]  # the same prompt twice is prefilled once
    params = [SamplingParams(max_tokens=1 + i % 17, temperature=temperature) for i in range(len(prompts))]
    generations = collect([sampler.submit(p, q) for p, q in zip(prompts, params, strict=True)])
    sampler.close()
    assert largest_gap(tiny_policy, prompts, generations, temperature) <= TOLERANCE
    assert all(len(g.token_ids) <= q.max_tokens for g, q in zip(generations, params, strict=True))


def test_rows_of_different_temperatures_share_a_batch(tiny_policy: Policy, sampler: Sampler) -> None:
    prompts = random_prompts(10)
    temperatures = [0.5 + 0.1 * i for i in range(10)]
    generations = collect(
        [
            sampler.submit(p, SamplingParams(max_tokens=8, temperature=t))
            for p, t in zip(prompts, temperatures, strict=True)
        ]
    )
    sampler.close()
    for prompt, generation, temperature in zip(prompts, generations, temperatures, strict=True):
        assert largest_gap(tiny_policy, [prompt], [generation], temperature) <= TOLERANCE


def test_a_seeded_request_gets_the_same_response_alone_and_in_a_batch(sampler: Sampler) -> None:
    prompts = random_prompts(12)
    params = [SamplingParams(max_tokens=12, seed=i) for i in range(12)]
    alone = [collect([sampler.submit(p, q)])[0].token_ids for p, q in zip(prompts, params, strict=True)]
    crowd = collect([sampler.submit(p, q) for p, q in zip(prompts, params, strict=True)])
    assert [g.token_ids for g in crowd] == alone
    other = collect([sampler.submit(prompts[0], SamplingParams(max_tokens=12, seed=i)) for i in range(20, 26)])
    assert len({tuple(g.token_ids) for g in other}) > 1


def test_greedy_responses_equal_the_responses_of_transformers(tiny_policy: Policy, sampler: Sampler) -> None:
    for prompt in random_prompts(4, seed=1):
        expected = cast(Any, tiny_policy.model).generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=16, do_sample=False
        )
        (generation,) = collect([sampler.submit(prompt, SamplingParams(max_tokens=16, temperature=0.0))])
        assert generation.token_ids == expected[0, len(prompt) :].tolist()


def test_a_response_ends_at_its_stop_token_or_at_max_tokens(tiny_policy: Policy, sampler: Sampler) -> None:
    prompt = random_prompts(1)[0]
    (free,) = collect([sampler.submit(prompt, SamplingParams(max_tokens=20, temperature=0.0))])
    assert free.finish_reason == "length"
    assert len(free.token_ids) == 20
    tiny_policy.stop_ids = frozenset({free.token_ids[7]})
    (stopped,) = collect([sampler.submit(prompt, SamplingParams(max_tokens=20, temperature=0.0))])
    end = free.token_ids.index(free.token_ids[7]) + 1
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[:end], "stop")


def test_a_response_ends_with_the_token_that_completes_a_stop_string(sampler: Sampler, tiny_policy: Policy) -> None:
    prompt = random_prompts(1)[0]
    tokens = collect([sampler.submit(prompt, SamplingParams(max_tokens=30, seed=1))])[0].token_ids
    text = [str(tiny_policy.tokenizer.decode([token])) for token in tokens]
    at = next(i for i in range(10, 29) if (text[i] + text[i + 1]).isascii() and (text[i] + text[i + 1]).isprintable())
    stop = text[at] + text[at + 1]
    (generation,) = collect([sampler.submit(prompt, SamplingParams(max_tokens=30, seed=1, stop=("never", stop)))])
    assert generation.finish_reason == "stop"
    assert generation.token_ids == tokens[: len(generation.token_ids)]
    said = str(tiny_policy.tokenizer.decode(generation.token_ids))
    assert said.endswith(stop)
    assert said.count(stop) == 1


def test_likeliest_tokens_are_reported_from_the_filtered_distribution(sampler: Sampler) -> None:
    params = SamplingParams(max_tokens=6, top_k=3, top_logprobs=3, temperature=0.8)
    plain, asked = collect([sampler.submit([1, 2], SamplingParams(max_tokens=6)), sampler.submit([1, 2], params)])
    assert not any(token.top_logprobs for token in plain.tokens)
    for token, logprob, likeliest, _ in asked.tokens:
        values = [value for _, value in likeliest]
        assert values == sorted(values, reverse=True)
        assert torch.tensor(values).exp().sum().item() == pytest.approx(1.0, abs=1e-5)
        assert (token, logprob) in likeliest


def test_a_cancelled_request_leaves_the_batch(sampler: Sampler) -> None:
    futures = [sampler.submit([1], SamplingParams(max_tokens=400, top_p=0.9)) for _ in range(20)]
    blocking_until(lambda: sampler.running)
    assert all(future.cancel() for future in futures if not future.done())
    (generation,) = collect([sampler.submit([2], SamplingParams(max_tokens=2))])
    assert len(generation.token_ids) == 2
    blocking_until(lambda: (sampler.running, sampler.waiting) == (0, 0))


def moved_weights(tiny_model: Path, directory: Path) -> Policy:
    policy = load_policy(tiny_model)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.2)
    policy.save(directory)
    return policy


def test_a_weight_swap_waits_for_running_rows_and_applies_to_later_requests(
    tiny_policy: Policy, tiny_model: Path, tmp_path: Path, sampler: Sampler
) -> None:
    moved = moved_weights(tiny_model, tmp_path)
    prompts = random_prompts(16)
    params = SamplingParams(max_tokens=40)
    before = [sampler.submit(p, params) for p in prompts[:8]]
    swap = sampler.load_weights(tmp_path, 7)
    after = [sampler.submit(p, params) for p in prompts[8:]]
    swap.result(timeout=LIMIT_S)
    assert all(future.done() for future in before)
    assert [g.weight_version for g in collect(before)] == [0] * 8
    assert [g.weight_version for g in collect(after)] == [7] * 8
    sampler.close()
    assert largest_gap(load_policy(tiny_model), prompts[:8], collect(before), 1.0) <= TOLERANCE
    assert largest_gap(moved, prompts[8:], collect(after), 1.0) <= TOLERANCE


@pytest.mark.parametrize("batch_size", [5, 16])
def test_an_in_flight_swap_does_not_wait_for_rows_and_tokens_have_the_logprobs_of_their_version(
    tiny_policy: Policy, tiny_model: Path, tmp_path: Path, batch_size: int
) -> None:
    moved = moved_weights(tiny_model, tmp_path)
    sampler = Sampler(tiny_policy, max_batch_size=batch_size, seed=0, swap_in_flight=True)
    prompts = random_prompts(9)
    sampled, swapping = threading.Event(), threading.Event()

    def on_token(token: Token) -> None:
        sampled.set()
        if not swapping.is_set():
            swapping.wait(LIMIT_S)  # the sampler's thread: no row goes on before the weights are read

    params = SamplingParams(max_tokens=60)
    running = [sampler.submit(prompt, params, on_token) for prompt in prompts]
    assert sampled.wait(LIMIT_S)
    waiting = sampler.waiting
    swap = sampler.load_weights(tmp_path, 7)
    blocking_until(lambda: sampler.waiting != waiting)  # the weights are being read
    swapping.set()
    swap.result(timeout=LIMIT_S)
    assert not all(future.done() for future in running)
    generations = collect(running)
    mixed = [g.weight_versions for g in generations if g.weight_versions]
    assert mixed
    assert all(versions == sorted(versions) and {*versions} == {0, 7} for versions in mixed)
    assert sampler.statistics["swapped_rows"] == len(mixed)
    sampler.close()
    rows = [
        TrainingRow(p, g.token_ids, [t.logprob for t in g.tokens], 0.0)
        for p, g in zip(prompts, generations, strict=True)
    ]
    by_version = {0: load_policy(tiny_model).score(rows), 7: moved.score(rows)}
    for i, generation in enumerate(generations):
        for place, token in enumerate(generation.tokens):
            assert abs(token.logprob - by_version[token.weight_version][i][place]) <= TOLERANCE


def test_sampling_from_a_version_of_the_weights_does_not_depend_on_earlier_requests(
    tiny_policy: Policy, tiny_model: Path
) -> None:
    def sample(version: int, before: int, greedy: int) -> list[list[int]]:
        sampler = Sampler(tiny_policy, seed=0)
        collect([sampler.submit([1], SamplingParams(max_tokens=5)) for _ in range(before)])
        sampler.load_weights(tiny_model, version).result(timeout=LIMIT_S)
        collect([sampler.submit([1], SamplingParams(max_tokens=5, temperature=0.0)) for _ in range(greedy)])
        said = [collect([sampler.submit([1], SamplingParams(max_tokens=9))])[0].token_ids for _ in range(3)]
        sampler.close()
        return said

    assert sample(3, before=2, greedy=2) == sample(3, before=0, greedy=0)
    assert sample(3, before=0, greedy=0) != sample(4, before=0, greedy=0)


def test_weights_that_cannot_be_loaded_leave_the_old_weights(
    tiny_policy: Policy, sampler: Sampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="safetensors"):
        sampler.load_weights(tmp_path, 7).result(timeout=LIMIT_S)

    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tiny_policy, "read_weights", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        sampler.load_weights(tmp_path, 8).result(timeout=LIMIT_S)
    assert collect([sampler.submit([1], SamplingParams(max_tokens=1))])[0].weight_version == 0


def test_weights_that_are_not_finite_fail_requests_but_not_the_sampler(
    tiny_policy: Policy, tiny_model: Path, tmp_path: Path, sampler: Sampler
) -> None:
    broken = load_policy(tiny_model)
    with torch.no_grad():
        next(broken.model.parameters()).fill_(torch.nan)
    broken.save(tmp_path)
    sampler.load_weights(tmp_path, 1).result(timeout=LIMIT_S)
    with pytest.raises(FloatingPointError, match="weights version 1 are not finite"):
        sampler.submit([1], SamplingParams(max_tokens=4)).result(timeout=LIMIT_S)
    sampler.load_weights(tiny_model, 2).result(timeout=LIMIT_S)
    assert len(collect([sampler.submit([1], SamplingParams(max_tokens=3, top_k=1))])[0].token_ids) == 3


def test_an_error_in_a_batch_reaches_its_requests_and_the_next_batch_works(
    tiny_policy: Policy, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(tiny_policy, "logits", fail)
        futures = [sampler.submit([1], SamplingParams(max_tokens=4)) for _ in range(3)]
        for future in futures:
            with pytest.raises(RuntimeError, match="out of memory"):
                future.result(timeout=LIMIT_S)
    assert collect([sampler.submit([1], SamplingParams(max_tokens=1))])


def test_closing_cancels_unfinished_requests(tiny_policy: Policy) -> None:
    sampler = Sampler(tiny_policy, max_batch_size=1)
    futures = [sampler.submit([1], SamplingParams(max_tokens=500)) for _ in range(3)]
    sampler.close()
    assert not sampler.alive
    with pytest.raises(CancelledError):
        futures[2].result(timeout=LIMIT_S)
    with pytest.raises(RuntimeError, match="closed"):
        sampler.submit([1], SamplingParams(max_tokens=1))


def test_a_model_with_a_sliding_window_is_refused(tiny_policy: Policy) -> None:
    tiny_policy.model.config.sliding_window = 16
    with pytest.raises(ConfigError, match="sliding window of 16 tokens"):
        Sampler(tiny_policy)


# Prefixes


def turns(count: int) -> list[list[int]]:
    """Returns the tokens that each turn adds to a conversation."""
    rng = random.Random(5)
    return [[rng.randrange(256) for _ in range(37)] for _ in range(count)]


def test_a_cached_prefix_is_not_computed_again_and_changes_no_result(tiny_policy: Policy, sampler: Sampler) -> None:
    prompts: list[list[int]] = []
    generations: list[Generation] = []
    prompt: list[int] = []
    for more in turns(4):
        prompt = [*prompt, *more]
        (generation,) = collect([sampler.submit(prompt, SamplingParams(max_tokens=20, seed=1))])
        prompts.append(prompt)
        generations.append(generation)
        prompt = [*prompt, *generation.token_ids]
    known = [(len(p) + len(g.token_ids) - 1) // 16 * 16 for p, g in zip(prompts, generations, strict=True)]
    assert [g.cached_tokens for g in generations] == [0, *known[:-1]]
    again = collect([sampler.submit(p, SamplingParams(max_tokens=20, seed=1)) for p in prompts])
    assert [g.token_ids for g in again] == [g.token_ids for g in generations]
    sampler.close()
    assert largest_gap(tiny_policy, prompts, generations, 1.0) <= TOLERANCE
    assert largest_gap(tiny_policy, prompts, again, 1.0) <= TOLERANCE
    assert sampler.statistics["reused_tokens"] == sum(g.cached_tokens for g in [*generations, *again])


def test_prompts_with_and_without_a_cached_prefix_share_a_batch(tiny_policy: Policy, sampler: Sampler) -> None:
    stem = [random.Random(3).randrange(256) for _ in range(64)]
    collect([sampler.submit(stem, SamplingParams(max_tokens=1))])
    prompts = [stem[: 8 * i + 1] + [i] * (5 + i) for i in range(8)] + random_prompts(8)
    generations = collect([sampler.submit(p, SamplingParams(max_tokens=9)) for p in prompts * 2])
    sampler.close()
    assert {g.cached_tokens for g in generations[:8]} >= {0, 16, 32, 48}
    assert largest_gap(tiny_policy, prompts * 2, generations, 1.0) <= TOLERANCE


@contextlib.contextmanager
def held(sampler: Sampler) -> Iterator[None]:
    """Blocks the sampler with a request, so that requests submitted meanwhile are admitted together."""
    running, released = threading.Event(), threading.Event()

    def hold(_: Token) -> None:
        running.set()
        assert released.wait(LIMIT_S)

    request = sampler.submit([1], SamplingParams(max_tokens=1), hold)
    assert running.wait(LIMIT_S)
    yield
    released.set()
    collect([request])


def test_a_prefix_shared_by_waiting_prompts_is_computed_once_and_changes_no_token(tiny_policy: Policy) -> None:
    rng = random.Random(4)
    system, *tasks = ([rng.randrange(256) for _ in range(n)] for n in (96, 96, 96, 96))
    prompts = [[*system, *task, *[rng.randrange(256) for _ in range(8)]] for task in tasks for _ in range(4)] * 2
    found: list[list[Generation]] = []
    for prefix_cache_bytes in (0, 2**20):
        sampler = Sampler(tiny_policy, max_batch_size=24, prefix_cache_bytes=prefix_cache_bytes)
        with held(sampler):
            futures = [sampler.submit(p, SamplingParams(max_tokens=12, seed=i)) for i, p in enumerate(prompts)]
        found.append(collect(futures))
        sampler.close()
    alone, shared = found
    assert [g.token_ids for g in shared] == [g.token_ids for g in alone]
    assert largest_gap(tiny_policy, prompts, shared, 1.0) <= TOLERANCE
    distinct = 12 * 8 + 96 + 3 * 96
    assert sum(len(p) - g.cached_tokens for p, g in zip(prompts, shared, strict=True)) == distinct


def test_prompts_do_not_wait_for_a_shared_prefix_that_is_short_or_larger_than_the_pool() -> None:
    short, long = list(range(5 * BLOCK)), list(range(20 * BLOCK))
    pairs = [[*short, 1], [*short, 2]], [[*long, 1], [*long, 2]]
    assert PrefixCache(20 * BLOCK, 1).leaders(pairs[0]) == pairs[0], "too short to wait for"
    assert PrefixCache(19 * BLOCK, 1).leaders(pairs[1]) == pairs[1], "larger than the pool"
    assert PrefixCache(20 * BLOCK, 1).leaders([*pairs[1], long[:40]]) == pairs[1][:1]


def test_new_weights_clear_the_prefix_cache(
    tiny_policy: Policy, tiny_model: Path, tmp_path: Path, sampler: Sampler
) -> None:
    moved = moved_weights(tiny_model, tmp_path)
    prompt = random_prompts(1)[0] * 3
    collect([sampler.submit(prompt, SamplingParams(max_tokens=3))])
    sampler.load_weights(tmp_path, 1)
    (generation,) = collect([sampler.submit(prompt, SamplingParams(max_tokens=8))])
    assert (generation.cached_tokens, generation.weight_version) == (0, 1)
    assert largest_gap(moved, [prompt], [generation], 1.0) <= TOLERANCE


@pytest.mark.parametrize("blocks", [0, 1, 3, 8])
def test_a_small_prefix_pool_evicts_blocks_without_mixing_them_up(tiny_policy: Policy, blocks: int) -> None:
    per_token = 2 * 4 * 32  # keys and values of the tiny model, in bytes, at most
    sampler = Sampler(tiny_policy, max_batch_size=4, seed=0, prefix_cache_bytes=blocks * 16 * per_token * 2)
    rng = random.Random(8)
    stems = [[rng.randrange(256) for _ in range(48)] for _ in range(3)]
    prompts = [stems[rng.randrange(3)][: rng.randrange(1, 48)] + [rng.randrange(256)] * 3 for _ in range(60)]
    generations = collect([sampler.submit(p, SamplingParams(max_tokens=6)) for p in prompts])
    sampler.close()
    assert largest_gap(tiny_policy, prompts, generations, 1.0) <= TOLERANCE


def test_missing_weights_are_refused_without_waiting_for_running_rows(sampler: Sampler, tmp_path: Path) -> None:
    running = sampler.submit([1], SamplingParams(max_tokens=480))
    with pytest.raises(ConfigError, match="safetensors"):
        sampler.load_weights(tmp_path, 7).result(timeout=LIMIT_S)
    assert running.cancel() or running.done()


# Memory


@pytest.fixture
def long_policy() -> Policy:
    """A model with 8,192 positions; keys and values of each position take 1 kB."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Policy(Qwen2ForCausalLM(config), cast(Any, SimpleNamespace(eos_token_id=None)))


def peak_of(
    policy: Policy, prompts: list[list[int]], max_tokens: int, **options: Any
) -> tuple[list[Generation], int, Mapping[str, float]]:
    """Returns the responses, the peak memory of keys and values in bytes, and the counters."""
    sampler = Sampler(policy, seed=0, prefix_cache_bytes=0, **options)
    peak = 0

    def measure(_: Token) -> None:
        nonlocal peak
        peak = max(peak, sampler.kv_cache_bytes)

    futures = [
        sampler.submit(prompt, SamplingParams(max_tokens=max_tokens, seed=i), measure)
        for i, prompt in enumerate(prompts)
    ]
    generations = collect(futures)
    sampler.close()
    assert sampler.kv_cache_bytes == 0
    return generations, peak, sampler.statistics


def test_one_long_request_does_not_reserve_its_length_for_every_request(long_policy: Policy) -> None:
    rng = random.Random(1)
    lengths = [rng.randint(60, 140) for _ in range(63)]
    lengths.insert(30, 4200)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in lengths]
    generations, peak, _ = peak_of(long_policy, prompts, 12)
    assert peak <= 1.5 * 1024 * sum(length + 12 for length in lengths)
    assert largest_gap(long_policy, prompts, generations, 1.0) <= TOLERANCE


@pytest.mark.parametrize("prompt_length", [10, 300])
def test_requests_beyond_the_memory_budget_wait_and_get_the_same_responses(
    long_policy: Policy, prompt_length: int
) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(256) for _ in range(prompt_length + i)] for i in range(12)]
    free, most, _ = peak_of(long_policy, prompts, 90)
    budget = 600 * 1024
    generations, peak, statistics = peak_of(long_policy, prompts, 90, kv_cache_bytes=budget)
    assert [g.token_ids for g in generations] == [g.token_ids for g in free]
    assert peak <= budget < most
    assert statistics["preempted"] > 0 or prompt_length == 300
    assert statistics["requests"] == len(prompts)


def test_a_request_that_needs_more_than_the_memory_budget_runs_on_its_own(long_policy: Policy) -> None:
    generations, _, _ = peak_of(long_policy, [[1] * 50, [2] * 50], 4, kv_cache_bytes=1024)
    assert [len(g.token_ids) for g in generations] == [4, 4]


# Tokens as they come


def test_the_on_token_callback_gets_every_token_before_the_response_ends(sampler: Sampler) -> None:
    told: list[Token] = []
    seen_before_the_end: list[int] = []
    future = sampler.submit([1, 2], SamplingParams(max_tokens=30, top_logprobs=2), told.append)
    future.add_done_callback(lambda _: seen_before_the_end.append(len(told)))
    (generation,) = collect([future])
    assert told == generation.tokens
    assert {(len(token.top_logprobs), token.weight_version) for token in told} == {(2, 0)}
    assert seen_before_the_end == [len(generation.token_ids)]


# Precision and device


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_in_bfloat16_sampler_and_trainer_differ_only_by_rounding(tiny_model: Path, device: str) -> None:
    policy = load_policy(tiny_model, dtype="bfloat16", device=device)
    sampler = Sampler(policy, max_batch_size=8, seed=0)
    prompts = random_prompts(12)
    first = collect([sampler.submit(p, SamplingParams(max_tokens=16)) for p in prompts])
    longer = [[*p, *g.token_ids] for p, g in zip(prompts, first, strict=True)]
    second = collect([sampler.submit(p, SamplingParams(max_tokens=16)) for p in longer])
    sampler.close()
    assert sum(g.cached_tokens for g in second) > 0
    assert largest_gap(policy, [*prompts, *longer], [*first, *second], 1.0) < 0.25


# Recorded steps


def run_again(self: Decoder, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    """Stands in for a recording where there is no GPU: runs nothing now, and everything at each call."""
    logits = torch.zeros(64, self._policy.vocabulary)

    def replay() -> None:
        found = run()
        logits[: len(found)] = found

    return logits, replay


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_recorded_steps_change_no_token(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if device == "cpu":
        monkeypatch.setattr(decode, "_RECORDED", ("cpu",))
        monkeypatch.setattr(Decoder, "_capture", run_again)
    policy = load_policy(tiny_model, device=device)
    prompts = random_prompts(24)
    lengths = random.Random(1)
    params = [SamplingParams(max_tokens=lengths.randint(1, 60), seed=i) for i in range(len(prompts))]

    def generate(cuda_graphs: bool) -> tuple[list[Generation], list[list[int]]]:
        with contextlib.closing(Sampler(policy, max_batch_size=7, seed=0, cuda_graphs=cuda_graphs)) as sampler:
            first = collect([sampler.submit(p, each) for p, each in zip(prompts, params, strict=True)])
            longer = [[*p, *g.token_ids] for p, g in zip(prompts, first, strict=True)]
            second = collect([sampler.submit(p, each) for p, each in zip(longer, params, strict=True)])
        return [*first, *second], [*prompts, *longer]

    recordings: list[SlotCache] = []
    record = Decoder._record

    def counted(self: Decoder, slots: SlotCache, *inputs: Any) -> Any:
        recordings.append(slots)
        return record(self, slots, *inputs)

    monkeypatch.setattr(Decoder, "_record", counted)
    plain, _ = generate(False)
    assert not recordings
    recorded, all_prompts = generate(True)
    assert len(recordings) > 3  # caches have grown and shrunk
    assert [g.token_ids for g in recorded] == [g.token_ids for g in plain]
    assert largest_gap(policy, all_prompts, recorded, 1.0) < TOLERANCE


def test_a_model_that_cannot_be_recorded_is_sampled_step_by_step(
    tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Decoder, run: Callable[[], torch.Tensor]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(decode, "_RECORDED", ("cpu",))
    monkeypatch.setattr(Decoder, "_capture", fail)
    with caplog.at_level("INFO", "agentlightning"), contextlib.closing(Sampler(tiny_policy)) as sampler:
        (generation,) = collect([sampler.submit([1, 2], SamplingParams(max_tokens=30))])
    assert len(generation.token_ids) > 3
    assert caplog.text.count("without CUDA graphs: operation not permitted") == 1
