"""Chat histories of model calls: which call continues which, ``TraceToMessages``, and examples for fine-tuning."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, NotRequired, TypedDict

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from agentlightning import semconv
from agentlightning.adapter.adapter import TraceAdapter, reading
from agentlightning.adapter.call import build_tree, find_calls, find_unused
from agentlightning.errors import AdapterError
from agentlightning.frozen import thaw
from agentlightning.reward import read_final_reward
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Rollout, Span, Triplet

logger = logging.getLogger("agentlightning")
_FIELDS: Final = ("role", "content", "reasoning_content", "name", "tool_calls", "tool_call_id", "refusal")
"""Fields of messages that fine-tuning reads; chat templates of thinking models write ``reasoning_content``."""


def link_calls(triplets: Sequence[Triplet]) -> list[int | None]:
    """Finds, for each triplet, the latest earlier triplet whose prompt and answer are a prefix of its prompt.

    Takes time linear in the messages. Ignores ids of tool calls and the model's reasoning: clients drop or change them.
    """
    by_history: dict[bytes, int] = {}
    previous: list[int | None] = []
    for position, triplet in enumerate(triplets):
        messages, answer = read_messages(triplet), read_answer(triplet)
        prefixes = _hash_prefixes(messages if answer is None else [*messages, answer])
        known = prefixes[: len(messages)]
        previous.append(next((by_history[each] for each in reversed(known) if each in by_history), None))
        if messages and answer is not None and answer.get("role") == "assistant":
            by_history[prefixes[-1]] = position
    return previous


def read_messages(triplet: Triplet) -> Sequence[semconv.Message]:
    """Returns the messages of the prompt; empty if they were not recorded."""
    content = triplet.prompt.get("raw_content") if isinstance(triplet.prompt, Mapping) else None
    return content if isinstance(content, list) else ()


def read_answer(triplet: Triplet) -> semconv.Message | None:
    """Returns the model's answer, if it was recorded."""
    content = triplet.response.get("raw_content") if isinstance(triplet.response, Mapping) else None
    return content[0] if isinstance(content, list) and content else None


def find_first_edit(earlier: Sequence[semconv.Message], later: Sequence[semconv.Message]) -> int | None:
    """Returns the position of the first message that differs in the later history; None if messages were only added."""
    for position, message in enumerate(earlier):
        if position >= len(later) or _signature(message) != _signature(later[position]):
            return position
    return None


def _hash_prefixes(messages: Sequence[semconv.Message]) -> list[bytes]:
    """Returns a hash of the first message, of the first two, and so on."""
    digest, prefixes = hashlib.blake2b(digest_size=16), []
    for message in messages:
        digest.update(repr(_signature(message)).encode(errors="surrogatepass"))
        prefixes.append(digest.digest())
    return prefixes


def _signature(message: semconv.Message) -> str:
    """Returns the parts of a message that are equal in all of its copies."""
    content = semconv.join_texts(message.get("content")) or ""
    calls = [
        (call.get("function", {}).get("name"), call.get("function", {}).get("arguments"))
        for call in message.get("tool_calls") or ()
    ]
    return repr((message.get("role"), content, calls))


class ChatHistory(TypedDict):
    """One model call in the format of fine-tuning APIs."""

    messages: list[semconv.Message]
    """The input messages, followed by the (first) answer."""
    tools: NotRequired[list[semconv.Message]]
    """The tools that the model could call."""


def drop_prefixes(histories: Sequence[ChatHistory]) -> list[ChatHistory]:
    """Removes histories that are a prefix of another one, and duplicates, in time linear in the messages.

    Each call of a conversation records the conversation so far; only the last record is complete.
    """
    prefixes = [_hash_prefixes(history["messages"]) for history in histories]
    continued = {each for own in prefixes for each in own[:-1]}
    last = {own[-1]: position for position, own in enumerate(prefixes)}
    return [
        history
        for position, (history, own) in enumerate(zip(histories, prefixes, strict=True))
        if own[-1] not in continued and last[own[-1]] == position
    ]


