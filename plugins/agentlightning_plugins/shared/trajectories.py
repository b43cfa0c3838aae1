"""Trajectories: consecutive model calls joined into one sequence of tokens.

Calls are joined if the prompt of one starts with exactly the prompt and the response of the other; training then takes
one pass instead of two. Tokens are never rewritten: if a conversation continues with different tokens, a new
trajectory starts, and the reason is counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from agentlightning import semconv
from agentlightning.adapter.adapter import TraceAdapter, reading
from agentlightning.adapter.triplet import BROKE_OFF, TraceToTriplet
from agentlightning.types import Span, Triplet
from agentlightning_plugins.shared.chat_history import find_first_edit, link_calls, read_answer, read_messages

MismatchKind: TypeAlias = Literal["template", "retokenisation", "other"]
"""``template``: the chat template renders past messages differently, such as without their reasoning.
``retokenisation``: the same text became other tokens. ``other``: the agent changed the conversation."""

_RUN: Final = 8
"""Number of equal tokens after which two sequences count as realigned."""
_MAX_SHIFT: Final = 24
"""Maximum number of differing tokens on either side before the sequences realign."""


class Mismatch(NamedTuple):
    """A call that continues a conversation but starts a new trajectory."""

    kind: MismatchKind
    response_id: str | None
    """Response id of this call."""
    previous_response_id: str | None
    """Response id of the call whose conversation this call continues."""
    position: int
    """Index of the first token of the prompt that differs; for an edited history, index of the first message."""
    explanation: str
    """One sentence for users."""


LeftOut: TypeAlias = Literal["no_tokens", "no_logprobs", "repeated", "side_call", "given_up"]
"""``side_call``: the agent made it beside its work, such as for a title. ``given_up``: the client tried again.
``repeated``: the call has the same tokens as another call, and a later call continues the other one."""
Irregularity: TypeAlias = Literal["broke_off", "several_roots"]
"""``broke_off``: a call broke off at the gateway. ``several_roots``: one agent began several conversations."""
Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Converts tokens to text, including special ones."""

_CHUNK = 16
"""Tokens per hash."""


class Turn(NamedTuple):
    """One model call in its trajectory."""

    triplet: Triplet
    start: int
    """``ids[start:end]`` is the response of this call."""
    end: int


