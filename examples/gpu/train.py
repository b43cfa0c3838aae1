"""Trains a small new model on a tool-use task on one GPU, and reports rewards and speed.

    python examples/gpu/train.py --out runs/gpu            # about 110M parameters, bfloat16, cuda:0
    python examples/gpu/train.py --out runs/tiny --tiny    # a minute on a CPU, the same code

Nothing is downloaded: the tokenizer is the demo's, and the model starts from random weights and imitates demonstrations
that use the calculator with the right numbers and a random operator. GRPO then teaches it which operator a problem asks
for. The model is trained twice from the same weights: once with and once without truncated importance weights between
sampler and trainer, which round differently in bfloat16. ``OUT/report.json`` and ``OUT/report.md`` have the reward
curves, tokens per second, and the gap between the log-probabilities of sampler and trainer.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import agentlightning as agl
from agentlightning_plugins.demo.agent import CALCULATOR, SYSTEM_PROMPT, calculate, calculator_agent
from agentlightning_plugins.demo.task import Problem, make_problems, problem_stream
from agentlightning_plugins.demo.training import CHECKPOINT

SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "model": {"hidden_size": 768, "num_hidden_layers": 16, "num_attention_heads": 12, "intermediate_size": 2048},
        "warm_start": {"steps": 1500, "batch": 64, "lr": 6e-4},
        "training": {"steps": 30, "tasks_per_step": 16, "rollouts_per_task": 16, "eval_every": 5, "lr": 2e-5},
        "validation": 192,
        "runners": 4,
    },
    "tiny": {
        "model": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
        "warm_start": {"steps": 20, "batch": 8, "lr": 3e-3},
        # No rollout succeeds here, so no group has spread; keep_flat_groups makes every part run nevertheless.
        "training": {
            "steps": 2,
            "tasks_per_step": 2,
            "rollouts_per_task": 2,
            "eval_every": 0,
            "lr": 1e-3,
            "experience": {"keep_flat_groups": True},
        },
        "validation": 2,
        "runners": 1,
    },
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "corrected": {"old_logprobs": "trainer", "importance_weights": "token", "importance_upper": 2.0},
    "uncorrected": {"old_logprobs": "trainer"},
}
REPORTED = (
    "reward",
    "val_reward",
    "logprob_gap_max",
    "approx_kl",
    "importance_weight",
    "importance_weight_max",
    "importance_weight_held",
    "entropy",
    "grad_norm",
    "tokens_per_s",
    "train_tokens_per_s",
    "seconds",
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


def make_model(tokenizer: PreTrainedTokenizerFast, size: dict[str, Any]) -> LlamaForCausalLM:
    """Returns a model with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=256,
            tie_word_embeddings=True,
            num_key_value_heads=size["num_attention_heads"],
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **size,
        )
    )


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
    """Writes the initial model of GRPO to ``directory``; returns its size, loss and training time."""
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)
    model: Any = make_model(tokenizer, size["model"])  # transformers annotates `to` as if it took a model
    model = model.to(device)
    settings = size["warm_start"]
    optimizer = torch.optim.AdamW(model.parameters(), settings["lr"], betas=(0.9, 0.99), fused=device != "cpu")
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings["lr"], total_steps=settings["steps"], pct_start=0.1
    )
    started = time.monotonic()
    loss = torch.tensor(torch.nan)
    for step, batch in zip(range(settings["steps"]), batches(tokenizer, settings["batch"], device), strict=False):
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"warm start, step {step}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "loss": loss.item(), "seconds": time.monotonic() - started}


