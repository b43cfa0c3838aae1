"""Outcomes of rollouts, and names, versions and texts of calls, for training records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agentlightning.types import Triplet
from agentlightning_plugins.training_records.record import LedgerEntry, Outcome

_UNUSABLE: Final[Mapping[str, Outcome]] = {"SpansDropped": "spans_dropped", "AdapterError": "unreadable_spans"}


@dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """The facts of a rollout from which its outcome follows when a step has trained on it."""

    rollout_id: str
    attempt_id: str
    group: str
    reward: float | None
    """As the algorithm compared it."""
    error: str = ""
    """Type of the error that it failed with; ``SpansDropped`` and ``AdapterError`` make its spans unusable."""
    has_failed: bool = False
    tokens: int | None = None
    """Sampled in all calls."""

    def to_entry(self, step: int, calls: Mapping[str, Outcome]) -> LedgerEntry:
        """Returns the entry of the ledger, given the outcome of each call by response id.

        A rollout of which one call was trained on was trained on; otherwise its most frequent reason counts.
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
    """The tokenizer's; None: the texts are not known."""
    _known: dict[int, str] = field(default_factory=dict)

    def read(self, *sequences: Iterable[int]) -> dict[int, str]:
        """Returns the text of each token of sequences, by its id."""
        if self.decode is None:
            return {}
        tokens = {token for sequence in sequences for token in sequence}
        for token in tokens - self._known.keys():
            self._known[token] = self.decode([token])
        return {token: self._known[token] for token in tokens}


def call_keys(calls: Sequence[Triplet]) -> list[str]:
    """Returns a name for each call of a rollout: its response id, or its place where it has none."""
    return [read_id(call) or f"call {place}" for place, call in enumerate(calls)]


def read_id(call: Triplet) -> str:
    """Returns the response id of a call; empty where it has none."""
    return str(call.metadata.get("response_id") or "")


def read_version(call: Triplet) -> int | None:
    """Returns the version of the weights that answered a call, if it is known."""
    version = call.metadata.get("weight_version")
    return version if isinstance(version, int) else None


def count_sampled(calls: Iterable[Triplet]) -> int:
    """Returns the number of tokens that the model sampled in calls."""
    return sum(len(call.response.get("token_ids") or ()) for call in calls)


def explain_unused(call: Triplet) -> Outcome:
    """Returns why a call became part of no trajectory."""
    if not call.prompt.get("token_ids") or not call.response.get("token_ids"):
        return "no_tokens"
    return "repeated" if call.response.get("logprobs") else "no_logprobs"
