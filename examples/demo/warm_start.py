"""Creates the demo's checkpoint: a tokenizer, a chat template and a tiny transformer that knows only the format.

    python -m examples.demo.warm_start plugins/agentlightning_plugins/demo/checkpoint

The model imitates demonstrations that call the calculator with the numbers of the question but with an operator drawn
at random, and that report its result wrongly one time in ten. It learns the format of the conversation, but not which
operator is right: reinforcement learning teaches that. Training is limited by steps, not by time, so that every machine
creates the same model.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentlightning.cli import echo
from agentlightning_plugins.demo.agent import CALCULATOR, SYSTEM_PROMPT, calculate
from agentlightning_plugins.demo.task import NAMES, TEMPLATES, THINGS, Problem, problem_stream

STEPS = 1500
BATCH = 32
LEARNING_RATE = 3e-3
WRONG_ANSWERS = 0.1
SEED = 2

END, PAD = "<|im_end|>", "<|pad|>"
TURNS = tuple(f"<|im_start|>{role}\n" for role in ("system", "user", "assistant", "tool"))
TOOLS_OPEN, TOOLS_CLOSE = "\n<tools>\n", "\n</tools>"
CALL_OPEN = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "'
CALL_CLOSE = '"}}\n</tool_call>'

# Messages render as Qwen's do, without the line break after <|im_end|>: what the model wrote is then, token for token,
# the beginning of the next prompt.
CHAT_TEMPLATE = r"""
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}
    {%- if loop.first and tools -%}
        {{- '\n<tools>' -}}
        {%- for tool in tools -%}
            {{- '\n' + tool | tojson -}}
        {%- endfor -%}
        {{- '\n</tools>' -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {%- set function = call.function or call -%}
        {%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson -%}
        {{- '\n' if message.content or not loop.first -}}
        {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' + arguments + '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""

# A token is a word with the spaces and the mark around it, an operator with its spaces, two digits, or a byte.
WORDS = r" ?[A-Za-z]+[.,?:]? ?|\d{1,2}| ?[-+*/] ?|."


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a lossless tokenizer: one token per fixed piece of the conversation, per word and per number below 100.

    Anything else is spelled in bytes.
    """
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [t.text.format(name=name, thing=thing, a=0, b=0) for t in TEMPLATES for name in NAMES for thing in THINGS]
    texts += [f"1 {operator} 1" for operator in "+-*/"]
    texts += [calculate(json.dumps({"expression": expression})) for expression in ("1 / 0", "", "1" * 101)]
    texts += [f"{number:02}" for number in range(100)]
    for text in texts:
        pieces += [piece for piece, _ in split.pre_tokenize_str(text)]
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(dict.fromkeys(pieces))}, [], ignore_merges=True))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD, END, *TURNS])
    fixed = (SYSTEM_PROMPT, f"{TOOLS_OPEN}{json.dumps(CALCULATOR)}{TOOLS_CLOSE}", CALL_OPEN, CALL_CLOSE)
    backend.add_tokens([AddedToken(text, normalized=False) for text in fixed])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PAD, padding_side="left", model_max_length=256
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def demonstrate(problem: Problem, rng: random.Random) -> list[dict[str, Any]]:
    """Makes a conversation about a problem with the right numbers, a random operator and sometimes a wrong answer."""
    a, b = (word for word in problem["question"].split() if word.strip(".,").isdigit())
    expression = f"{a.strip('.,')} {rng.choice('+-*/')} {b.strip('.,')}"
    arguments = {"expression": expression}
    result = calculate(json.dumps(arguments))
    answer = result if rng.random() >= WRONG_ANSWERS else str(rng.randint(1, 99))
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": problem["question"]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "calculator", "arguments": arguments}}]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": answer},
    ]


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Makes a small transformer with random weights.

    Their standard deviation of 0.1 is five times the usual one: at this width it lets attention find equal tokens
    immediately, so the model learns to copy numbers in hundreds of steps instead of thousands.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=96,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def batches(tokenizer: PreTrainedTokenizerFast) -> Iterator[dict[str, Tensor]]:
    """Yields batches of demonstrations, right-padded to the shape (BATCH, tokens of the longest one).

    The tokens of the questions have labels too, so that the model learns to distinguish the kinds of question.
    """
    rng = random.Random(SEED)
    problems = problem_stream("train", SEED)
    while True:
        chats = [demonstrate(next(problems), rng) for _ in range(BATCH)]
        texts = tokenizer.apply_chat_template(chats, tools=[dict(CALCULATOR)], tokenize=False)
        batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        yield {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": labels}


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Trains the model in place to imitate the demonstrations, for `STEPS` steps."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.05)
    for step, batch in enumerate(itertools.islice(batches(tokenizer), STEPS)):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == STEPS - 1:
            echo(f"step {step}: loss {loss.item():.3f}")


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Writes the checkpoint in the Hugging Face layout.

    The weights are stored in 16 bits, to save space, and used in 32: the configuration states the type to load.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(directory)
    model.config.dtype = torch.float32
    model.config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@click.command()
@click.argument("out_dir", type=click.Path(path_type=Path, file_okay=False))
def main(out_dir: Path) -> None:
    """Create the checkpoint in OUT_DIR."""
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    train(model, tokenizer)
    save(model, tokenizer, out_dir)


if __name__ == "__main__":
    main()
