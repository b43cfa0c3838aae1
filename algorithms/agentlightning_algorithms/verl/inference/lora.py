"""Merges a LoRA adapter into its base weights in float32; verl's own merge rounds them to bfloat16."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from agentlightning.errors import ConfigError

_UNSUPPORTED: Final = "alpha_pattern fan_in_fan_out lora_bias modules_to_save target_parameters use_dora".split()
"""peft's settings that make an adapter more than two matrices and one scale."""


def merge_adapter(
    base: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Computes W + s B A of Hu et al. 2021, arXiv:2106.09685, section 4.1; ``base`` is not changed.

    ``.base_layer``, which peft adds to names, is removed. The matrices A (r, in) and B (out, r) have peft's names.

    Raises:
        ConfigError: the adapter is of an unsupported kind, or a base weight is missing.
    """
    if unsupported := [name for name in _UNSUPPORTED if config.get(name)]:
        raise ConfigError(
            f"the rollout backend transformers cannot merge a LoRA adapter with {', '.join(unsupported)}: set "
            "actor_rollout_ref.model.lora.merge to true, so that verl merges it"
        )
    merged = {name.replace(".base_layer.", "."): weight for name, weight in base.items()}
    for name, down in adapter.items():
        module, mark, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
        if not mark:
            continue  # B, which is read together with its A
        up = adapter[name.replace(".lora_A.", ".lora_B.")]
        weight = merged.get(f"{module}.weight")
        if weight is None:
            raise ConfigError(f"the LoRA adapter is for {module}.weight, which is not among the weights of the model")
        rank = down.shape[0]
        scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        merged[f"{module}.weight"] = (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)
    return merged
