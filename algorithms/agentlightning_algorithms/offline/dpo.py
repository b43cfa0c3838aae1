"""The algorithm ``dpo``: trains a model's weights on pairs of rollouts of one task, or pairs of answers in a file."""

from __future__ import annotations

import math
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from pydantic import BaseModel

from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import require_least
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Rollout
from agentlightning_algorithms.offline.training import OfflineTraining, make_rows, mean_metrics
from agentlightning_algorithms.shared.policy.model import Policy
from agentlightning_algorithms.shared.policy.server.request import read_messages
from agentlightning_algorithms.shared.policy.settings import Aggregation
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_algorithms.shared.policy.updater import Updater
from agentlightning_plugins.shared.chat_history import FineTuningExample, PreferencePair, select_pairs

LossName = Literal["sigmoid", "ipo", "hinge"]


class _Input(BaseModel):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class _Line(BaseModel):
    """A line of a file in the format of OpenAI's preference fine-tuning."""

    input: _Input
    preferred_output: list[dict[str, Any]]
    non_preferred_output: list[dict[str, Any]]

    def to_pair(self) -> PreferencePair:
        given = [{**message, "weight": 0} for message in self.input.messages]  # given to both sides, so not learned
        both = [
            [FineTuningExample(messages=[*given, *answer], tools=self.input.tools)]
            for answer in (self.preferred_output, self.non_preferred_output)
        ]
        return PreferencePair(chosen=both[0], rejected=both[1])


class _Pair(NamedTuple):
    """The rows of two rollouts, and their difference in log-likelihood under the reference."""

    chosen: list[TrainingRow]
    rejected: list[TrainingRow]
    reference: float
    """Log-likelihood of the chosen rollout minus log-likelihood of the rejected one, under the reference."""


class PairLoss(NamedTuple):
    """The loss of a pair, and its derivative with respect to the margin."""

    value: float
    slope: float


class _ScoredPair(NamedTuple):
    """A pair under the current weights."""

    logprobs: list[list[list[float]]]
    """Log-probabilities of the chosen rows and of the rejected rows, by token."""
    margin: float
    loss: PairLoss


def _describe(pairs: Sequence[_ScoredPair]) -> dict[str, float]:
    return {
        "loss": statistics.fmean(pair.loss.value for pair in pairs),
        "accuracy": statistics.fmean(float(pair.margin > 0) for pair in pairs),
        "margin": statistics.fmean(pair.margin for pair in pairs),
    }