@dataclass(slots=True)
class Trajectory:
    """One sequence of tokens; ``ids``, ``mask`` and ``logprobs`` have the same length."""

    ids: list[int] = field(default_factory=list)
    """The first prompt, followed by responses and the tokens that the agent added between them."""
    mask: list[int] = field(default_factory=list)
    """1 where the model sampled the token, 0 where it was given."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the sampled tokens, as reported by the model server; 0.0 elsewhere."""
    turns: list[Turn] = field(default_factory=list)
    """The calls, in order; ``turn.triplet.reward`` is the reward of each."""
    is_root: bool = True
    """False if the first call continues another call's conversation with different tokens."""

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first response."""
        return self.turns[0].start if self.turns else 0

    def extend(self, triplet: Triplet) -> None:
        """Adds a call whose prompt starts with ``ids``."""
        given = triplet.prompt["token_ids"][len(self.ids) :]
        response = triplet.response["token_ids"]
        self.ids += given
        start = len(self.ids)
        self.ids += response
        self.mask += [0] * len(given) + [1] * len(response)
        self.logprobs += [0.0] * len(given)
        self.logprobs += triplet.response["logprobs"]
        self.turns.append(Turn(triplet, start, len(self.ids)))


@dataclass(frozen=True, slots=True)
class Trajectories:
    """The trajectories of one attempt."""

    trajectories: list[Trajectory]
    """The trajectories, in the order of their first calls."""
    mismatches: list[Mismatch]
    """Calls that continue a conversation but not its tokens."""
    left_out: Mapping[LeftOut, int]
    """Number of calls that cannot be trained on, by reason."""
    irregularities: Mapping[Irregularity, int] = field(default_factory=dict)
    """Number of calls that broke off, and of conversations that an agent began after its first; zeros are omitted."""

    @property
    def counts(self) -> dict[MismatchKind, int]:
        """Number of mismatches of each kind, including zeros."""
        counts = Counter(mismatch.kind for mismatch in self.mismatches)
        return {kind: counts[kind] for kind in get_args(MismatchKind)}


class TraceToTrajectories(TraceAdapter[Trajectories]):
    """Joins the calls of an attempt into trajectories; the masks of an attempt with irregularities are 0."""

    def __init__(self, source: TraceToTriplet | dict[str, Any] | None = None) -> None:
        """``source`` is the adapter that creates the triplets, or its settings."""
        self.source = TraceToTriplet(**source) if isinstance(source, dict) else source or TraceToTriplet()

    def adapt(self, source: Sequence[Span], /) -> Trajectories:
        """Builds the trajectories of one attempt; raises AdapterError as ``TraceToTriplet.adapt`` does."""
        with reading(source):
            found = build_trajectories(self.source.adapt(source))
        roots = Counter(
            tuple(trajectory.turns[0].triplet.metadata.get(name) for name in ("agent_name", "conversation_id"))
            for trajectory in found.trajectories
            if trajectory.is_root
        )
        counts: dict[Irregularity, int] = {
            "broke_off": self.source.explain_left_out(source).get(BROKE_OFF, 0),
            "several_roots": sum(number - 1 for number in roots.values()),
        }
        irregularities = {kind: number for kind, number in counts.items() if number}
        if irregularities:
            for trajectory in found.trajectories:
                trajectory.mask = [0] * len(trajectory.mask)
        return replace(found, irregularities=irregularities)


def build_trajectories(triplets: Sequence[Triplet], *, decode: Decode | None = None) -> Trajectories:
    """Joins the triplets of one attempt, in time linear in their tokens.

    A call continues the longest trajectory that its prompt starts with. If several calls continue from the same point,
    the first extends the trajectory, and the others start new ones. If several trajectories have the same tokens and
    turns, one of them is continued, and the others are excluded.

    Args:
        triplets: in the order of their calls.
        decode: used to tell the kinds of mismatches apart exactly; without it, they are inferred from the tokens.
    """
    index = _Index()
    trajectories: dict[int, Trajectory] = {}
    of_triplet: dict[int, Trajectory] = {}
    mismatches: list[Mismatch] = []
    left_out: Counter[LeftOut] = Counter()
    known: dict[tuple[Any, str], int] = {}
    for position, (triplet, previous) in enumerate(zip(triplets, link_calls(triplets), strict=True)):
        reason = _reason_to_leave_out(triplet)
        if reason is not None:
            left_out[reason] += 1
            continue
        trajectory, repeated = index.take(triplet.prompt["token_ids"])
        if repeated:
            left_out["repeated"] += sum(len(each.turns) for each in repeated)
            for other in repeated:
                del trajectories[id(other)]
        if trajectory is None:
            mismatch = None
            if previous in of_triplet:
                mismatch = explain_mismatch(triplets[previous], triplet, decode)
            else:
                mismatch = explain_edit(position, triplets, known, previous)
            mismatches += [mismatch] if mismatch else []
            trajectory = Trajectory(is_root=mismatch is None)
            trajectories[id(trajectory)] = trajectory
        trajectory.extend(triplet)
        of_triplet[position] = trajectory
        index.add(trajectory)
        known |= dict.fromkeys(_answer_keys(triplet, [read_answer(triplet) or {}]), position)
    return Trajectories(list(trajectories.values()), mismatches, dict(left_out))


def _reason_to_leave_out(triplet: Triplet) -> LeftOut | None:
    prompt, response = triplet.prompt, triplet.response
    unused: LeftOut | None = triplet.metadata.get("unused")
    if unused is not None:
        return unused
    if not prompt.get("token_ids") or not response.get("token_ids"):
        return "no_tokens"
    logprobs = response.get("logprobs")
    return "no_logprobs" if logprobs is None or len(logprobs) != len(response["token_ids"]) else None


class _Index:
    """Finds the trajectories that a prompt may continue by hashes of chunks, without comparing it with all of them.

    The key of a trajectory consists of the hash of its whole chunks and the tokens after them. For each prefix of whole
    chunks of a prompt, ``take`` looks up the hash and compares the trajectories found there.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], dict[tuple[int, ...], list[Trajectory]]] = {}

    def add(self, trajectory: Trajectory) -> None:
        ids = trajectory.ids
        key = _chunk_keys(ids)[-1]
        self._open.setdefault(key, {}).setdefault(tuple(ids[key[0] * _CHUNK :]), []).append(trajectory)

    def take(self, prompt: Sequence[int]) -> tuple[Trajectory | None, list[Trajectory]]:
        """Removes and returns the latest of the longest trajectories that a prompt starts with, and its repetitions."""
        for key in reversed(_chunk_keys(prompt)):
            by_tail = self._open.get(key)
            if not by_tail:
                continue
            start = key[0] * _CHUNK
            for end in range(min(start + _CHUNK - 1, len(prompt)), start - 1, -1):
                same = by_tail.get(tuple(prompt[start:end]))
                if same and list(prompt[:end]) == same[-1].ids:
                    latest = same.pop()
                    repeated = [other for other in same if other.mask == latest.mask]
                    same[:] = [other for other in same if other.mask != latest.mask]
                    return latest, repeated
        return None, []


