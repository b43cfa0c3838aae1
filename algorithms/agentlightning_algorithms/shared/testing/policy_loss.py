"""``PolicyLossConformance``: the tests that every component of the kind ``policy_loss`` must pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agentlightning.testing import promised
from agentlightning_algorithms.shared.policy.loss import LossBatch, Surrogate
from agentlightning_algorithms.shared.policy.settings import UpdateSettings

MASK_BT = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
"""Rows of different lengths; the last one has a token that the policy was given."""
OLD_BT = torch.tensor([[-0.5, -1.0, -2.0, -0.1], [-3.0, -0.7, 0.0, 0.0], [-0.2, -1.5, -0.9, 0.0]])
NEW_BT = OLD_BT + torch.tensor([[0.1, -0.1, 0.4, -0.3], [-0.4, 0.05, 0.0, 0.0], [0.0, 0.02, -0.02, 0.0]]) * MASK_BT
ADVANTAGE_B1 = torch.tensor([[1.0], [-0.5], [2.0]])


class PolicyLossConformance:
    """Tests that every policy loss must pass.

    Subclass it and define one fixture, ``policy_loss``: a function ``(logprob_BT, old_logprob_BT, advantage_BT,
    mask_BT, settings)`` that returns a ``Surrogate``. Its method ``begin``, if it has one, is called before it.
    """

    def settings(self) -> UpdateSettings:
        """Returns the settings of the training."""
        return UpdateSettings()

    def compute(
        self,
        policy_loss: Any,
        new_BT: Tensor = NEW_BT,
        old_BT: Tensor = OLD_BT,
        advantage_BT: Tensor = ADVANTAGE_B1,
        mask_BT: Tensor = MASK_BT,
        *,
        is_part: bool = False,
    ) -> tuple[Surrogate, Tensor]:
        """Returns the surrogate and the gradient of its masked sum; fails if a part has a wrong form.

        ``is_part``: the rows are a part of the batch that was computed before.
        """
        if hasattr(policy_loss, "begin") and not is_part:
            batch = LossBatch.of_rows(new_BT, old_BT, advantage_BT.expand_as(mask_BT), mask_BT)
            with promised("begin(batch, settings) accepts a LossBatch"):
                policy_loss.begin(batch, self.settings())
        logprob_BT = new_BT.clone().requires_grad_()
        given = [old_BT.clone(), advantage_BT.clone(), mask_BT.clone()]
        with promised("policy_loss(logprob_BT, old_logprob_BT, advantage_BT, mask_BT, settings) returns a Surrogate"):
            found = Surrogate(*policy_loss(logprob_BT, *given, self.settings()))
            total = (found.loss_BT * mask_BT).sum()
        for name, part in found._asdict().items():
            assert part.shape == new_BT.shape, (
                f"{name} has a value for each token, {list(new_BT.shape)}: {list(part.shape)}"
            )
            assert bool(part.isfinite().all()), (
                f"{name} is finite, also for unlikely tokens and where the mask is 0: {part}"
            )
        assert all(map(torch.equal, given, (old_BT, advantage_BT, mask_BT))), (
            "policy_loss leaves its arguments unchanged"
        )
        assert total.requires_grad, "loss_BT has a gradient with respect to logprob_BT"
        (gradient_BT,) = torch.autograd.grad(total, logprob_BT)
        assert bool(gradient_BT.isfinite().all()), f"the gradient of loss_BT is finite: {gradient_BT}"
        return found, gradient_BT

    def test_losses_and_gradients_are_finite(self, policy_loss: Any) -> None:
        for shift in (0.0, 100.0, -100.0):
            for advantage in (0.0, 10.0, -10.0):
                new_BT = torch.tensor([[-200.0, 0.0, -1.0, -1.0], [-100.0, -0.1, 0.0, 0.0]])
                self.compute(policy_loss, new_BT, new_BT - shift, torch.full((2, 1), advantage), MASK_BT[:2])
        self.compute(policy_loss, mask_BT=torch.zeros_like(MASK_BT))

    def test_good_tokens_become_more_likely_and_bad_ones_not(self, policy_loss: Any) -> None:
        for advantage, promise in (
            (1.0, "a step against the gradient makes tokens with a positive advantage more likely"),
            (-1.0, "a step against the gradient makes no token with a negative advantage more likely"),
            (0.0, "tokens without an advantage have no gradient"),
        ):
            _, gradient_BT = self.compute(policy_loss, OLD_BT, OLD_BT, torch.full((3, 1), advantage))
            of_tokens = gradient_BT[MASK_BT > 0]
            holds = {1.0: of_tokens < 0, -1.0: of_tokens >= 0, 0.0: of_tokens == 0}[advantage]
            assert bool(holds.all()), f"{promise}; the gradient is {of_tokens.tolist()}"

    def test_tokens_outside_the_mask_have_no_effect(self, policy_loss: Any) -> None:
        found, gradient_BT = self.compute(policy_loss)
        other_BT = (1 - MASK_BT) * -5.0
        changed, changed_BT = self.compute(policy_loss, NEW_BT + other_BT, OLD_BT + other_BT / 2)
        promise = "tokens where mask_BT is 0 change neither loss nor gradient of other tokens"
        assert torch.allclose(found.loss_BT * MASK_BT, changed.loss_BT * MASK_BT), promise
        assert torch.allclose(gradient_BT, changed_BT), promise
        assert not gradient_BT[MASK_BT == 0].any(), "tokens where mask_BT is 0 have no gradient"

    def test_a_row_does_not_depend_on_other_rows(self, policy_loss: Any) -> None:
        whole, gradient_BT = self.compute(policy_loss)
        for row in range(len(MASK_BT)):
            part = slice(row, row + 1)
            rows = [each[part] for each in (NEW_BT, OLD_BT, ADVANTAGE_B1, MASK_BT)]
            alone, alone_BT = self.compute(policy_loss, *rows, is_part=True)
            promise = f"the loss of a row depends on this row only, however a batch is split: row {row}"
            assert torch.allclose(whole.loss_BT[part] * MASK_BT[part], alone.loss_BT * MASK_BT[part]), promise
            assert torch.allclose(gradient_BT[part], alone_BT), promise

    def test_an_advantage_may_be_given_for_each_row_or_each_token(self, policy_loss: Any) -> None:
        by_row, _ = self.compute(policy_loss)
        by_token, _ = self.compute(policy_loss, advantage_BT=ADVANTAGE_B1.expand_as(MASK_BT).contiguous())
        promise = "advantage_BT broadcasts: [B, 1] means the same as [B, T]"
        assert torch.allclose(by_row.loss_BT * MASK_BT, by_token.loss_BT * MASK_BT), promise

    def test_the_ratio_and_its_clipping_are_reported(self, policy_loss: Any) -> None:
        found, _ = self.compute(policy_loss)
        promise = "log_ratio_BT is logprob_BT - old_logprob_BT, without gradient"
        assert not found.log_ratio_BT.requires_grad, promise
        assert torch.allclose(found.log_ratio_BT * MASK_BT, (NEW_BT - OLD_BT) * MASK_BT), promise
        for name in ("clipped_BT", "dual_clipped_BT"):
            values = getattr(found, name)
            assert set(values.unique().tolist()) <= {0.0, 1.0}, (
                f"{name} is 1 where the gradient was removed, else 0: {values}"
            )