class TraceToMessages(TraceAdapter[list[ChatHistory]]):
    """Returns the chat history of each answered model call, in the order of the calls."""

    def __init__(self, *, side_calls: bool = True) -> None:
        """Selects the calls: with ``side_calls`` False, those that training uses.

        It leaves out side calls of coding agents, tries that the client repeated, and calls that compute a reward.
        """
        self.side_calls = side_calls

    def adapt(self, source: Sequence[Span], /) -> list[ChatHistory]:
        """Converts the spans of one attempt; raises AdapterError if they are of several or cannot be read."""
        histories: list[ChatHistory] = []
        with reading(source):
            nodes = build_tree(source, repair=True)
            calls = find_calls(nodes, semconv.is_llm_call)
            unused = {} if self.side_calls else find_unused(nodes, calls)
            for call in calls:
                answers = call.read_answers()
                if not answers or not call.is_complete or call in unused:
                    continue
                if not self.side_calls and call.anchor.is_in_reward:
                    continue
                spans = [node.span for node in reversed(call.nodes)]  # the gateway's, the most complete one, first
                messages = next(filter(None, map(semconv.read_input_messages, spans)), [])
                history: ChatHistory = {"messages": [*messages, answers[0]]}
                tools = next(filter(None, map(semconv.read_tools, spans)), None)
                if tools is not None:
                    history["tools"] = tools
                histories.append(history)
        return histories


def read_conversations(spans: Sequence[Span]) -> list[ChatHistory]:
    """Returns the complete conversations of an attempt; if its spans cannot be read, one with the reason."""
    try:
        return drop_prefixes(TraceToMessages().adapt(spans))
    except AdapterError as error:
        return [{"messages": [{"role": "unreadable", "content": str(error)}]}]


