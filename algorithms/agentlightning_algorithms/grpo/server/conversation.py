"""The conversations that this server holds, so that what was sampled is never tokenized again.

An agent sends the whole conversation with every call, as text. Tokenizing it anew may give other tokens than those
that were sampled: two tokens may read as one, and the template may write a tool call with other spaces than the model
did. The trainer would then see prompts that its policy never produced, and calls of one rollout could not be joined.
So the server recognises the messages it answered itself, takes their tokens as they were, and tokenizes only what came
after.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson
from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]

COUNTS: Final = (
    "prompts_new",
    "prompts_continued",
    "prompts_unknown",
    "prompts_rewritten",
    "drift_template",
    "drift_tokens",
    "drift_none",
)
"""What is counted.

- ``prompts_new``: without an answer of a model in them.
- ``prompts_continued``: from sampled tokens. Of the last answer in each, had it been tokenized from its messages:
  ``drift_template``: the template would have written another text; ``drift_tokens``: the same text, other tokens;
  ``drift_none``: the same tokens.
- ``prompts_unknown``: with answers that are not this server's, were changed, or were forgotten; tokenized as a whole.
- ``prompts_rewritten``: known, but the template writes the earlier part otherwise now; tokenized as a whole.
"""


class Prompt(NamedTuple):
    """A conversation, ready to be answered."""

    token_ids: list[int]
    text: str = ""
    """As the template renders it."""
    digest: bytes = b""
    """Of tools and messages; empty for a prompt that is no conversation."""
    continued: int = 0
    """Tokens taken over from the answer before, its own prompt included."""


class _Answered(NamedTuple):
    text: str
    """Of the prompt, as rendered."""
    token_ids: array[int]
    """Of prompt and response."""
    n_prompt: int


class Conversations:
    """Remembers answered conversations, those used last; the order of calls and who makes them do not matter.

    Attributes:
        counts: see :data:`COUNTS`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], *, max_tokens: int = 4_000_000
    ) -> None:
        """Takes the tokenizer, the tokens that end a response, and how many tokens may be remembered, 4 bytes each."""
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._tokenizer = tokenizer
        self._stop_texts = {token: str(tokenizer.decode([token])) for token in sorted(stop_ids)}
        self._max_tokens = max_tokens
        self._held = 0
        self._answered: OrderedDict[bytes, _Answered] = OrderedDict()

    def prompt(self, messages: Sequence[Json], tools: Sequence[Json] | None) -> Prompt:
        """Returns a conversation as tokens: those sampled where it continues a known one.

        Args:
            messages: with plain text for content and objects for the arguments of tool calls.
            tools: as the request has them.

        Raises:
            Exception: whatever the chat template raises.
        """
        text = self._render(messages, tools, ask=True)
        digests = _digests(messages, tools)
        spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i in reversed(spoken):
            known = self._answered.get(digests[i])
            if known is not None:
                self._answered.move_to_end(digests[i])
                token_ids = self._continue(known, self._render(messages[: i + 1], tools, ask=False), text)
                if token_ids is not None:
                    self.counts["prompts_continued"] += 1
                    return Prompt(token_ids, text, digests[-1], len(known.token_ids))
                self.counts["prompts_rewritten"] += 1
                break
        else:
            self.counts["prompts_unknown" if spoken else "prompts_new"] += 1
        return Prompt(self.encode(text), text, digests[-1])

    def remember(self, prompt: Prompt, message: Json, response_ids: Sequence[int]) -> None:
        """Keeps an answer: the message that the agent will send back, and the tokens that it is made of."""
        key = _digest(prompt.digest, message)
        self._forget(key)
        token_ids = array("I", prompt.token_ids)
        token_ids.extend(response_ids)
        self._answered[key] = _Answered(prompt.text, token_ids, len(prompt.token_ids))
        self._held += len(token_ids)
        while self._held > self._max_tokens:
            self._forget(next(iter(self._answered)))

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Returns a text as tokens; ``special_tokens`` adds those that a tokenizer puts around a plain text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        return ids

    def _forget(self, key: bytes) -> None:
        gone = self._answered.pop(key, None)
        if gone is not None:
            self._held -= len(gone.token_ids)

    def _continue(self, known: _Answered, spoken: str, text: str) -> list[int] | None:
        """Returns the known tokens and those of what follows, or None where the template has changed what was before.

        Args:
            known: an answer and its prompt.
            spoken: the conversation up to and with that answer, as rendered.
            text: the whole conversation, as rendered.
        """
        if not spoken.startswith(known.text) or not text.startswith(spoken):
            return None
        last = known.token_ids[-1]
        ended = last in self._stop_texts
        for stop_id, stop_text in self._stop_texts.items():
            said, found, rest = spoken[len(known.text) :].rpartition(stop_text)
            if found and (stop_id == last or not ended):
                # The end of the turn is tokenized along, so that what follows it stands in its true place.
                tail = self.encode(stop_text + rest + text[len(spoken) :])
                if tail[:1] != [stop_id]:
                    return None
                self._count_drift(list(known.token_ids[known.n_prompt :]), said, [stop_id] if ended else [])
                return [*known.token_ids, *(tail[1:] if ended else tail)]
        return None

    def _count_drift(self, response_ids: list[int], said: str, stop: list[int]) -> None:
        sampled = response_ids[: len(response_ids) - len(stop)]
        if self._tokenizer.decode(sampled) != said:
            self.counts["drift_template"] += 1
        else:
            self.counts["drift_none" if self.encode(said) == sampled else "drift_tokens"] += 1

    def _render(self, messages: Sequence[Json], tools: Sequence[Json] | None, *, ask: bool) -> str:
        given: Any = list(tools) if tools else None
        return str(
            self._tokenizer.apply_chat_template(list(messages), tools=given, add_generation_prompt=ask, tokenize=False)
        )


def _digests(messages: Sequence[Json], tools: Sequence[Json] | None) -> list[bytes]:
    """Of each beginning of a conversation."""
    digest = hashlib.blake2b(_dump(tools or []), digest_size=16).digest()
    digests = []
    for message in messages:
        digest = _digest(digest, message)
        digests.append(digest)
    return digests


def _digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    # Clients add null fields to what they were answered, and write the same arguments in other ways.
    canonical = {key: value for key, value in message.items() if value}
    calls = message.get("tool_calls")
    if calls:
        canonical["tool_calls"] = [[call.get("id"), _read_function(call)] for call in calls]
    return hashlib.blake2b(before + _dump(canonical), digest_size=16).digest()


def _read_function(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(orjson.JSONDecodeError):
            arguments = orjson.loads(arguments)
    return [function.get("name"), arguments]


def _dump(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
