"""Trains two agents of one workflow, each with its own weights, in about a minute on a CPU and without a download.

    python examples/two_agents/two_agents.py --out runs/two_agents

The translator and the clerk (see orders.py) are two LoRA adapters over one model, which the script makes: it knows the
form of both agents' answers, the translator's codes of shapes, and the colours that the clerk's codes mean. The
translator must learn the codes of colours and the clerk the shapes that codes mean, both from the same rewards: if only
one of them learned, no more than a third of the orders would be filled.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from orders import CODE_OF, COLOUR_CODES, COLOUR_OF, COLOURS, SHAPE_CODES, SHAPES, fill_order, split_orders
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import agentlightning as agl

SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '> ' + message.content + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WARM_UP_STEPS = 300
BATCH = 64


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word."""
    words = {word: i for i, word in enumerate((*SPECIAL, *COLOURS, *SHAPES, *COLOUR_CODES, *SHAPE_CODES))}
    backend = Tokenizer(models.WordLevel(vocab=words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(directory: Path, seed: int) -> None:
    """Trains and saves a small transformer on examples of a request and an answer with the same number of words."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = make_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
            initializer_range=0.1,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(WARM_UP_STEPS):
        pairs = [example(rng) for example in (translation, delivery) for _ in range(BATCH // 2)]
        texts = [f"<user> {said} <end> <assistant> {answer} <end>" for said, answer in pairs]
        input_ids = tokenizer(texts, return_tensors="pt").input_ids
        labels = input_ids.clone()
        labels[:, :5] = -100  # up to and including <assistant>
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def translation(rng: random.Random) -> tuple[str, str]:
    """An order and an answer of the translator: any code for the colour, and the code of the shape."""
    shape = rng.choice(SHAPES)
    return f"{rng.choice(COLOURS)} {shape}", f"{rng.choice(COLOUR_CODES)} {CODE_OF[shape]}"


def delivery(rng: random.Random) -> tuple[str, str]:
    """A code and an answer of the clerk: the colour that it understands, and any shape."""
    code = rng.choice(COLOUR_CODES)
    return f"{code} {rng.choice(SHAPE_CODES)}", f"{COLOUR_OF[code]} {rng.choice(SHAPES)}"


def train(directory: Path, *, seed: int, steps: int) -> dict[str, float]:
    """Makes the model and trains both agents in ``directory``.

    Returns:
        Mean greedy rewards: ``before`` and ``after`` on test orders, ``trained`` on training orders.
    """
    torch.set_num_threads(1)
    make_model(directory / "base", seed)
    seen, unseen = split_orders()
    agl.Trainer(
        algorithm={
            "name": "grpo",
            "model": str(directory / "base"),
            "policies": {"translator": {}, "clerk": {}},
            "lora": {"rank": 8},
            "steps": steps,
            "tasks_per_step": 6,
            "rollouts_per_task": 16,
            "sampling": {"temperature": 1.0, "max_tokens": 4},
            "eval_every": 5,
            "target_reward": 1.0,
            "test_dataset": unseen,
            "train_threads": 1,
            "seed": seed,
            "update": {"lr": 2e-3, "betas": (0.9, 0.99), "schedule": "linear", "minibatches": 8},
        },
        trackers=["console", "jsonl"],
        run_dir=directory / "run",
        max_concurrency=64,
    ).fit(fill_order, seen, seen)
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    first, *_, last = [entry for entry in map(json.loads, lines) if "test_reward" in entry]
    return {"before": first["test_reward"], "after": last["test_reward"], "trained": last["val_reward"]}


def main() -> None:
    """Trains and prints the rewards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the model and the run; must not exist")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    result = train(options.out, seed=options.seed, steps=options.steps)
    print(f"training orders: reward {result['trained']:.2f} after training")
    print(f"test orders: reward {result['before']:.2f} before training, {result['after']:.2f} after")


if __name__ == "__main__":
    main()