def describe_conversations(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Returns the conversations of an attempt as plain values for pages and reports, each with messages and tools."""
    return [
        {
            "messages": [_describe_message(message) for message in history["messages"]],
            "tools": [str((tool.get("function") or {}).get("name", "")) for tool in history.get("tools") or ()],
        }
        for history in read_conversations(spans)
    ]


def _describe_message(message: semconv.Message) -> dict[str, Any]:
    """Returns a message with its texts; parts that are not text are shown as JSON."""
    content = thaw(message.get("content"))
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if isinstance(part, dict) and part.get("type") == "text":
            texts.append(str(part.get("text", "")))
        elif part is not None:
            texts.append(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False, default=str))
    calls = [
        {
            "id": call.get("id"),
            "name": str((call.get("function") or {}).get("name", "")),
            "arguments": _pretty((call.get("function") or {}).get("arguments")),
        }
        for call in message.get("tool_calls") or ()
        if isinstance(call, dict)
    ]
    return {
        "role": str(message.get("role", "")),
        "text": "\n".join(texts),
        "reasoning": str(message.get("reasoning_content") or ""),
        "refusal": str(message.get("refusal") or ""),
        "tool_calls": calls,
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
    }


def _pretty(arguments: Any) -> str:
    parsed = semconv.parse_json(arguments, arguments)
    return parsed if isinstance(parsed, str) else json.dumps(thaw(parsed), indent=2, ensure_ascii=False, default=str)


class FineTuningExample(BaseModel):
    """One conversation: a line of a fine-tuning file."""

    messages: list[dict[str, Any]]
    """The last message is the one to learn."""
    tools: list[dict[str, Any]] | None = None

    @model_serializer(mode="wrap")
    def _without_empty(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


class PreferencePair(BaseModel):
    """The conversations of two rollouts of one task; the chosen one has the higher reward."""

    chosen: list[FineTuningExample]
    rejected: list[FineTuningExample]


async def select_examples(
    store: LightningStore,
    min_reward: float | None = None,
    best_of: int | None = None,
    rollouts: Sequence[Rollout] | None = None,
) -> AsyncIterator[FineTuningExample]:
    """Yields the conversations of the best rollouts that succeeded (rejection sampling).

    A conversation of several model calls is one example; calls beside the agent's work, such as for a title, are left
    out. Rollouts without a reward or with one below ``min_reward``,
    with lost spans, and of validation and test (``mode``) are excluded; ``best_of`` of each task are kept. ``rollouts``
    are those to choose from; None: all of the store's run.
    """
    for ranked in await _rank_rollouts(store, min_reward, rollouts):
        for _, rollout in ranked[:best_of]:
            for example in await _read_conversations(store, rollout):
                yield example


async def select_pairs(
    store: LightningStore,
    min_gap: float = 0.0,
    pairs_per_task: int | None = 1,
    rollouts: Sequence[Rollout] | None = None,
) -> AsyncIterator[PreferencePair]:
    """Yields pairs of rollouts of one task: the best with the worst, the second best with the second worst, and so on.

    It uses only rollouts that succeeded and lost no spans, and none of validation or test (``mode``).
    The rewards of a pair differ by at least ``min_gap``, and by more than 0; ``pairs_per_task`` None means no limit.
    ``rollouts`` are the rollouts to choose from; None: all of the store's run.
    """
    for ranked in await _rank_rollouts(store, None, rollouts):
        for (more, chosen), (less, rejected) in list(zip(ranked, reversed(ranked), strict=True))[:pairs_per_task]:
            if more > less and more - less >= min_gap:
                yield PreferencePair(
                    chosen=await _read_conversations(store, chosen), rejected=await _read_conversations(store, rejected)
                )


async def _rank_rollouts(
    store: LightningStore, min_reward: float | None, rollouts: Sequence[Rollout] | None
) -> list[list[tuple[float, Rollout]]]:
    """Returns the rollouts of each task to learn from, with their rewards, the highest first."""
    succeeded: Sequence[Rollout]
    if rollouts is None:
        succeeded = (await store.query_rollouts(status_in=["succeeded"])).items
    else:
        succeeded = [rollout for rollout in rollouts if rollout.status == "succeeded"]
    candidates = [rollout for rollout in succeeded if rollout.mode not in ("val", "test")]
    if len(candidates) < len(succeeded):
        logger.warning(
            "%d of %d rollouts are excluded, because they belong to validation or test",
            len(succeeded) - len(candidates),
            len(succeeded),
        )
    by_task: dict[str, list[tuple[float, Rollout]]] = {}
    for rollout in candidates:
        reward = await read_final_reward(store, rollout)
        if reward is None or (min_reward is not None and reward < min_reward):
            continue
        if isinstance(rollout, AttemptedRollout) and rollout.attempt.spans_dropped:
            logger.warning("rollout %s lost spans and is excluded", rollout.rollout_id)
            continue
        by_task.setdefault(repr(rollout.input), []).append((reward, rollout))
    return [sorted(rollouts, key=lambda each: -each[0]) for rollouts in by_task.values()]


async def _read_conversations(store: LightningStore, rollout: Rollout) -> list[FineTuningExample]:
    spans = (await store.query_spans(rollout.rollout_id, "latest")).items
    try:
        histories = drop_prefixes(TraceToMessages(side_calls=False).adapt(spans))
    except AdapterError as error:
        logger.warning("rollout %s is excluded: %s", rollout.rollout_id, error)
        return []
    return [
        FineTuningExample(
            messages=[_clean(message) for message in history["messages"]],
            tools=thaw([dict(tool) for tool in history.get("tools") or ()]) or None,
        )
        for history in histories
    ]


def _clean(message: dict[str, Any]) -> dict[str, Any]:
    """Keeps the fields that fine-tuning reads. Content may be missing only in messages with tool calls."""
    kept = {name: thaw(message[name]) for name in _FIELDS if message.get(name) is not None}
    if "content" not in kept and "tool_calls" not in kept:
        kept["content"] = ""
    return kept
