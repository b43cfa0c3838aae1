"""Forward passes for the short calls of a training step: ``python tests/benchmarks/bench_short_calls.py``.

128 rollouts of two turns, 64 at once, with prompts of 20 to 30 tokens and replies of 3 to 6, as in the demo. The model
is tiny but has 28 layers, and its keys and values count as those of Qwen3-0.6B. So its time is that of launching
operations, as on a GPU. Rows of different lengths share a pass if the waste is less than the weights; the baseline is a
model whose weights count as nothing. Rounds are interleaved and medians are printed.
"""

from __future__ import annotations

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentlightning_algorithms.shared.policy import sampler as module
from agentlightning_algorithms.shared.policy.draw import SamplingParams
from agentlightning_algorithms.shared.policy.model import Policy
from agentlightning_algorithms.shared.policy.running_batch import RunningBatch
from agentlightning_algorithms.shared.policy.sampler import Sampler

VOCABULARY, ROLLOUTS, AT_ONCE, GROUP, ROUNDS = 1024, 128, 64, 16, 3
POSITION_BYTES = 2 * 28 * 8 * 128 * 2
WEIGHT_BYTES = 1192 * 10**6


def make_policy() -> Policy:
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=28, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Policy(Qwen3ForCausalLM(config), tokenizer)


def measure(policy: Policy, weight_bytes: int) -> tuple[float, float]:
    """Returns the sampler's seconds and its decoding passes."""

    def new_batch(new_slots: object, position_bytes: int, max_bytes: int, _: int) -> RunningBatch:
        return RunningBatch(new_slots, position_bytes, max_bytes, weight_bytes)

    def draw(rng: random.Random, n: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(n)]

    def run_agent(number: int) -> None:
        rng = random.Random(number)
        group = number // GROUP
        prompt = draw(random.Random("system"), 14) + draw(random.Random(f"task {group}"), 6 + group % 5)
        for _ in range(2):
            time.sleep(rng.uniform(0.005, 0.03))
            params = SamplingParams(max_tokens=rng.choice([3, 4, 4, 5, 6]), seed=number)
            prompt = prompt + list(sampler.submit(prompt, params).result().token_ids) + draw(rng, 5)

    with (
        patch.object(module, "RunningBatch", new_batch),
        patch.object(module, "position_bytes", lambda _: POSITION_BYTES),
    ):
        sampler = Sampler(policy, max_batch_size=256, seed=0)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(run_agent, range(ROLLOUTS)))
        found = sampler.statistics
        sampler.close()
    return found["busy_s"], found["decode_steps"]


def main() -> None:
    torch.set_num_threads(1)
    policy = make_policy()
    names = {"rows apart": 0, "rows together": WEIGHT_BYTES}
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name, weight_bytes in names.items():
            figures[name].append(measure(policy, weight_bytes))
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in figures.items()
    }
    for name, (seconds, passes) in medians.items():
        print(f"{name:14} {seconds:6.2f} s {passes:5.0f} passes that decode")
    print(f"ratio of the seconds {medians['rows together'][0] / medians['rows apart'][0]:.2f}")


if __name__ == "__main__":
    main()
