"""A causal language model of 30k random weights, with a tokenizer of bytes and a chat template with tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# A simplified template of Qwen and the Hermes family.
CHAT_TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'refused' %}{{ raise_exception('no such role') }}{% endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""


def save_tiny_model(directory: Path, max_length: int = 512, **changes: Any) -> None:
    """Writes the model for up to ``max_length`` positions, with ``changes`` to its configuration."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {piece: i for i, piece in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *special])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**{**config, **changes}))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
