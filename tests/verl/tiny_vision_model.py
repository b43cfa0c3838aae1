"""A tiny Qwen2-VL with random weights, a tokenizer of bytes and an image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor as FullProcessor

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
PLACEHOLDERS = ["<|image_pad|>", "<|video_pad|>"]
PATCH = 4
"""Size of a patch in pixels; a token of the model represents 2 by 2 patches."""


class Qwen2VLProcessor(FullProcessor):
    """A processor without videos, because transformers reads them with torchvision, which PyPI has only with CUDA.

    It has the name of the original, because verl selects the position ids by the name of the processor's class.
    """

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **_: Any) -> None:
        self.image_token, self.video_token = PLACEHOLDERS
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(PLACEHOLDERS)
        ProcessorMixin.__init__(self, image_processor, tokenizer)


def register_processor() -> None:
    """Makes transformers load the processor of a tiny model in this process."""
    AutoProcessor.register(Qwen2VLConfig, Qwen2VLProcessor, exist_ok=True)


def save_tiny_vision_model(directory: Path) -> None:
    """Writes a model for which a square image with sides of n pixels has (n / 8)^2 tokens."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL, *PLACEHOLDERS]
    vocabulary = {piece: place for place, piece in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[*SPECIAL[1:2], *SPECIAL[3:], *PLACEHOLDERS],
    )
    vision = {
        "depth": 1,
        "embed_dim": 16,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.2,
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    ids = {
        name: vocabulary[f"<|{name.removesuffix('_token_id')}|>"]
        for name in ("vision_start_token_id", "vision_end_token_id")
    }
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=vocabulary[PLACEHOLDERS[0]],
        video_token_id=vocabulary[PLACEHOLDERS[1]],
        tie_word_embeddings=False,
        **ids,
    )
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    Qwen2VLImageProcessorPil(patch_size=PATCH, min_pixels=8 * 8, max_pixels=64 * 64).save_pretrained(directory)