def train(
    name: str, directory: Path, model: Path, size: dict[str, Any], device: str, dtype: str, backend: str
) -> dict[str, Any]:
    """Trains from ``model`` with one of the corrections; returns its curve and summary."""
    settings = dict(size["training"])
    update = {"lr": settings.pop("lr"), "betas": (0.9, 0.99), "minibatches": 4, **CORRECTIONS[name]}
    trainer = agl.Trainer(
        algorithm={
            "name": "grpo",
            "model": str(model),
            "sampling": {"temperature": 1.0, "max_tokens": 32},
            "update": update,
            "device": device,
            "dtype": dtype,
            "backend": backend,
            "max_batch_size": 512,
            "rollout_timeout_s": 120.0,
            **settings,
        },
        run_dir=directory / name,
        trackers=["jsonl"],
        n_runners=size["runners"],
        max_concurrency=64,
    )
    started = time.monotonic()
    status = trainer.fit(
        calculator_agent, make_problems("train", 4096), make_problems("val", size["validation"])
    ).status
    lines = (directory / name / "metrics.jsonl").read_text().splitlines()
    metrics = [entry for entry in map(json.loads, lines) if "step" in entry]
    curve = [{"step": entry["step"], **{key: entry[key] for key in REPORTED if key in entry}} for entry in metrics]
    trained = [entry for entry in metrics if "reward" in entry]
    gaps = [entry.get("logprob_gap_max", 0.0) for entry in trained]
    return {
        "status": status,
        "seconds": time.monotonic() - started,
        "curve": curve,
        "val_reward_before": metrics[0]["val_reward"],
        "val_reward_after": next(e["val_reward"] for e in reversed(metrics) if "val_reward" in e),
        "sampled_tokens_per_s": statistics.median(entry["tokens_per_s"] for entry in trained),
        "trained_tokens_per_s": statistics.median(entry.get("train_tokens_per_s", 0.0) for entry in trained),
        "logprob_gap_max": max(gaps),
        "logprob_gap_median": statistics.median(gaps),
    }


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


def to_markdown(report: dict[str, Any]) -> str:
    """Formats the report."""
    machine, runs = report["machine"], report["runs"]
    names = list(runs)
    size = f"{report['warm_start']['parameters'] / 1e6:.0f}M parameters, " if "warm_start" in report else ""
    lines = [
        f"# {size}{report['dtype']}, {report['backend']}, {machine['gpu']}",
        "",
        ", ".join(f"{key} {value}" for key, value in machine.items()),
        "",
        "| | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for key in (
        "val_reward_before",
        "val_reward_after",
        "sampled_tokens_per_s",
        "trained_tokens_per_s",
        "logprob_gap_median",
        "logprob_gap_max",
        "seconds",
    ):
        lines.append(f"| {key} | " + " | ".join(f"{runs[name][key]:.4g}" for name in names) + " |")
    lines += ["", "| step | " + " | ".join(f"reward, {name}" for name in names) + " |", "|---|" + "---|" * len(names)]
    rewards = {name: {e["step"]: e["reward"] for e in runs[name]["curve"] if "reward" in e} for name in names}
    for step in sorted(set().union(*rewards.values())):
        lines.append(
            f"| {step} | " + " | ".join(f"{rewards[name].get(step, float('nan')):.3f}" for name in names) + " |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Creates the model, trains it with and without correction, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs and the report; must not exist")
    parser.add_argument("--tiny", action="store_true", help="a model of thousands of weights, for a check on a CPU")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--steps", type=int, help="updates of each training")
    parser.add_argument("--start", type=Path, help="start from this model, OUT/start of an earlier run")
    parser.add_argument("--backend", default="transformers", help="policy backend: transformers or vllm, see README")
    options = parser.parse_args()
    size = SIZES["tiny" if options.tiny else "full"]
    if options.steps:
        size = {**size, "training": {**size["training"], "steps": options.steps}}
    options.out.mkdir(parents=True)
    report: dict[str, Any] = {"machine": describe(options.device), "dtype": options.dtype, "backend": options.backend}
    start = options.start or options.out / "start"
    if options.start is None:
        report["warm_start"] = warm_start(start, size, options.device, getattr(torch, options.dtype))
    report["runs"] = {}
    for name in CORRECTIONS:
        report["runs"][name] = train(name, options.out, start, size, options.device, options.dtype, options.backend)
        (options.out / "report.json").write_text(json.dumps(report, indent=2))
    (options.out / "report.md").write_text(to_markdown(report))
    print(to_markdown(report))


if __name__ == "__main__":
    main()
