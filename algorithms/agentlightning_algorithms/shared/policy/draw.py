"""Drawing of tokens from logits, each row with its own parameters, on the logits' device.

n   rows
V   vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one response.

    Attributes:
        max_tokens: maximum length, stop token included; the caller checks that prompt and response fit the model.
        temperature: 0 takes the likeliest token; its log-probabilities are at temperature 1, unfiltered.
        top_p: keep the smallest set of likeliest tokens with at least this probability.
        top_k: keep this many likeliest tokens; 0 keeps all. Applied before ``top_p``.
        stop: end as soon as the text contains one of these.
        seed: makes the response repeatable whatever else is in the batch, up to rounding in the model's arithmetic.
        top_logprobs: how many likeliest tokens to report at each position.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int | str | None = None
    top_logprobs: int = 0


class Token(NamedTuple):
    """A sampled token. Its log-probabilities are under the distribution that it was drawn from, filters included."""

    token_id: int
    logprob: float
    top_logprobs: Sequence[tuple[int, float]]
    """Token ids and log-probabilities, likeliest first; empty unless requested."""
    weight_version: int


class Generation(NamedTuple):
    """A sampled response."""

    tokens: list[Token]
    """The sampled tokens, including the stop token if one ended the response."""
    finish_reason: FinishReason
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were reused."""

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def weight_version(self) -> int:
        """Weights version of the first token, which is the oldest."""
        return self.tokens[0].weight_version

    @property
    def weight_versions(self) -> list[int] | None:
        """Weights version of each token; None if all are the same."""
        first, last = self.tokens[0].weight_version, self.tokens[-1].weight_version
        return None if first == last else [token.weight_version for token in self.tokens]


class Draw(NamedTuple):
    """One token per row, and the distribution it was drawn from."""

    token_n: Tensor
    logprob_n: Tensor
    logprobs_nV: Tensor
    """Log-probabilities after temperature, top-k and top-p; minus infinity where filtered out."""


def draw_tokens(logits_nV: Tensor, params: Sequence[SamplingParams], uniform_n: Sequence[float]) -> Draw:
    """Draws one token per row from float32 logits.

    The cumulative distribution is inverted at one uniform number in [0, 1) per row, so that a row's token depends on
    its own random numbers only. Greedy rows do not use their number.
    """
    device = logits_nV.device
    if any(p.temperature not in (0.0, 1.0) for p in params):
        logits_nV = logits_nV / torch.tensor([p.temperature or 1.0 for p in params], device=device)[:, None]
    filtered = [i for i, p in enumerate(params) if p.temperature and (p.top_k or p.top_p < 1.0)]
    if filtered:
        rows = torch.tensor(filtered, device=device)
        top_k_n = torch.tensor([params[i].top_k for i in filtered], device=device)
        top_p_n = torch.tensor([params[i].top_p for i in filtered], device=device)
        logits_nV = logits_nV.index_copy(0, rows, filter_logits(logits_nV[rows], top_k_n, top_p_n))
    logprobs_nV = torch.log_softmax(logits_nV, dim=-1)

    cumulative_nV = logprobs_nV.double().exp().cumsum(-1)
    total_n = cumulative_nV[:, -1]
    # Rounding must not reach the total, where only tokens of probability 0 lie.
    point_n = torch.tensor(uniform_n, dtype=torch.float64, device=device) * total_n
    point_n = torch.minimum(point_n, torch.nextafter(total_n, torch.zeros_like(total_n)))
    token_n = torch.searchsorted(cumulative_nV, point_n[:, None], right=True).squeeze(1)
    token_n = token_n.clamp(max=logits_nV.shape[-1] - 1)  # comparisons with NaN logits are false
    if any(not p.temperature for p in params):
        greedy_n = torch.tensor([not p.temperature for p in params], device=device)
        token_n = torch.where(greedy_n, logits_nV.argmax(-1), token_n)
    return Draw(token_n, logprobs_nV.gather(1, token_n[:, None]).squeeze(1), logprobs_nV)


def filter_logits(logits_nV: Tensor, top_k_n: Tensor, top_p_n: Tensor) -> Tensor:
    """Sets logits outside top-k (0: all), and outside top-p of the rest, to minus infinity; never the likeliest."""
    size = logits_nV.shape[-1]
    ordered_nV, order_nV = logits_nV.sort(dim=-1, descending=True)
    top_k_n = torch.where(top_k_n > 0, top_k_n, size)
    ranks = torch.arange(size, device=logits_nV.device)
    ordered_nV = ordered_nV.masked_fill(ranks >= top_k_n[:, None], -torch.inf)
    probability_nV = ordered_nV.softmax(-1)
    before_nV = probability_nV.cumsum(-1) - probability_nV
    out_nV = before_nV >= top_p_n[:, None]
    out_nV[:, 0] = False
    return torch.empty_like(logits_nV).scatter(1, order_nV, ordered_nV.masked_fill(out_nV, -torch.inf))
