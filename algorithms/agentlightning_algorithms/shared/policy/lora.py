"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685), implemented with peft."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from agentlightning.errors import ConfigError
from agentlightning_algorithms.shared.policy.settings import PEFT_PATTERNS, LoraSettings

ModelT = TypeVar("ModelT", bound=nn.Module)


def add_lora(model: nn.Module, settings: LoraSettings) -> None:
    """Adds adapters, initially without effect, to a transformers model; from then on only they are trained.

    Raises:
        ConfigError: no layer matches ``target_modules``.
    """
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=cast(int, settings.alpha),  # peft annotates int and accepts float
        target_modules=settings.target_modules,
        lora_dropout=0.0,  # dropout would train a policy other than the one that sampled
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(getattr(model.config, "_name_or_path", "")),
    )
    embeddings = cast(Any, model).get_input_embeddings()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*tie_word_embeddings")  # raised as an error below
            warnings.filterwarnings("ignore", PEFT_PATTERNS)
            cast(Any, model).add_adapter(config)
    except ValueError as error:
        raise ConfigError(f"lora: target_modules = {settings.target_modules!r}: {error}") from error
    head = cast(Any, model).get_output_embeddings()
    if isinstance(head, LoraLayer) and head.get_base_layer().weight is embeddings.weight:
        raise ConfigError(
            f"lora: target_modules = {settings.target_modules!r} names the output layer, whose weights this model "
            "shares with its input embeddings; leave it out."
        )
    model.eval()
    for parameter in model.parameters():
        if parameter.requires_grad:  # an optimizer's step is smaller than the resolution of bfloat16
            parameter.data = parameter.data.float()


def merge_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights of an equivalent model without adapters; does not change ``model``.

    Merging in place and back would add rounding errors to the base weights each time.
    """

    def without_wrappers(name: str) -> str:
        return name.replace(".base_layer", "")

    state = {without_wrappers(name): value for name, value in model.state_dict().items() if ".lora_" not in name}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layer = cast(Any, module)  # peft leaves it unannotated
            # Experts have several parameters without a layer of their own, and one adapter around another for each.
            key = without_wrappers(f"{name}.{getattr(layer, 'parameter_name', 'weight')}")
            with torch.no_grad():
                delta = sum(layer.get_delta_weight(adapter).float() for adapter in layer.active_adapters)
                state[key] = (state[key].float() + delta).to(state[key].dtype)
    return state


def share_weights(model: ModelT) -> ModelT:
    """Returns a model that shares the memory of the weights, and to which adapters can be added separately."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def add_saved_adapter(model: nn.Module, directory: Path) -> None:
    """Adds untrained adapters, configured like those in ``directory``, to a transformers model.

    Raises:
        ConfigError: the directory has no adapters, or no layer of the model matches them.
    """
    try:
        config = LoraConfig.from_pretrained(str(directory))
        cast(Any, model).add_adapter(config)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{str(directory)!r} has no LoRA adapters for this model: {error}") from error
    model.eval()
    for parameter in model.parameters():
        if parameter.requires_grad:  # in the precision in which they are trained
            parameter.data = parameter.data.float()
        parameter.requires_grad_(False)
