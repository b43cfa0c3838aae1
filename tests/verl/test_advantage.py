"""Advantages of rows by verl's estimators, in which each rollout counts once."""

from __future__ import annotations

from types import SimpleNamespace

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


def test_the_advantages_of_remax_equal_those_of_verls_estimator() -> None:
    from verl.trainer.ppo.core_algos import compute_remax_outcome_advantage

    from agentlightning_algorithms.verl.advantage import remax_without_baseline, subtract_baselines

    torch.manual_seed(0)
    rewards_BT, baselines_B = torch.randn(4, 6), torch.randn(4)
    mask_BT = torch.tensor([[1, 1, 0, 0, 1, 1], [1] * 6, [0] * 6, [1, 0, 0, 0, 0, 0]])
    advantages_BT, returns_BT = remax_without_baseline(rewards_BT, mask_BT, config=None)
    expected_BT, expected_returns_BT = compute_remax_outcome_advantage(rewards_BT, baselines_B, mask_BT)
    torch.testing.assert_close(subtract_baselines(advantages_BT, baselines_B, mask_BT), expected_BT)
    assert torch.equal(returns_BT, expected_returns_BT)


@pytest.mark.parametrize("n_rows", [22, 24])
def test_the_rows_of_an_optimizer_step_do_not_depend_on_the_number_of_ranks(n_rows: int) -> None:
    """verl gives each rank half of the batch, and the first step the first half of each rank's rows."""
    from agentlightning_algorithms.verl.trainer import _OptimizerSteps

    lengths = torch.randint(5, 400, (n_rows,), generator=torch.Generator().manual_seed(0))
    found = []
    for ranks in (1, 2, 3):
        config = OmegaConf.create(
            {
                "data": {"train_batch_size": 4},
                "actor_rollout_ref": {
                    "actor": {"ppo_mini_batch_size": 2, "use_dynamic_bsz": True},
                    "rollout": {"log_prob_use_dynamic_bsz": True},
                },
            }
        )
        group = SimpleNamespace(_query_dispatch_info=lambda _, ranks=ranks: list(range(ranks)))
        trainer = {"config": config, "parameter_sync_step": 1, "actor_rollout_wg": group}
        steps = _OptimizerSteps(SimpleNamespace(**trainer, use_critic=False, use_reference_policy=False))
        steps.plan(n_rows)
        padded = torch.cat([lengths, torch.full((steps.total - n_rows,), 128)])
        parts = steps.divide(padded, n_rows)
        assert sorted(place for part in parts for place in part) == list(range(steps.total))
        half = steps.total // 2 // ranks
        first = {place for part in parts for place in part[:half]}
        found.append({place for place in first if place < n_rows})
    assert found[0] == found[1] == found[2] == set(range(n_rows // 2))
