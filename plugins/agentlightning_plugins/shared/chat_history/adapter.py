"""``TraceToMessages``: the chat histories of model calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from agentlightning import semconv
from agentlightning.adapter.adapter import TraceAdapter, reading
from agentlightning.adapter.call import build_tree, find_calls
from agentlightning.types import Span
from agentlightning_plugins.shared.chat_history.linking import find_first_edit


class ChatHistory(TypedDict):
    """One model call in the format of fine-tuning APIs."""

    messages: list[semconv.Message]
    """The input messages, followed by the (first) answer."""
    tools: NotRequired[list[semconv.Message]]
    """The tools that the model could call."""


def drop_prefixes(histories: Sequence[ChatHistory]) -> list[ChatHistory]:
    """Removes histories that are a prefix of another one, and duplicates.

    Each call of a conversation records the conversation so far; only the last record is complete.
    """

    def continues(earlier: ChatHistory, later: ChatHistory) -> bool:
        return find_first_edit(earlier["messages"], later["messages"]) is None

    return [
        history
        for position, history in enumerate(histories)
        if not any(
            continues(history, other) and (len(other["messages"]) > len(history["messages"]) or place > position)
            for place, other in enumerate(histories)
            if place != position
        )
    ]


class TraceToMessages(TraceAdapter[list[ChatHistory]]):
    """Returns the chat history of each answered model call, in the order of the calls."""

    def adapt(self, source: Sequence[Span], /) -> list[ChatHistory]:
        """Converts the spans of one attempt.

        Raises:
            AdapterError: spans of several attempts, or attributes that cannot be read.
        """
        histories: list[ChatHistory] = []
        with reading(source):
            for call in find_calls(build_tree(source, repair=True), semconv.is_llm_call):
                answers = call.read_answers()
                if not answers or not call.is_complete:
                    continue
                spans = [node.span for node in reversed(call.nodes)]  # the gateway's, the most complete one, first
                messages = next(filter(None, map(semconv.read_input_messages, spans)), [])
                history: ChatHistory = {"messages": [*messages, answers[0]]}
                tools = next(filter(None, map(semconv.read_tools, spans)), None)
                if tools is not None:
                    history["tools"] = tools
                histories.append(history)
        return histories
