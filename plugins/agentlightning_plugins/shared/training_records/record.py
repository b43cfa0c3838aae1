"""Training records, their form as spans in the trace of the rollout, and helpers to make them."""

from __future__ import annotations

import base64
import hashlib
import logging
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, Final, Literal, NotRequired, TypeAlias, TypeVar

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, with_config
from typing_extensions import TypedDict  # pydantic refuses typing's before Python 3.12

from agentlightning import semconv
from agentlightning.store.lifecycle import MODEL_ERROR
from agentlightning.types import Span, Triplet

logger = logging.getLogger("agentlightning")

ROW_SPAN: Final = semconv.TRAINING
"""Name of the span of a trained row."""
LEDGER_SPAN: Final = f"{semconv.TRAINING}.rollout"
"""Name of the span with the outcome of a rollout; each rollout of a batch has one such span per step."""

Outcome: TypeAlias = Literal[
    "trained", "failed", "model_error", "no_reward", "no_calls", "spans_dropped", "unreadable_spans", "filtered",
    "flat_group", "no_tokens", "untrusted", "no_logprobs", "repeated", "side_call", "given_up", "too_long", "stale",
    "cut_off", "mismatch", "baseline", "unusable_images", "not_finite", "cancelled", "unfinished", "not_recorded",
]  # fmt: skip
OUTCOMES: Final[Mapping[Outcome, str]] = {
    "trained": "the weights were trained on it",
    "failed": "it failed, so it has no reward to compare",
    "model_error": "its last model call failed",
    "no_reward": "it has no reward to compare",
    "no_calls": "it called no model",
    "spans_dropped": "its trace is incomplete",
    "unreadable_spans": "its trace is wrong",
    "filtered": "the setting rollout_filter removed it",
    "flat_group": "all rollouts of its task have the same reward",
    "no_tokens": "the model server did not report its tokens",
    "untrusted": "only the agent itself, with the token of its attempt, claims which tokens were sampled",
    "no_logprobs": "the model server did not report log-probabilities",
    "repeated": "another row contains its tokens",
    "side_call": "a coding agent made it beside its work, such as for a title; side_calls trains on such calls",
    "given_up": "the client sent its request again before it got the answer",
    "too_long": "it has more tokens than the model has positions",
    "stale": "it was sampled by weights that are too old",
    "cut_off": "its reply ended at the token limit",
    "mismatch": "sampler and trainer disagree on every token",
    "baseline": "a greedy rollout, whose reward is subtracted from its task's rewards",
    "unusable_images": "its images cannot be read or are encoded differently, or the model sampled an image token",
    "not_finite": "the loss or the gradient of its minibatch was not finite",
    "cancelled": "it was cancelled",
    "unfinished": "it has not ended yet",
    "not_recorded": "its step was interrupted before it was recorded, or the algorithm keeps no records",
}
"""Outcomes of a rollout or a call; every one except ``trained`` is a reason why it was not trained on."""

_PREFIX: Final = f"{semconv.TRAINING}."
_Number = Annotated[float, Field(strict=False)]  # not finite, it is stored as text


@with_config(ConfigDict(strict=True))
class _RowValues(TypedDict):
    """The attributes of the span of a row."""

    step: int
    outcome: Outcome
    minibatch: int
    reward: NotRequired[_Number]
    prompt_tokens: NonNegativeInt
    token_ids: str
    logprobs: str
    gap: NotRequired[str]
    token_advantages: NotRequired[str]
    token_versions: NotRequired[str]
    texts: NotRequired[list[str]]
    mask: list[NonNegativeInt]
    response_ids: list[str]
    starts: list[NonNegativeInt]
    ends: list[NonNegativeInt]
    advantages: list[_Number]
    weight_versions: NotRequired[list[int]]


_row_values: Final = TypeAdapter(_RowValues)
_LARGEST_HALF: Final = 65504.0


