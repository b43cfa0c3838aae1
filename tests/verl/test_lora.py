"""LoRA adapters merged into their base weights."""

from __future__ import annotations

import pytest
import torch

import agentlightning as agl

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl's and peft's imports


@pytest.mark.parametrize("use_rslora", [False, True])
def test_merged_weights_equal_the_weights_merged_by_peft(use_rslora: bool) -> None:
    from peft import LoraConfig, get_peft_model
    from peft.utils.save_and_load import get_peft_model_state_dict

    from agentlightning_algorithms.verl.inference.replica import merge_adapter

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["0"], init_lora_weights=False, use_rslora=use_rslora)
    adapted = get_peft_model(model, config)
    base = {
        name: weight.clone() for name, weight in adapted.base_model.model.state_dict().items() if "lora" not in name
    }
    merged = merge_adapter(base, get_peft_model_state_dict(adapted), adapted.peft_config["default"].to_dict())
    expected = adapted.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    assert not torch.equal(merged["0.weight"], base["0.base_layer.weight"])
    for name, weight in expected.items():
        torch.testing.assert_close(merged[name], weight)


def test_an_adapter_of_another_kind_is_refused() -> None:
    from agentlightning_algorithms.verl.inference.replica import merge_adapter

    with pytest.raises(agl.ConfigError, match="use_dora: set actor_rollout_ref.model.lora.merge to true"):
        merge_adapter({}, {}, {"lora_alpha": 8, "use_dora": True})


def test_an_adapter_of_another_model_is_refused() -> None:
    from agentlightning_algorithms.verl.inference.replica import merge_adapter

    adapter = {
        "base_model.model.far.lora_A.weight": torch.ones(1, 2),
        "base_model.model.far.lora_B.weight": torch.ones(2, 1),
    }
    with pytest.raises(agl.ConfigError, match=r"for far\.weight, which is not among"):
        merge_adapter({"near.weight": torch.ones(2, 2)}, adapter, {"lora_alpha": 8})
