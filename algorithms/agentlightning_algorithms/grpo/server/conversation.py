"""Prompts that reuse the tokens of earlier answers instead of tokenizing them again.

An agent sends the whole conversation with every call, as text. Tokenizing it again may give other tokens than those
that were sampled: two tokens may merge into one, and the template may write a tool call with other spaces than the
model did. The trainer would then see prompts that its policy never produced, and calls of one rollout could not be
joined. So the server recognises messages that it answered itself, reuses their tokens, and tokenizes only the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import orjson
from transformers import PreTrainedTokenizerBase

from agentlightning_algorithms.grpo.server.reply import Json

COUNTS: Final = (
    "prompts_new", "prompts_continued", "prompts_unknown", "prompts_rewritten",
    "drift_template", "drift_tokens", "drift_none",
)  # fmt: skip
"""Names of the counters.

- ``prompts_new``: prompts without an answer of a model.
- ``prompts_continued``: prompts that reuse sampled tokens. For the last answer in each, what tokenizing it again would
  have given: ``drift_template``: another text; ``drift_tokens``: the same text in other tokens; ``drift_none``: the
  same tokens.
- ``prompts_unknown``: answers that are not this server's, were changed, or were evicted; tokenized as a whole.
- ``prompts_rewritten``: known answers whose earlier part the template now writes differently; tokenized as a whole.
"""


class Prompt(NamedTuple):
    """A tokenized prompt."""

    token_ids: list[int]
    text: str = ""
    """As the chat template renders it."""
    digest: bytes = b""
    """Of tools and messages; empty for a text completion."""
    continued: int = 0
    """Tokens reused from the previous answer and its prompt."""


class _Answered(NamedTuple):
    prompt_text: str
    token_ids: array[int]
    """Of prompt and response."""
    n_prompt: int


class Conversations:
    """An LRU cache of answered conversations, whatever the order of calls.

    Attributes:
        counts: see :data:`COUNTS`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], *, max_tokens: int = 4_000_000
    ) -> None:
        """Takes the tokenizer, the tokens that end a response, and the capacity in tokens of 4 bytes each."""
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._tokenizer = tokenizer
        self._stop_texts = {token: str(tokenizer.decode([token])) for token in sorted(stop_ids)}
        self._max_tokens = max_tokens
        self._held = 0
        self._answered: OrderedDict[bytes, _Answered] = OrderedDict()

    def prompt(self, messages: Sequence[Json], tools: Sequence[Json] | None) -> Prompt:
        """Tokenizes a conversation, reusing sampled tokens where it continues a known one.

        ``messages`` have strings as content and objects as arguments of tool calls. Errors of the chat template
        propagate.
        """
        text = self._render(messages, tools, generate=True)
        digests = _digests(messages, tools)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i in reversed(answers):
            known = self._answered.get(digests[i])
            if known is not None:
                self._answered.move_to_end(digests[i])
                token_ids = self._continue(known, self._render(messages[: i + 1], tools, generate=False), text)
                if token_ids is not None:
                    self.counts["prompts_continued"] += 1
                    return Prompt(token_ids, text, digests[-1], len(known.token_ids))
                self.counts["prompts_rewritten"] += 1
                break
        else:
            self.counts["prompts_unknown" if answers else "prompts_new"] += 1
        return Prompt(self.encode(text), text, digests[-1])

    def remember(self, prompt: Prompt, message: Json, response_ids: Sequence[int]) -> None:
        """Stores an answer: the message that the agent will send back, and its tokens."""
        key = _digest(prompt.digest, message)
        self._forget(key)
        token_ids = array("I", prompt.token_ids)
        token_ids.extend(response_ids)
        self._answered[key] = _Answered(prompt.text, token_ids, len(prompt.token_ids))
        self._held += len(token_ids)
        while self._held > self._max_tokens:
            self._forget(next(iter(self._answered)))

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Tokenizes a text; ``special_tokens`` adds those that a tokenizer puts around a plain text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        return ids

    def _forget(self, key: bytes) -> None:
        gone = self._answered.pop(key, None)
        if gone is not None:
            self._held -= len(gone.token_ids)

    def _continue(self, known: _Answered, answered: str, text: str) -> list[int] | None:
        """Returns the known tokens and those of the rest, or None if the template rewrote the earlier part.

        ``answered`` is the conversation up to and including the known answer, and ``text`` the whole, as rendered.
        """
        if not answered.startswith(known.prompt_text) or not text.startswith(answered):
            return None
        last = known.token_ids[-1]
        ended = last in self._stop_texts
        for stop_id, stop_text in self._stop_texts.items():
            said, found, rest = answered[len(known.prompt_text) :].rpartition(stop_text)
            if found and (stop_id == last or not ended):
                # The end of the turn is tokenized with the rest, because tokenization depends on context.
                tail = self.encode(stop_text + rest + text[len(answered) :])
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

    def _render(self, messages: Sequence[Json], tools: Sequence[Json] | None, *, generate: bool) -> str:
        tool_list: Any = list(tools) if tools else None
        text = self._tokenizer.apply_chat_template(
            list(messages), tools=tool_list, add_generation_prompt=generate, tokenize=False
        )
        return str(text)


def _digests(messages: Sequence[Json], tools: Sequence[Json] | None) -> list[bytes]:
    """Returns a digest of each prefix of a conversation."""
    first = hashlib.blake2b(_dump(tools or []), digest_size=16).digest()
    return list(accumulate(messages, _digest, initial=first))[1:]


def _digest(before: bytes, message: Json) -> bytes:
    # Clients add null fields to answers, and may format arguments differently.
    canonical = {key: value for key, value in message.items() if value}
    if calls := message.get("tool_calls"):
        canonical["tool_calls"] = [[call.get("id"), _read_function(call)] for call in calls]
    return hashlib.blake2b(before + _dump(canonical), digest_size=16).digest()


def _read_function(call: Json) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(orjson.JSONDecodeError):
            arguments = orjson.loads(arguments)
    return [function.get("name"), arguments]


def _dump(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
