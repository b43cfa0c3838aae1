"""Creates tiny models for examples: a tokenizer of whole words, a small transformer, training by imitation.

A model imitates demonstrations that have the right form and often the wrong content. Reinforcement learning then has
something to choose from. Training is limited by steps, not by time, so that every machine creates the same model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END, PAD = "<|im_end|>", "<|pad|>"
TURNS = tuple(f"<|im_start|>{role}\n" for role in ("system", "user", "assistant", "tool"))

# Messages and tool calls are written as Qwen writes them, but tools are not listed: the model has learned its only one.
CHAT_TEMPLATE = r"""
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}
    {%- for call in message.tool_calls or [] -%}
        {%- set function = call.function or call -%}
        {%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson -%}
        {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' + arguments + '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""

# A token is a word with the spaces and the mark around it, an operator with its spaces, two digits, or a byte.
WORDS = r" ?[A-Za-z_]+[.,?:]? ?|\d{1,2}| ?[-+*/=<>] ?|."

Chat = list[dict[str, Any]]


def begin(description: str | None, seed: int) -> Path:
    """Returns the directory of the checkpoint, which the command line names; from here on, each run does the same."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    return directory


def make_tokenizer(texts: Iterable[str], fixed: Sequence[str], max_length: int = 256) -> PreTrainedTokenizerFast:
    """Makes a lossless tokenizer: a token for each word of ``texts`` and each text of ``fixed``; the rest is bytes."""
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    for text in texts:
        pieces += [piece for piece, _ in split.pre_tokenize_str(text)]
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(dict.fromkeys(pieces))}, [], ignore_merges=True))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD, END, *TURNS])
    backend.add_tokens([AddedToken(text, normalized=False) for text in fixed])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PAD, padding_side="left", model_max_length=max_length
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, *, hidden_size: int = 48, layers: int = 2) -> LlamaForCausalLM:
    """Makes a small transformer with random weights.

    Their standard deviation of 0.1 is five times the usual one: at this width it lets attention find equal tokens from
    the start, so that the model learns to copy in hundreds of steps instead of thousands.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=2 * hidden_size,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def imitate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    demonstrate: Callable[[], Chat],
    *,
    steps: int,
    batch_size: int = 32,
    learning_rate: float = 3e-3,
    answers_only: bool = False,
) -> None:
    """Trains the model in place on demonstrations.

    Every token has a label, in questions too. With ``answers_only``, only tokens of the assistant's turns do: then the
    model does not learn which words follow each other in questions, and copies names that it has never seen.
    """
    turns = torch.tensor(tokenizer.convert_tokens_to_ids(list(TURNS)))
    assistant = turns[2]
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.05)
    for step in range(steps):
        texts = tokenizer.apply_chat_template([demonstrate() for _ in range(batch_size)], tokenize=False)
        batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        if answers_only:
            starts = torch.isin(batch.input_ids, turns)
            turn = (starts * torch.arange(starts.shape[1])).cummax(1).values
            labels = labels.masked_fill(starts | (batch.input_ids.gather(1, turn) != assistant), -100)
        loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Writes the checkpoint in the Hugging Face layout: weights are stored in 16 bits and loaded in 32."""
    directory.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(directory)
    model.config.dtype = torch.float32
    model.config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
