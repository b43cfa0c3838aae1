"""Prompts that reuse the tokens of earlier answers instead of tokenizing them again.

An agent sends the whole conversation with every call, as text. Tokenizing it again may give tokens other than
the sampled ones: two tokens may merge into one, and the template may write a tool call with other spaces than the
model did. The trainer would then see prompts that its policy never produced, and calls of one rollout could not be
joined. So the server recognises its own answers, reuses their tokens and prompts, and tokenizes only the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any, Final, Generic, NamedTuple, TypeVar

import orjson
from transformers import PreTrainedTokenizerBase

from agentlightning_algorithms.shared.policy.server.reply import Json

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_ENTRY_BYTES: Final = 400
"""Memory of an entry, without the contents of its key and value."""

COUNTS: Final = (
    "prompts_new", "prompts_continued", "prompts_unknown", "prompts_rewritten",
    "drift_template", "drift_tokens", "drift_none",
)  # fmt: skip
"""Names of the counters.

- ``prompts_new``: prompts without an answer of a model.
- ``prompts_continued``: prompts that reuse sampled tokens. Tokenizing the last answer of each again would have given
  another text (``drift_template``), the same text in other tokens (``drift_tokens``), or the same tokens
  (``drift_none``).
- ``prompts_unknown``: prompts with answers that are not the server's, were changed or evicted; tokenized as a whole.
- ``prompts_rewritten``: prompts whose text up to a known answer now renders differently; tokenized as a whole.
"""


class Prompt(NamedTuple):
    """A tokenized prompt."""

    token_ids: list[int]
    text: str = ""
    """The prompt as the chat template renders it."""
    digest: bytes = b""
    """Digest of tools, template arguments and messages; empty for a text completion."""
    continued: int = 0
    """Tokens reused from the previous answer and its prompt."""


class _Answered(NamedTuple):
    prompt_text: str
    token_ids: array[int]
    """Tokens of prompt and response."""
    n_prompt: int


_DUMP: Final = orjson.OPT_NON_STR_KEYS
_CALL: Final = "xQ7vK2"
"""Prefix of the ids that replace those of tool calls: 9 letters and digits in all, as some templates require."""
_TEXT_CACHE_BYTES: Final = 16 * 2**20
"""Memory for rendered texts, and the same again for tokenized texts."""


class Conversations:
    """An LRU cache of answered conversations; calls may come in any order.

    The rollouts of a group begin with the same messages, so rendered and tokenized texts are cached, too.

    Attributes:
        counts: see :data:`COUNTS`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], *, max_bytes: int = 32 * 2**20
    ) -> None:
        """Takes the tokenizer, the tokens that end a response, and the memory for answers.

        An answer takes about 8 bytes per token of its conversation.
        """
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._tokenizer = tokenizer
        self._stop_texts = {token: str(tokenizer.decode([token])) for token in sorted(stop_ids)}
        self._answered: SizedCache[bytes, _Answered] = SizedCache(max_bytes)
        self._rendered: SizedCache[bytes, str] = SizedCache(_TEXT_CACHE_BYTES)
        self._writes_ids = False
        """Whether the template has written the id of a tool call."""
        self._encoded: SizedCache[tuple[str, bool], array[int]] = SizedCache(_TEXT_CACHE_BYTES)

    def prompt(self, messages: Sequence[Json], tools: Sequence[Json] | None, arguments: Json | None = None) -> Prompt:
        """Tokenizes a conversation, reusing sampled tokens if it continues a known conversation.

        ``messages`` have strings as content and objects as arguments of tool calls; ``arguments`` are further
        arguments of the chat template. Errors of the template propagate.
        """
        text = self._render(messages, tools, arguments, generate=True)
        digests = _digests(messages, tools, arguments)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i in reversed(answers):
            known = self._answered.get(digests[i])
            if known is not None:
                answered = self._render(messages[: i + 1], tools, arguments, generate=False)
                token_ids = self._continue(known, answered, text)
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
        token_ids = array("I", prompt.token_ids)
        token_ids.extend(response_ids)
        answered = _Answered(prompt.text, token_ids, len(prompt.token_ids))
        self._answered.put(key, answered, sys.getsizeof(token_ids) + sys.getsizeof(prompt.text))

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Tokenizes a text; ``special_tokens`` adds the tokens that the tokenizer puts around a plain text."""
        key = text, special_tokens
        known = self._encoded.get(key)
        if known is None:
            known = array("I", self._tokenizer.encode(text, add_special_tokens=special_tokens))
            self._encoded.put(key, known, sys.getsizeof(text) + sys.getsizeof(known))
        return list(known)

    def _continue(self, known: _Answered, answered: str, text: str) -> list[int] | None:
        """Returns the known tokens and those of the remaining text, or None if the template rewrote the earlier part.

        ``answered`` is the rendered conversation up to and including the known answer, ``text`` the whole one.
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

    def _render(
        self, messages: Sequence[Json], tools: Sequence[Json] | None, arguments: Json | None, *, generate: bool
    ) -> str:
        # Ids of tool calls are random, and most templates do not write them. Without them, equal conversations share
        # one text.
        plain = messages if self._writes_ids else _rename_calls(messages)
        # Not sorted by key: templates write tools and arguments in the client's order.
        key = hashlib.blake2b(orjson.dumps([plain, tools, arguments, generate], option=_DUMP), digest_size=16).digest()
        text = self._rendered.get(key)
        if text is None:
            tool_list: Any = list(tools) if tools else None
            text = str(
                self._tokenizer.apply_chat_template(
                    list(plain), tools=tool_list, add_generation_prompt=generate, tokenize=False, **(arguments or {})
                )
            )
            if not self._writes_ids and _CALL in text:
                self._writes_ids = True
                return self._render(messages, tools, arguments, generate=generate)
            self._rendered.put(key, text, sys.getsizeof(text))
        return text


