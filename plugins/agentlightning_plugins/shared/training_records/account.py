"""Outcomes of rollouts, names and versions of calls, and texts of tokens, for training records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agentlightning.types import Triplet
from agentlightning_plugins.shared.training_records.record import LedgerEntry, Outcome

_UNUSABLE: Final[Mapping[str, Outcome]] = {"SpansDropped": "spans_dropped", "AdapterError": "unreadable_spans"}


@dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """The facts that determine the outcome of a rollout after a training step."""

    rollout_id: str
    attempt_id: str
    group: str
    reward: float | None
    """Reward of the rollout, as the algorithm compared it."""
    error: str = ""
    """Type of the rollout's error; ``SpansDropped`` and ``AdapterError`` mean that its spans are unusable."""
    has_failed: bool = False
    tokens: int | None = None
    """Number of tokens sampled in all calls."""

    def to_entry(self, step: int, calls: Mapping[str, Outcome]) -> LedgerEntry:
        """Returns the ledger entry, given the outcome of each call by response id.

        If any call was trained on, so was the rollout; otherwise the most frequent outcome of its calls counts.
        """
        whole = _UNUSABLE.get(self.error)
        if whole is None and self.reward is None:
            whole = "failed" if self.has_failed else "no_reward"
        if whole is None and not calls:
            whole = "failed" if self.has_failed else "no_calls"
        outcomes = Counter(calls.values())
        outcome = whole or ("trained" if outcomes["trained"] else outcomes.most_common(1)[0][0])
        shown = calls if whole is None else dict.fromkeys(calls, whole)
        return LedgerEntry(self.rollout_id, self.attempt_id, step, self.group, outcome, self.reward, shown, self.tokens)


@dataclass(slots=True)
class TokenTexts:
    """Texts of tokens; each token is decoded once."""

    decode: Callable[[Sequence[int]], str] | None
    """The tokenizer's method; None if the texts are not known."""
    _known: dict[int, str] = field(default_factory=dict)

    def read(self, *sequences: Iterable[int]) -> dict[int, str]:
        """Returns the text of each token in the sequences, by token id."""
        if self.decode is None:
            return {}
        tokens = {token for sequence in sequences for token in sequence}
        for token in tokens - self._known.keys():
            self._known[token] = self.decode([token])
        return {token: self._known[token] for token in tokens}


def call_keys(calls: Sequence[Triplet]) -> list[str]:
    """Returns a name for each call of a rollout: its response id or, if it has none, its position."""
    return [read_id(call) or f"call {place}" for place, call in enumerate(calls)]


def read_id(call: Triplet) -> str:
    """Returns the response id of a call, or an empty string."""
    return str(call.metadata.get("response_id") or "")


def read_version(call: Triplet) -> int | None:
    """Returns the version of the weights that answered a call, if it is known."""
    version = call.metadata.get("weight_version")
    return version if isinstance(version, int) else None


def count_sampled(calls: Iterable[Triplet]) -> int:
    """Returns the number of tokens that the model sampled in calls."""
    return sum(len(call.response.get("token_ids") or ()) for call in calls)


def explain_unused(call: Triplet) -> Outcome:
    """Returns the reason why a call is not part of a trajectory."""
    if not call.prompt.get("token_ids") or not call.response.get("token_ids"):
        return "no_tokens"
    return "repeated" if call.response.get("logprobs") else "no_logprobs"
