"""Models for the measurements: of Qwen3-0.6B's shape with random weights, and one that has imitated demonstrations.

Nothing is downloaded. The demonstrations use the demo's calculator with the right numbers and a random operator, and
sometimes end with a wrong answer; GRPO can then teach the model which operator a problem asks for.
"""

from __future__ import annotations

import json
import math
import platform
import random
import time
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from agentlightning.run.directory import atomic_directory
from agentlightning_plugins.demo.agent import CALCULATOR, SYSTEM_PROMPT, calculate
from agentlightning_plugins.demo.task import Problem, problem_stream
from agentlightning_plugins.demo.training import CHECKPOINT

SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "model": {
            "vocab_size": 151_936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        },
        "warm_start": {"steps": 800, "seconds": 150.0, "batch": 64, "lr": 3e-4},
        "training": {"steps": 20, "tasks_per_step": 8, "rollouts_per_task": 16, "eval_every": 10, "lr": 1e-5},
        "validation": 96,
        "strategy": "cs",
        "runners": 4,
    },
    "tiny": {
        "model": {
            "vocab_size": 1024, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64,
        },
        "warm_start": {"steps": 4, "seconds": 60.0, "batch": 4, "lr": 3e-3},
        # No rollout succeeds here, so no group has spread; keep_flat_groups makes every part run nevertheless.
        "training": {
            "steps": 1, "tasks_per_step": 2, "rollouts_per_task": 2, "eval_every": 0, "lr": 1e-3,
            "experience": {"keep_flat_groups": True},
        },
        "validation": 2,
        "strategy": "shm",  # a process would import torch for two rollouts
        "runners": 1,
    },
}  # fmt: skip
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(size: dict[str, Any], device: str, dtype: torch.dtype, tokenizer: Any) -> Any:
    """Returns a model with random weights, for sequences of up to 131,072 tokens."""
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(max_position_embeddings=131_072, tie_word_embeddings=True, **ends, **size["model"])
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer whose tokens are strings of letters that also merge in other ways."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [chr(number) for number in range(ord("a"), ord("z") + 1)] + [chr(n) for n in range(ord("A"), ord("Z"))]
    merges: list[tuple[str, str]] = []
    parts = letters
    while len(tokens) < vocabulary - 2:
        new = [(part, letter) for part, letter in product(parts, letters)][: vocabulary - 2 - len(tokens)]
        merges += new
        parts = ["".join(pair) for pair in new]
        tokens += parts
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=_TEMPLATE
    )


def demonstrate(problem: Problem, rng: random.Random) -> list[dict[str, Any]]:
    """Makes a conversation about a problem with the right numbers, a random operator and sometimes a wrong answer."""
    a, b = (word for word in problem["question"].split() if word.strip(".,").isdigit())
    expression = f"{a.strip('.,')} {rng.choice('+-*/')} {b.strip('.,')}"
    arguments = {"expression": expression}
    result = calculate(json.dumps(arguments))
    answer = result if rng.random() >= 0.1 else str(rng.randint(1, 99))
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": problem["question"]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "calculator", "arguments": arguments}}]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": answer},
    ]


def batches(tokenizer: PreTrainedTokenizerFast, batch: int, device: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yields batches of demonstrations endlessly, padded on the right to [batch, tokens of the longest]."""
    rng = random.Random(0)
    problems = problem_stream("train", 0)
    while True:
        chats = [demonstrate(next(problems), rng) for _ in range(batch)]
        texts = tokenizer.apply_chat_template(chats, tools=[dict(CALCULATOR)], tokenize=False)
        tokens = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").to(device)
        labels = tokens.input_ids.masked_fill(tokens.attention_mask == 0, -100)
        yield {"input_ids": tokens.input_ids, "attention_mask": tokens.attention_mask, "labels": labels}


def warm_start(directory: Path, size: dict[str, Any], device: str, dtype: torch.dtype) -> dict[str, float]:
    """Writes the initial model of GRPO to ``directory``; returns its parameters, loss, steps and seconds.

    The learning rate falls to 0 over the steps of ``size``, or over its seconds if these are fewer.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)
    model = make_model(size, device, torch.float32, tokenizer)
    settings = size["warm_start"]
    optimizer = torch.optim.AdamW(model.parameters(), settings["lr"], betas=(0.9, 0.99), fused=True)
    started = time.monotonic()
    for step, batch in zip(count(), batches(tokenizer, settings["batch"], device), strict=False):
        progress = max(step / settings["steps"], (time.monotonic() - started) / settings["seconds"])
        if progress >= 1.0:
            break
        for group in optimizer.param_groups:
            group["lr"] = settings["lr"] * min(1.0, 10 * progress + 0.01) * 0.5 * (1 + math.cos(math.pi * progress))
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"warm start, step {step}: loss {loss.item():.3f}", flush=True)
    with atomic_directory(directory) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
    return {
        "parameters": float(model.num_parameters()), "loss": loss.item(), "steps": float(step),
        "seconds": time.monotonic() - started,
    }  # fmt: skip


def describe(device: str) -> dict[str, str]:
    """Returns the hardware and versions that the figures were measured on."""
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else "none"
    return {
        "gpu": gpu,
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