@dataclass(frozen=True, slots=True)
class TrainedCall:
    """One model call of a row."""

    response_id: str
    start: int
    """``response_ids[start:end]`` of the row are the tokens of this call."""
    end: int
    advantage: float
    weight_version: int | None = None


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """One sequence of tokens that the weights were trained with."""

    rollout_id: str
    attempt_id: str
    step: int
    """The version of the weights that the training step produced."""
    prompt_ids: Sequence[int]
    """Tokens before the first response."""
    response_ids: Sequence[int]
    """Sampled tokens, and the given tokens between calls; the following lists have one item for each."""
    mask: Sequence[int]
    """1 where a token was sampled and trained on."""
    logprobs: Sequence[float]
    """The sampler's log-probabilities; meaningless for given tokens."""
    trainer_logprobs: Sequence[float] | None
    """The trainer's log-probabilities when it first used the row; None if they are not known."""
    calls: Sequence[TrainedCall]
    """The calls that were trained on."""
    reward: float | None
    """Reward of the rollout, as the algorithm compared it."""
    minibatch: int = 0
    """Number of optimizer steps in this update before the trainer first used the row. A difference between both
    log-probabilities is an error only if this number is 0."""
    outcome: Outcome = "trained"
    """``trained``, ``mismatch`` or ``not_finite``."""
    texts: Mapping[int, str] = field(default_factory=dict)
    """The text of each token, by token id; empty if the texts are not known."""
    token_advantages: Sequence[float] | None = None
    """Advantages, if they differ within a call, as with a critic."""
    token_versions: Sequence[int | None] | None = None
    """Versions of the weights that sampled the tokens, None for given tokens; None if each call has one version."""

    @property
    def advantages(self) -> list[float]:
        """One advantage per token of ``response_ids``; 0 for tokens that were not trained on."""
        if self.token_advantages is not None:
            return [value if kept else 0.0 for value, kept in zip(self.token_advantages, self.mask, strict=True)]
        values = [0.0] * len(self.response_ids)
        for call in self.calls:
            values[call.start : call.end] = [call.advantage] * (call.end - call.start)
        return [value * kept for value, kept in zip(values, self.mask, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Converts to plain JSON values; numbers that are not finite become None."""
        return {
            **{name: getattr(self, name) for name in ("rollout_id", "attempt_id", "step", "reward", "outcome")},
            "minibatch": self.minibatch,
            "calls": [{name: getattr(call, name) for name in call.__slots__} for call in self.calls],
            "prompt_ids": list(self.prompt_ids),
            "response_ids": list(self.response_ids),
            "mask": list(self.mask),
            "logprobs": _finite(self.logprobs),
            "trainer_logprobs": None if self.trainer_logprobs is None else _finite(self.trainer_logprobs),
            "advantages": self.advantages,
            "token_versions": None if self.token_versions is None else list(self.token_versions),
            "prompt": [self.texts.get(token) for token in self.prompt_ids],
            "response": [self.texts.get(token) for token in self.response_ids],
        }

    def to_span(self) -> Span:
        """Converts to a span. Arrays are base64 of little-endian numbers; ``mask`` is run lengths, ones first."""
        ids = [call.response_id for call in self.calls]
        trained = sum(self.mask)
        runs = [sum(1 for _ in run) for _, run in groupby(self.mask)]
        values: dict[str, Any] = {
            "step": self.step,
            "outcome": self.outcome,
            "minibatch": self.minibatch,
            "advantage": sum(self.advantages) / trained if trained else 0.0,
            "tokens": trained,
            "prompt_tokens": len(self.prompt_ids),
            "token_ids": _pack("i", [*self.prompt_ids, *self.response_ids]),
            "logprobs": _pack("f", self.logprobs),
            "mask": runs if self.mask and self.mask[0] else [0, *runs],
            "response_ids": ids,
            "starts": [call.start for call in self.calls],
            "ends": [call.end for call in self.calls],
            "advantages": [float(call.advantage) for call in self.calls],
        }
        if self.reward is not None:
            values["reward"] = self.reward
        if self.trainer_logprobs is not None:  # half precision is enough for a difference
            pairs = zip(self.trainer_logprobs, self.logprobs, self.mask, strict=True)
            values["gap"] = _pack("e", [theirs - ours if kept else 0.0 for theirs, ours, kept in pairs])
        if self.token_advantages is not None:
            values["token_advantages"] = _pack("e", self.advantages)
        if self.texts:
            values["texts"] = [self.texts.get(token, "") for token in sorted({*self.prompt_ids, *self.response_ids})]
        if self.token_versions is not None:
            values["token_versions"] = _pack("i", [-1 if found is None else found for found in self.token_versions])
        versions = [call.weight_version for call in self.calls]
        if None not in versions:
            values["weight_versions"] = versions
        return _make_span(ROW_SPAN, self.rollout_id, self.attempt_id, values, str(ids), ids[-1] if ids else "")

    @classmethod
    def from_span(cls, span: Span) -> TrainedRow:
        """Reads the span of a row; raises ValueError if its values do not fit together."""
        values = _row_values.validate_python(_read(span))
        ids, n_prompt = _unpack("i", values["token_ids"]), values["prompt_tokens"]
        response_ids, logprobs = ids[n_prompt:], _unpack("f", values["logprobs"])
        gap = _unpack("e", values["gap"]) if "gap" in values else None
        token_advantages = _unpack("e", values["token_advantages"]) if "token_advantages" in values else None
        drawn_by = _unpack("i", values["token_versions"]) if "token_versions" in values else None
        versions: Sequence[int | None] = values.get("weight_versions") or [None] * len(values["response_ids"])
        columns = (values["response_ids"], values["starts"], values["ends"], values["advantages"], versions)
        calls = [TrainedCall(*call) for call in zip(*columns, strict=True)]
        arrays = [array for array in (logprobs, gap, token_advantages, drawn_by) if array is not None]
        lengths = {sum(values["mask"]), *map(len, arrays)}
        if lengths != {len(response_ids)} or any(not call.start <= call.end <= len(response_ids) for call in calls):
            raise ValueError(f"its lists do not describe {len(response_ids)} tokens")
        return cls(
            rollout_id=span.rollout_id,
            attempt_id=span.attempt_id,
            step=values["step"],
            prompt_ids=ids[:n_prompt],
            response_ids=response_ids,
            mask=[(place + 1) % 2 for place, length in enumerate(values["mask"]) for _ in range(length)],
            logprobs=logprobs,
            trainer_logprobs=None if gap is None else [a + b for a, b in zip(logprobs, gap, strict=True)],
            calls=calls,
            reward=values.get("reward"),
            minibatch=values["minibatch"],
            outcome=values["outcome"],
            texts=dict(zip(sorted(set(ids)), values["texts"], strict=True)) if "texts" in values else {},
            token_advantages=token_advantages,
            token_versions=drawn_by and [None if found < 0 else found for found in drawn_by],
        )


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The outcome of one rollout of a step, and of each of its calls."""

    rollout_id: str
    attempt_id: str
    step: int
    group: str
    """Rollouts of one task in one step have the same group."""
    outcome: Outcome
    reward: float | None = None
    """Reward of the rollout, as the algorithm compared it."""
    calls: Mapping[str, Outcome] = field(default_factory=dict)
    """Outcome of each call by response id, in the order of the calls; empty if the calls are not known."""
    tokens: int | None = None
    """Number of tokens sampled in all calls, if it is known."""

    def to_json(self) -> dict[str, Any]:
        """Converts to plain JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}

    def to_span(self) -> Span:
        """Converts to a span."""
        values: dict[str, Any] = {"response_ids": list(self.calls), "outcomes": list(self.calls.values())}
        names = ("step", "group", "outcome", "reward", "tokens")
        values |= {name: value for name in names if (value := getattr(self, name)) is not None}
        return _make_span(LEDGER_SPAN, self.rollout_id, self.attempt_id, values, "rollout")

    @classmethod
    def from_span(cls, span: Span) -> LedgerEntry:
        """Reads the span of a rollout; raises ValueError if its values do not fit together."""
        values = _read(span)
        names, outcomes = values.pop("response_ids", ()), values.pop("outcomes", ())
        if not isinstance(names, (list, tuple)) or not isinstance(outcomes, (list, tuple)):
            raise ValueError(f"its response ids {names!r:.100} and outcomes {outcomes!r:.100} are not lists")
        calls = dict(zip(map(str, names), outcomes, strict=True))
        ids = {"rollout_id": span.rollout_id, "attempt_id": span.attempt_id}
        return _entry.validate_python({**values, **ids, "calls": calls})


_entry: Final = TypeAdapter(LedgerEntry)
AnyRecord = TypeVar("AnyRecord", TrainedRow, LedgerEntry)


def read_records(kind: type[AnyRecord], spans: Iterable[Span]) -> list[AnyRecord]:
    """Reads the records of a kind among spans; those that cannot be read are left out with a warning."""
    records = []
    for span in spans:
        if RECORDS.get(span.name) is kind:
            try:
                records.append(kind.from_span(span))
            except ValueError as error:
                logger.warning("a training record of rollout %s is left out: %.500s", span.rollout_id, error)
    return records


RECORDS: Final[Mapping[str, type[TrainedRow | LedgerEntry]]] = {ROW_SPAN: TrainedRow, LEDGER_SPAN: LedgerEntry}
"""The kinds of records, by the name of their spans."""


def _make_span(
    name: str, rollout_id: str, attempt_id: str, values: Mapping[str, Any], place: str, response_id: str = ""
) -> Span:
    attributes = {f"{_PREFIX}{key}": value for key, value in values.items()}
    attributes[semconv.GEN_AI_OPERATION_NAME] = "train"  # keeps a span with a response id from counting as a model call
    if response_id:
        attributes[semconv.GEN_AI_RESPONSE_ID] = response_id
    # A step repeated after a kill makes spans with the same ids, which the store ignores.
    key = f"{values['step']}/{attempt_id}/{place}"
    span_id = semconv.TRAINING_ID + hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return Span.from_attributes(
        attributes=attributes, rollout_id=rollout_id, attempt_id=attempt_id, span_id=span_id, name=name
    )


def _read(span: Span) -> dict[str, Any]:
    return {key.removeprefix(_PREFIX): value for key, value in span.attributes.items() if key.startswith(_PREFIX)}


def _pack(kind: str, values: Sequence[float]) -> str:
    if kind == "e":
        values = [max(-_LARGEST_HALF, min(_LARGEST_HALF, value)) for value in values]
    return base64.b64encode(struct.pack(f"<{len(values)}{kind}", *values)).decode("ascii")


def _unpack(kind: str, text: str) -> list[Any]:
    data = base64.b64decode(text, validate=True)
    count, rest = divmod(len(data), struct.calcsize(f"<{kind}"))
    if rest:
        raise ValueError(f"{len(data)} bytes are not a whole number of values")
    return list(struct.unpack(f"<{count}{kind}", data))


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if value - value == 0 else None for value in values]


_UNUSABLE: Final[Mapping[str, Outcome]] = {
    "SpansDropped": "spans_dropped",
    "AdapterError": "unreadable_spans",
    MODEL_ERROR: "model_error",
}


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
    unused: Outcome | None = call.metadata.get("unused")
    if unused is not None:
        return unused
    if not call.prompt.get("token_ids") or not call.response.get("token_ids"):
        return "untrusted" if call.metadata.get("untrusted") else "no_tokens"
    return "repeated" if call.response.get("logprobs") else "no_logprobs"