@dataclass(kw_only=True, eq=False, repr=False)
class DPO(OfflineTraining):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and its relatives.

    Of two rollouts of one task, the one with the higher reward becomes more likely and the other less likely, relative
    to the initial model. A rollout stands for all of its assistant messages. The agent is not run.

    Raises:
        ConfigError: a value out of range, or a ``model`` that is a path without a model.
    """

    name: ClassVar[str] = "dpo"
    form: ClassVar[str] = '{"input": {"messages": [...]}, "preferred_output": [...], "non_preferred_output": [...]}'
    aggregation: ClassVar[Aggregation] = "token-sum"

    loss: LossName = "sigmoid"
    """``sigmoid`` (DPO), ``ipo`` or ``hinge``."""
    beta: float = 0.1
    """How strongly the policy is held near the initial model; a smaller value lets the policy move further."""
    label_smoothing: float = 0.0
    """For ``sigmoid``, the probability that the order of a pair is wrong."""
    min_gap: float = 0.0
    """Minimum difference between the rewards of a pair of rollouts."""
    pairs_per_task: int | None = 1
    """Pairs per task: best rollout with worst, second best with second worst, and so on; None: as many as possible."""

    def __post_init__(self) -> None:
        if self.loss not in get_args(LossName):
            raise ConfigError(f"loss = {self.loss!r}; it must be one of {', '.join(get_args(LossName))}.")
        if not self.beta > 0:
            raise ConfigError(f"beta = {self.beta}; it must be above 0.")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing = {self.label_smoothing}; it must be from 0 to below 0.5.")
        require_least(0, min_gap=self.min_gap)
        require_least(1, pairs_per_task=self.pairs_per_task)
        super().__post_init__()

    def parse_line(self, line: Any) -> PreferencePair:
        parsed = _Line.model_validate(line)
        read_messages(parsed.input.messages, "input.messages")
        read_messages(parsed.preferred_output, "preferred_output")
        read_messages(parsed.non_preferred_output, "non_preferred_output")
        return parsed.to_pair()

    def select(self, store: LightningStore, rollouts: Sequence[Rollout] | None = None) -> AsyncIterator[PreferencePair]:
        return select_pairs(store, self.min_gap, self.pairs_per_task, rollouts)

    @property
    def missing(self) -> str:
        return (
            "pair to learn from; a pair is two rollouts of a task that succeeded, called a model, are not of "
            f"validation or test, and whose rewards differ, by at least min_gap = {self.min_gap}"
        )

    def prepare(self, policy: Policy, examples: Sequence[PreferencePair]) -> list[_Pair]:
        too_long = 0
        rows: list[tuple[list[TrainingRow], list[TrainingRow]]] = []
        for pair in examples:
            (chosen, chosen_too_long), (rejected, rejected_too_long) = (
                make_rows(policy, each) for each in (pair.chosen, pair.rejected)
            )
            if chosen_too_long or rejected_too_long:
                too_long += 1
            elif chosen and rejected:
                rows.append((chosen, rejected))
        self.warn_too_long(too_long, "pairs", policy)
        flat = [row for pair in rows for side in pair for row in side]
        self.require_targets(policy, flat, "pair")
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=self.dtype != "float32"):  # as the updater
            scores = iter(policy.score(flat, max_tokens=self.max_tokens_per_microbatch))
        pairs = []
        for chosen, rejected in rows:
            sides = [sum(sum(next(scores)) for _ in side) / self._length(side) for side in (chosen, rejected)]
            pairs.append(_Pair(chosen, rejected, sides[0] - sides[1]))
        return pairs

    def describe_epoch(self, steps: Sequence[Mapping[str, float]], n_items: int) -> dict[str, float]:
        metrics = mean_metrics(steps, ("loss", "accuracy", "margin", "grad_norm", "lr"))
        return {**metrics, "pairs": float(n_items)}

    def _length(self, side: Sequence[TrainingRow]) -> int:
        """Returns the divisor of an answer's log-likelihood."""
        return sum(row.n_sampled for row in side) if self.loss == "ipo" else 1

    def step(self, updater: Updater, pairs: Sequence[_Pair]) -> dict[str, float]:
        """Makes an optimizer step.

        A token's gradient is its log-probability's gradient times the slope of its pair's loss. A forward pass without
        gradient gives the margins, hence the slopes, so the rows of a pair need not share a micro-batch.
        """
        weighted: list[TrainingRow] = []
        scored = self._score(updater, pairs)
        for pair, (own, _, (_, slope)) in zip(pairs, scored, strict=True):
            for side, logprobs, sign in ((pair.chosen, own[0], -1), (pair.rejected, own[1], 1)):
                weight = sign * slope / self._length(side) / len(pairs)
                weighted += [
                    replace(row, logprobs=found, advantage=weight) for row, found in zip(side, logprobs, strict=True)
                ]
        updater.forward_backward(weighted)
        done = updater.optim_step()
        return {**{name: done[name] for name in ("grad_norm", "lr") if name in done}, **_describe(scored)}

    def validate(self, updater: Updater, items: Sequence[_Pair]) -> dict[str, float]:
        return {f"val_{name}": value for name, value in _describe(self._score(updater, items)).items()}

    def _score(self, updater: Updater, pairs: Sequence[_Pair]) -> list[_ScoredPair]:
        """Returns log-probabilities, margin and loss of each pair under the current weights."""
        rows = [row for pair in pairs for side in (pair.chosen, pair.rejected) for row in side]
        scores = iter(updater.score(rows))
        found = []
        for pair in pairs:
            sides = pair.chosen, pair.rejected
            own = [[next(scores) for _ in side] for side in sides]
            chosen, rejected = (sum(map(sum, each)) / self._length(side) for each, side in zip(own, sides, strict=True))
            margin = chosen - rejected - pair.reference
            loss = pair_loss(margin, self.loss, self.beta, self.label_smoothing)
            found.append(_ScoredPair(own, margin, loss))
        return found


def pair_loss(margin: float, loss: LossName, beta: float, label_smoothing: float = 0.0) -> PairLoss:
    """Returns the loss of one pair.

    The margin is the difference, between the chosen and the rejected answer, of log(policy / reference), summed over
    the tokens of an answer (``ipo``: averaged).

        sigmoid   -log sigmoid(beta margin)           DPO, Rafailov et al. 2023, arXiv:2305.18290
        ipo       (margin - 1 / (2 beta))^2           Azar et al. 2023, arXiv:2310.12036
        hinge     max(0, 1 - beta margin)             SLiC-HF, Zhao et al. 2023, arXiv:2305.10425

    Args:
        margin: see above.
        loss: see above.
        beta: how strongly the policy is held near the reference; above 0.
        label_smoothing: for ``sigmoid``, the probability that a label is wrong (conservative DPO, Mitchell 2023).
    """
    if loss == "ipo":
        distance = margin - 1.0 / (2.0 * beta)
        return PairLoss(distance * distance, 2.0 * distance)
    if loss == "hinge":
        missing = 1.0 - beta * margin
        return PairLoss(missing, -beta) if missing > 0 else PairLoss(0.0, 0.0)
    logit = beta * margin
    share = label_smoothing
    value = (1.0 - share) * _softplus(-logit) + share * _softplus(logit)
    return PairLoss(value, beta * (_sigmoid(logit) - (1.0 - share)))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
