"""Advantages of rows by verl's estimators, in which each rollout counts once."""

from __future__ import annotations

import numpy
import pytest
import torch
from omegaconf import OmegaConf

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl's imports


@pytest.mark.parametrize("rejected", [(), (0,), (1,), (0, 1)])
def test_rejected_rows_do_not_change_the_advantage_of_other_rows_of_their_rollout(rejected: tuple[int, ...]) -> None:
    from tensordict import TensorDict
    from verl.protocol import DataProto

    from agentlightning_algorithms.verl.advantage import rollout_advantages

    keys = ["g_0_0", "g_0_1", "g_1_0"]
    mask_BT, rewards_BT = torch.ones(3, 3), torch.zeros(3, 3)
    mask_BT[list(rejected)] = 0.0
    rewards_BT[:2, 2] = 1.0
    tensors = TensorDict({"token_level_rewards": rewards_BT, "response_mask": mask_BT}, batch_size=3)
    data = DataProto(batch=tensors, non_tensor_batch={"uid": numpy.array(["g"] * 3, dtype=object)})
    found_BT = rollout_advantages(data, keys, "rloo", OmegaConf.create({}))
    assert torch.equal(found_BT, torch.tensor([1.0, 1.0, -1.0])[:, None] * mask_BT)
