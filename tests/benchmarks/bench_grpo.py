"""Cost of a weight update: ``python tests/benchmarks/bench_grpo.py [--rows 64] [--rounds 5]``.

The baseline is the loss and step of TRL's ``GRPOTrainer`` on the same model (random weights, made on the spot), same
rows, device and optimizer: forward, loss, backward, clipping of gradients, AdamW, in micro-batches of ``--micro`` rows
for TRL and of as many tokens for ours. Rows vary in length, like those of agents; TRL gets them sorted by length, so
that it pads as little as possible. Both minimise the same token mean; their gradients are compared first. Rounds are
interleaved, medians are printed; on a busy machine, read the CPU time with ``--threads 1``.

Target (issue 8): ratio at most 1.05.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from agentlightning_algorithms.shared.policy.model import Policy
from agentlightning_algorithms.shared.policy.settings import UpdateSettings
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_algorithms.shared.policy.updater import Updater

VOCABULARY = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--micro", type=int, default=16, help="rows of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = make_rows(arguments.rows)
    tokenizer = make_tokenizer()
    ours_model, trl_model = (make_model(arguments.hidden, arguments.layers).to(arguments.device) for _ in range(2))
    n_weights = sum(p.numel() for p in ours_model.parameters())
    print(f"{n_weights / 1e6:.1f}M weights, {len(rows)} rows, {sum(map(length, rows)):,} tokens, {arguments.device}")

    policy = Policy(ours_model, tokenizer)
    rows = [
        TrainingRow(row.prompt_ids, row.response_ids, logprobs, row.advantage)
        for row, logprobs in zip(rows, policy.score(rows), strict=True)
    ]
    budget = arguments.micro * max(map(length, rows))
    updater = Updater(policy, UpdateSettings(lr=1e-6, max_tokens_per_microbatch=budget, dual_clip=None))
    with tempfile.TemporaryDirectory() as folder:
        baseline = Baseline(trl_model, tokenizer, rows, arguments.micro, Path(folder))
        compare_gradients(updater, baseline, rows)
        wall: dict[str, list[float]] = {"ours": [], "trl": []}
        cpu: dict[str, list[float]] = {"ours": [], "trl": []}
        for _ in range(arguments.rounds + 1):  # the first is warm-up
            for name, step in (("ours", lambda: updater.update(rows)), ("trl", baseline.step)):
                synchronize(arguments.device)
                started, started_cpu = time.perf_counter(), time.process_time()
                step()
                synchronize(arguments.device)
                wall[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - started_cpu)
    for clock, times in (("wall", wall), ("cpu", cpu)):
        ours, trl = (statistics.median(times[name][1:]) for name in ("ours", "trl"))
        print(f"{clock} time of an update: ours {ours:.3f} s, trl {trl:.3f} s, ratio {ours / trl:.2f} (target 1.05)")


class Baseline:
    """TRL's loss and optimizer step on given rows, instead of rows that TRL samples."""

    def __init__(self, model: Any, tokenizer: Any, rows: list[TrainingRow], micro: int, folder: Path) -> None:
        steps = -(-len(rows) // micro)
        config = GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=steps,
            num_generations=micro,
            learning_rate=1e-6,
            beta=0.0,
            loss_type="dapo",
            max_grad_norm=1.0,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=model.device.type == "cpu",
            report_to=[],
        )
        self.trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["x"] * len(rows)}),
            processing_class=tokenizer,
        )
        self.trainer.create_optimizer()
        self.trainer.current_gradient_accumulation_steps = steps
        self.model = self.trainer.model.train()
        ordered = sorted(rows, key=length)
        total = torch.tensor(float(sum(len(row.response_ids) for row in rows)), device=model.device)
        self.batches = [
            {**pad(ordered[i : i + micro], model.device), "num_items_in_batch": total}
            for i in range(0, len(ordered), micro)
        ]

    def accumulate(self) -> None:
        for batch in self.batches:
            self.trainer._compute_loss(self.model, batch).backward()

    def step(self) -> None:
        self.accumulate()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()


def pad(rows: list[TrainingRow], device: torch.device) -> dict[str, Any]:
    """Pads rows as TRL does: prompts on the left, answers on the right."""
    widths = max(len(row.prompt_ids) for row in rows), max(len(row.response_ids) for row in rows)
    batch: dict[str, Any] = {"prompt_ids": [], "prompt_mask": [], "completion_ids": [], "completion_mask": []}
    old = []
    for row in rows:
        left, right = widths[0] - len(row.prompt_ids), widths[1] - len(row.response_ids)
        batch["prompt_ids"].append([0] * left + [*row.prompt_ids])
        batch["prompt_mask"].append([0] * left + [1] * len(row.prompt_ids))
        batch["completion_ids"].append([*row.response_ids] + [0] * right)
        batch["completion_mask"].append([1] * len(row.response_ids) + [0] * right)
        old.append([*row.logprobs] + [0.0] * right)
    tensors = {name: torch.tensor(values, device=device) for name, values in batch.items()}
    advantages = torch.tensor([row.advantage for row in rows], device=device)
    return {**tensors, "old_per_token_logps": torch.tensor(old, device=device), "advantages": advantages}


def compare_gradients(updater: Updater, baseline: Baseline, rows: list[TrainingRow]) -> None:
    """Prints how far the gradients differ, to show that neither side is fast by omitting work."""
    caught: list[torch.Tensor] = []
    hook = updater._optimizer.register_step_pre_hook(
        lambda optimizer, *_: caught.extend(p.grad.clone() for p in optimizer.param_groups[0]["params"])
    )
    baseline.accumulate()
    torch.nn.utils.clip_grad_norm_(baseline.model.parameters(), 1.0)
    theirs = torch.cat([p.grad.flatten() for p in baseline.model.parameters()])
    baseline.trainer.optimizer.step()
    baseline.trainer.optimizer.zero_grad()
    updater.update(rows)
    hook.remove()
    ours = torch.cat([gradient.flatten() for gradient in caught])
    print(f"gradients differ by {float((ours - theirs).norm() / theirs.norm()):.1e} of their length")


def make_rows(count: int) -> list[TrainingRow]:
    """Returns rows with prompts of 40 to 200 tokens and answers of 8 to 96."""
    rng = random.Random(0)

    def tokens(shortest: int, longest: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(shortest, longest))]

    return [TrainingRow(tokens(40, 200), tokens(8, 96), [], rng.gauss(0, 1)) for _ in range(count)]


def length(row: TrainingRow) -> int:
    return len(row.prompt_ids) + len(row.response_ids)


def make_tokenizer() -> Any:
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w1", pad_token="w0")


def make_model(hidden: int, layers: int) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