def _rename_calls(messages: Sequence[Json]) -> Sequence[Json]:
    """Returns messages whose tool calls have ids numbered in order; anything but a call with an id stays unchanged."""
    names: dict[str, str] = {}
    renamed = []
    for message in messages:
        calls, call_id = message.get("tool_calls"), message.get("tool_call_id")
        if isinstance(calls, list):
            ids = [call.get("id") if isinstance(call, dict) else None for call in calls]
            names.update({each: f"{_CALL}{len(names) + i:03}" for i, each in enumerate(ids) if isinstance(each, str)})
            pairs = zip(calls, ids, strict=True)
            message = {**message, "tool_calls": [{**c, "id": names[i]} if isinstance(i, str) else c for c, i in pairs]}
        if isinstance(call_id, str):
            message = {**message, "tool_call_id": names.get(call_id, call_id)}
        renamed.append(message)
    return renamed


def _digests(messages: Sequence[Json], tools: Sequence[Json] | None, arguments: Json | None) -> list[bytes]:
    """Returns a digest of each prefix of a conversation."""
    first = hashlib.blake2b(_dump([tools or [], arguments or {}]), digest_size=16).digest()
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
    return orjson.dumps(value, option=_DUMP | orjson.OPT_SORT_KEYS)


class SizedCache(Generic[K, V]):
    """Maps keys to values in at most ``max_bytes`` of memory; may be used from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """Returns the value of a key, and makes its entry the most recently used."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Adds or replaces an entry of ``size`` bytes; an entry that is larger than the cache is not kept."""
        size += _ENTRY_BYTES
        with self._lock:
            self._size -= self._entries.pop(key, (value, 0))[1]
            if size > self._max_bytes:
                return
            self._size += size
            self._entries[key] = value, size
            while self._size > self._max_bytes:
                self._size -= self._entries.popitem(last=False)[1][1]
