"""Prompts that reuse the tokens of earlier answers instead of tokenizing them again.

An agent sends the whole conversation with every call, as text. Tokenizing it again may give tokens other than
the sampled ones: two tokens may merge into one, and the template may write a tool call with other spaces than the
model did. The trainer would then see prompts that its policy never produced, and calls of one rollout could not be
joined. So the server recognises its own answers, reuses their tokens and prompts, and tokenizes only the rest.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, NamedTuple

from transformers import PreTrainedTokenizerBase

from agentlightning_algorithms.shared.policy.server.tool_format import Json, parse_object

COUNTS: Final = (
    "prompts_new", "prompts_continued", "prompts_unknown", "prompts_rewritten",
    "drift_template", "drift_tokens", "drift_none", "tool_calls_unparsed",
)  # fmt: skip
"""Names of the counters.

- ``prompts_new``: prompts without an answer of a model.
- ``prompts_continued``: prompts that reuse sampled tokens. Tokenizing the last answer of each again would have given
  another text (``drift_template``), the same text in other tokens (``drift_tokens``), or the same tokens
  (``drift_none``).
- ``prompts_unknown``: prompts with answers that are not the server's, were changed or evicted; tokenized as a whole.
- ``prompts_rewritten``: prompts whose text up to a known answer now renders differently; tokenized as a whole.
- ``tool_calls_unparsed``: tool calls that answers contain as text, because they are malformed or inside of a thought.
"""


class PromptTooLongError(Exception):
    """A prompt that is certain to have more tokens than the model has room for."""


class Prompt(NamedTuple):
    """A tokenized prompt."""

    token_ids: list[int]
    text: str = ""
    """The prompt as the chat template renders it."""
    digest: bytes = b""
    """Digest of tools, template arguments and messages; empty for a text completion."""
    continued: int = 0
    """Tokens reused from the previous answer and its prompt."""
    thinks: bool = False
    """Whether the prompt ends inside of a thought."""
    begun: str = ""
    """The beginning of the answer, if a tool call is forced; the last tokens of the prompt are its tokens."""
    n_forced: int = 0
    """Number of tokens at the end of the prompt that were forced: the beginning of the answer, and what precedes it."""


class _Answered(NamedTuple):
    prompt_text: str
    token_ids: array[int]
    """Tokens of prompt and response."""
    n_prompt: int


_CACHED_TEXTS: Final = 256
_MIN_TOKEN_CHARS: Final = 16
"""Least assumed length of the longest token, because a tokenizer may shorten texts before it splits them."""
_CHARS_PER_TOKEN: Final = 4
"""The usual number. Longer texts are tokenized in growing parts, so that one that is too long is found early."""
_MERGED: Final = 8
"""Tokens at the end of a part that may merge with the following text."""
_JSON_OVERHEAD: Final = 4
"""How much longer the JSON of messages and tools may be than the longest prompt: templates leave parts out."""


class Conversations:
    """An LRU cache of answered conversations; calls may come in any order.

    The rollouts of a group begin with the same messages, so rendered and tokenized texts are cached, too.

    Attributes:
        counts: see :data:`COUNTS`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: frozenset[int],
        *,
        max_length: int = 2**20,
        max_tokens: int = 4 * 2**20,
    ) -> None:
        """Takes the tokenizer, the tokens that end a response, and limits of tokens.

        ``max_length`` limits a prompt, ``max_tokens`` all remembered conversations together.
        """
        self._max_length = max_length
        self._max_chars = max_length * max(_MIN_TOKEN_CHARS, *map(len, tokenizer.get_vocab()))
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._tokenizer = tokenizer
        self._stop_texts = {token: str(tokenizer.decode([token])) for token in sorted(stop_ids)}
        self._max_tokens = max_tokens
        self._n_tokens = 0
        self._answered: dict[bytes, _Answered] = {}  # least recently used first
        self._lock = threading.Lock()  # long prompts are tokenized in threads
        self._render_cached = lru_cache(_CACHED_TEXTS)(self._render_dump)
        self._encode_cached = lru_cache(_CACHED_TEXTS)(self._encode)

    def prompt(self, messages: Sequence[Json], tools: Sequence[Json] | None, arguments: Json | None = None) -> Prompt:
        """Tokenizes a conversation, reusing sampled tokens if it continues a known conversation.

        ``messages`` have strings as content and objects as arguments of tool calls; ``arguments`` are further
        arguments of the chat template. Errors of the template propagate.

        Raises:
            PromptTooLongError: it has more than ``max_length`` tokens, found before or while they are tokenized.
        """
        text = self._render(messages, tools, arguments, generate=True)
        digests = _digests(messages, tools, arguments)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i in reversed(answers):
            known = self._find(digests[i])
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
        known = _Answered(prompt.text, array("I", [*prompt.token_ids, *response_ids]), len(prompt.token_ids))
        with self._lock:
            replaced = self._answered.pop(key, None)
            self._answered[key] = known
            self._n_tokens += len(known.token_ids) - (0 if replaced is None else len(replaced.token_ids))
            while self._n_tokens > self._max_tokens:
                self._n_tokens -= len(self._answered.pop(next(iter(self._answered))).token_ids)

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Tokenizes a text; ``special_tokens`` adds the tokens that the tokenizer puts around a plain text."""
        return list(self._encode_cached(text, special_tokens))

    def _encode(self, text: str, special_tokens: bool) -> array[int]:
        if len(text) > self._max_chars:
            raise self._too_long("the prompt", len(text))
        size = _CHARS_PER_TOKEN * self._max_length
        while size < len(text):
            if len(self._tokenizer.encode(text[:size], add_special_tokens=False)) > self._max_length + _MERGED:
                raise self._too_long("the beginning of the prompt", size)
            size *= 2
        return array("I", self._tokenizer.encode(text, add_special_tokens=special_tokens))

    def _too_long(self, what: str, chars: int) -> PromptTooLongError:
        return PromptTooLongError(f"{what} has {chars} characters, which are more than {self._max_length} tokens")

    def _continue(self, known: _Answered, answered: str, text: str) -> list[int] | None:
        """Returns the known tokens and the remaining text's tokens, or None if the template rewrote the earlier part.

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
        # Not sorted by key: templates write tools and arguments in the client's order.
        dump = _dump([messages, tools, arguments or {}, generate], sort_keys=False)
        if len(dump) > _JSON_OVERHEAD * self._max_chars:
            raise self._too_long("the JSON of messages and tools", len(dump))
        return str(self._render_cached(dump))

    def _render_dump(self, dump: str) -> str:
        messages, tools, arguments, generate = json.loads(dump)
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=generate, tokenize=False, **arguments
            )
        )

    def _find(self, key: bytes) -> _Answered | None:
        """Returns an answer, and makes it the most recently used."""
        with self._lock:
            known = self._answered.pop(key, None)
            if known is not None:
                self._answered[key] = known
            return known


def _digests(messages: Sequence[Json], tools: Sequence[Json] | None, arguments: Json | None) -> list[bytes]:
    """Returns a digest of each prefix of a conversation."""
    first = hashlib.blake2b(_dump([tools or [], arguments or {}]).encode(), digest_size=16).digest()
    return list(accumulate(messages, _digest, initial=first))[1:]


def _digest(before: bytes, message: Json) -> bytes:
    # Clients add null fields to answers, and may format arguments differently.
    canonical = {key: value for key, value in message.items() if value}
    if thoughts := canonical.pop("reasoning", None):  # another name of the same
        canonical.setdefault("reasoning_content", thoughts)
    if calls := message.get("tool_calls"):
        canonical["tool_calls"] = [[call.get("id"), _read_function(call)] for call in calls]
    return hashlib.blake2b(before + _dump(canonical).encode(), digest_size=16).digest()


def _read_function(call: Json) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str) and (found := parse_object(arguments)) is not None:
        arguments = found
    return [function.get("name"), arguments]


def _dump(value: object, *, sort_keys: bool = True) -> str:
    # Not with orjson, which has no integers beyond 64 bits.
    return json.dumps(value, sort_keys=sort_keys, ensure_ascii=False, separators=(",", ":"))