def _chunk_keys(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the number of whole chunks and their hash for each prefix, from no chunks to all chunks."""
    key = 0
    keys = [(0, key)]
    for number in range(1, len(ids) // _CHUNK + 1):
        key = hash((key, *ids[(number - 1) * _CHUNK : number * _CHUNK]))
        keys.append((number, key))
    return keys


def explain_mismatch(
    previous: Triplet, triplet: Triplet, decode: Callable[[Sequence[int]], str] | None = None
) -> Mismatch:
    """Explains why a prompt does not start with the prompt and the response of the call that its messages continue."""
    expected = [*previous.prompt["token_ids"], *previous.response["token_ids"]]
    prompt = triplet.prompt["token_ids"]
    position = next((i for i, (a, b) in enumerate(zip(expected, prompt, strict=False)) if a != b), None)
    if position is None:
        position = min(len(expected), len(prompt))
    kind = _by_tokens(expected, prompt, position, len(previous.prompt["token_ids"]))
    if decode is not None and decode(prompt).startswith(decode(expected)):
        kind = "retokenisation"
    elif decode is not None and kind == "retokenisation":
        kind = "template"
    is_near = position >= len(previous.prompt["token_ids"]) - _RUN  # a prompt may end with the beginning of a thought
    block = _find_dropped_block(previous, prompt, decode) if is_near and kind != "retokenisation" else None
    if len(prompt) > position == len(expected):
        kind, text = "other", "an earlier call continued from the same point"
    elif block is not None:
        kind = "template"
        text = f"the chat template drops the {block} block of the answer once it is history, from token {position} on"
    elif kind == "template":
        where = "the answer" if position >= len(previous.prompt["token_ids"]) else "what came before the answer"
        text = f"the chat template renders {where} differently once it is history, from token {position} on"
    elif kind == "retokenisation":
        text = f"the text of the answer became other tokens when it was sent back, from token {position} on"
    else:
        text = f"its tokens differ from token {position} on and do not realign"
    return Mismatch(kind, triplet.metadata.get("response_id"), previous.metadata.get("response_id"), position, text)


_END_OF_THOUGHT: Final = re.compile(r"</(think|thinking|thought|reasoning)>|\[/(THINK)\]")


def _find_dropped_block(previous: Triplet, prompt: Sequence[int], decode: Decode | None) -> str | None:
    """Returns the name of the thought in an answer if a prompt that continues the answer does not contain it."""
    answer = read_answer(previous) or {}
    content = semconv.join_texts(answer.get("content"))
    end = _END_OF_THOUGHT.search(content) if isinstance(content, str) else None
    thought = str(answer.get("reasoning_content") or "") if end is None else content[: end.start()]
    thought = re.sub(r"^\s*(<\w+>|\[\w+\])", "", thought).strip()
    if (end is None and not thought) or (decode is not None and thought and thought in decode(prompt)):
        return None
    return "reasoning_content" if end is None else end[0].replace("/", "")


def explain_edit(
    position: int, triplets: Sequence[Triplet], known: dict[tuple[Any, str], int], previous: int | None
) -> Mismatch | None:
    """Returns a mismatch if a call belongs to an earlier call's conversation, and does not begin with its history.

    ``previous`` is the call that it continues, if that call has no tokens. Else the earlier call has the same first
    messages, or its answer or one of its tool calls is in the history. ``known`` maps each agent and each of these
    three to the latest such call, and is updated.
    """
    triplet = triplets[position]
    messages = read_messages(triplet)
    answers = [message for message in messages if message.get("role") == "assistant"]
    opening = messages[: messages.index(answers[0])] if answers else messages
    key = (triplet.metadata.get("agent_name"), repr([(m.get("role"), m.get("content")) for m in opening]))
    keys = [*_answer_keys(triplet, answers[::-1]), *([key] if opening else [])]
    before = next((known[each] for each in keys if each in known), None) if answers else None
    known |= {key: position} if opening else {}
    at = len(opening)
    if previous is not None:
        before, text = previous, "the call that it continues has no tokens"
    elif before is None:  # a new conversation
        return None
    else:
        answer = read_answer(triplets[before])
        history = [*read_messages(triplets[before]), *([] if answer is None else [answer])]
        edited = find_first_edit(history, messages)
        at = at if edited is None else edited
        text = f"the agent changed the history of the conversation, from message {at} on"
    return Mismatch(
        "other", triplet.metadata.get("response_id"), triplets[before].metadata.get("response_id"), at, text
    )


def _answer_keys(triplet: Triplet, answers: Sequence[Mapping[str, Any]]) -> list[tuple[Any, str]]:
    """Returns keys for answers of a call's agent: their texts, and the ids of their tool calls."""
    names = []
    for answer in answers:
        calls = answer.get("tool_calls") or ()
        names += [f"call {call['id']}" for call in calls if call.get("id")]
        names += [f"text {answer['content']}"] if answer.get("content") else []
    return [(triplet.metadata.get("agent_name"), name) for name in names]


def _by_tokens(expected: Sequence[int], prompt: Sequence[int], position: int, response_start: int) -> MismatchKind:
    """Determines the kind of a mismatch from how the two sequences realign after they differ.

    Replaced tokens come from the tokenizer; tokens that are only removed or only added, or a difference outside the
    response, come from the template.
    """
    if position < response_start or position >= len(expected) - 1:
        return "template"
    for shift in range(1, 2 * _MAX_SHIFT + 1):
        for skipped in range(max(0, shift - _MAX_SHIFT), min(shift, _MAX_SHIFT) + 1):
            added = shift - skipped
            rest = expected[position + skipped : position + skipped + _RUN]
            if not rest or list(prompt[position + added : position + added + len(rest)]) != rest:
                continue
            return "retokenisation" if skipped and added else "template"
    run = list(prompt[position : position + _RUN])
    starts = range(position, len(expected)) if run else ()
    is_removed = any(expected[i] == run[0] and list(expected[i : i + len(run)]) == run for i in starts)
    return "template" if is_removed else "other"
