"""A LoRA adapter merged into the weights that it is for, in float32: verl's own merge rounds them to bfloat16."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from agentlightning.errors import ConfigError

_OTHER_KINDS: Final = (
    "alpha_pattern",
    "fan_in_fan_out",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "use_dora",
)
"""Of peft's settings, those that make something else of an adapter than two matrices and one scale."""


def merge_adapter(
    base: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The weights W + s B A of Hu et al. 2021, arXiv:2106.09685, section 4.1; ``base`` is left as it is.

    Args:
        base: weights by name; ``.base_layer`` in a name, which marks what an adapter is for, is taken out.
        adapter: the matrices A (r, in) and B (out, r), named as peft saves them.
        config: peft's, as a mapping.

    Raises:
        ConfigError: the adapter is of another kind, or for a weight that is not there.
    """
    other = [name for name in _OTHER_KINDS if config.get(name)]
    if other:
        raise ConfigError(
            f"the rollout backend transformers cannot merge a LoRA adapter with {', '.join(other)}: set "
            "actor_rollout_ref.model.lora.merge to true, which has verl merge it"
        )
    merged = {name.replace(".base_layer.", "."): weight for name, weight in base.items()}
    for name, down in adapter.items():
        module, mark, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
        if not mark:
            continue  # B, found by its A
        up = adapter[name.replace(".lora_A.", ".lora_B.")]
        weight = merged.get(f"{module}.weight")
        if weight is None:
            raise ConfigError(f"the LoRA adapter is for {module}.weight, which is not among the weights of the model")
        rank = down.shape[0]
        scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        merged[f"{module}.weight"] = (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)
    return merged
