"""OpenAI's chat and text completions: tokenizes requests and builds answers, whole or as a stream.

As in vLLM (0.10.2 and later), ``return_token_ids`` adds ``prompt_token_ids`` and each choice's ``token_ids``. Our own
fields are ``weight_version``, the version of the weights that sampled the answer; ``weight_versions`` of a choice, the
version for each token, if the weights changed during it; and ``continued_tokens`` in ``usage.prompt_tokens_details``,
next to ``cached_tokens``: prompt tokens reused from an earlier answer and its prompt, and not tokenized again.
``tool_calls_unparsed`` of a choice is the number of tool calls that its text contains, and ``forced_tokens`` the number
of tokens at the end of the prompt that ``tool_choice`` forced: they begin the answer's message, and were not sampled.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
import uuid
from collections.abc import Container, Iterator, Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from agentlightning_algorithms.shared.policy.draw import Generation, Token
from agentlightning_algorithms.shared.policy.server.conversation import Prompt
from agentlightning_algorithms.shared.policy.server.request import ChatRequest, PolicyCompletions, TextRequest
from agentlightning_algorithms.shared.policy.server.tool_format import (
    END_OF_THOUGHT,
    THINK,
    Json,
    ToolFormat,
    new_call_id,
    split_calls,
)

# JSON has no infinity; OpenAI and vLLM report this for tokens of probability 0.
_LOWEST = -9999.0
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
logger = logging.getLogger("agentlightning")


@lru_cache
def _warn_of_unparsed(model: str) -> None:
    logger.warning(
        "an answer of %s contains tool calls that are malformed or inside of a thought; they are text, and are counted "
        "as tool_calls_unparsed",
        model,
    )


class TextReader:
    """Decodes tokens incrementally, up to the first stop string.

    Text is held back while it ends in an incomplete character or may be the beginning of a stop string.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], silent: Container[int] | None = None
    ) -> None:
        """``silent`` are the tokens that have no text; None: all special tokens."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._silent = silent
        self._token_ids: list[int] = []
        self._before = self._read = 0
        self._held = ""
        self._stopped = False

    def feed(self, token_ids: Sequence[int]) -> str:
        """Takes more tokens and returns the text that is final."""
        silent = self._silent
        self._token_ids.extend(token_ids if silent is None else (token for token in token_ids if token not in silent))
        fresh = self._decode()
        if fresh.endswith(_UNFINISHED):
            return ""
        self._before, self._read = self._read, len(self._token_ids)
        return self._cut(fresh)

    def finish(self) -> str:
        """Returns the text that was held back."""
        text = self._cut(self._decode())
        return text if self._stopped else text + self._held

    def _decode(self) -> str:
        if self._read == len(self._token_ids):
            return ""
        # Decoders treat the first token differently, so the tokens before the new ones are decoded with them.
        known, both = (
            str(self._tokenizer.decode(self._token_ids[self._before : end], skip_special_tokens=self._silent is None))
            if end > self._before
            else ""
            for end in (self._read, len(self._token_ids))
        )
        return both[len(known) :]

    def _cut(self, fresh: str) -> str:
        if self._stopped or not self._stop:
            return "" if self._stopped else fresh
        text = self._held + fresh
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self._stopped, self._held = True, ""
            return text[: min(ends)]
        longest = min(len(text), max(map(len, self._stop)) - 1)
        hold = next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


class ReplyReader:
    """Reads one response: its text and, if ``form`` is given, its tool calls.

    Attributes:
        text: the text so far.
        calls: the first ``max_calls`` tool calls, in OpenAI's format, once the response has ended.
        dropped: the number of further tool calls.
        unparsed: the number of tool calls that are left in the text.
    """

    def __init__(
        self,
        reader: TextReader,
        form: ToolFormat | None,
        tools: Sequence[Json] = (),
        *,
        max_calls: float = math.inf,
        begun: str = "",
        thinks: bool = False,
    ) -> None:
        """Takes the form of calls, the tools, and how the prompt ends: with a call that has begun, or in a thought."""
        self.text = ""
        self.calls: list[Json] = []
        self.dropped = self.unparsed = 0
        self._reader = reader
        self._form, self._tools, self._max_calls = form, tools, max_calls
        self._all = begun
        """The text as sampled, and what of it was searched for calls."""
        self._searched = 0
        self._thinks, self._thinks_first = thinks, thinks

    def feed(self, token_ids: Sequence[int]) -> str:
        """Takes more tokens and returns the text that is final; text from the first call on is held back."""
        self._all += self._reader.feed(token_ids)
        end = len(self._all)
        if self._form is not None:
            start, self._searched, self._thinks = self._form.find(self._all, self._searched, self._thinks)
            if start < 0:  # a tag may have begun, and white space before a call would be removed
                tags = (END_OF_THOUGHT,) if self._thinks else (THINK, *self._form.tags)
                longest = min(end, max(map(len, tags)) - 1)
                begun = (n for n in range(longest, 0, -1) if any(tag.startswith(self._all[end - n :]) for tag in tags))
                self._searched = end - next(begun, 0)
            end = len(self.text) + len(self._all[len(self.text) : self._searched].rstrip())
            if start < 0:
                self._searched = end
        fresh = self._all[len(self.text) : end]
        self.text += fresh
        return fresh

    def finish(self) -> str:
        """Returns the text that was held back, without the calls."""
        text = self._all + self._reader.finish()
        if self._form is not None:
            text, calls, self.unparsed = split_calls(text, self._form, self._tools, thinks=self._thinks_first)
            for name, arguments in calls:
                if len(self.calls) < self._max_calls:
                    function = {"name": name, "arguments": arguments}
                    self.calls.append({"id": new_call_id(), "type": "function", "function": function})
            self.dropped = len(calls) - len(self.calls)
        fresh, self.text = text[len(self.text) :], text
        return fresh

    def message(self) -> Json:
        """Returns the response as a message."""
        message: Json = {"role": "assistant", "content": self.text or (None if self.calls else "")}
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class CompletionAnswer:
    """The answer to one request: complete from :meth:`whole`, or in chunks from the other methods."""

    def __init__(self, completions: PolicyCompletions, request: ChatRequest | TextRequest, prompt: Prompt) -> None:
        self._completions = completions
        self._request = request
        self._prompt = prompt
        self._chat = isinstance(request, ChatRequest)
        tools = (isinstance(request, ChatRequest) and request.offered_tools) or ()
        form = completions.tool_format if tools else None
        self._readers = [
            ReplyReader(
                TextReader(completions.tokenizer, request.stops, completions.special_tokens if form else None),
                form,
                tools,
                max_calls=1 if isinstance(request, ChatRequest) and request.parallel_tool_calls is False else math.inf,
                begun=prompt.begun,
                thinks=prompt.thinks,
            )
            for _ in range(request.n or 1)
        ]
        self._forced: Json = {"forced_tokens": prompt.n_forced} if prompt.n_forced else {}
        self._begun: set[int] = set()
        self._offsets = [0] * len(self._readers)
        self._head: Json = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": completions.model_name,
        }

    def whole(self, generations: Sequence[Generation]) -> Json:
        """Returns the body of an answer that is not streamed."""
        choices: list[Json] = []
        for index, (reader, generation) in enumerate(zip(self._readers, generations, strict=True)):
            reader.feed(generation.token_ids)
            reader.finish()
            text: Json = {"message": reader.message()} if self._chat else {"text": reader.text}
            reason = self._finish_reason(index, generation)
            choices.append({**self._choice(index, generation.tokens), **text, "finish_reason": reason})
            self._add_extensions(index, choices[-1], generation)
        self._remember(generations)
        version = min(generation.weight_version for generation in generations)
        answer = {**self._head, "choices": choices, "usage": self._usage(generations), "weight_version": version}
        if self._request.return_token_ids and self._chat:
            answer["prompt_token_ids"] = self._prompt.token_ids
        return {**answer, **self._forced}

    def begin(self, weight_version: int) -> Iterator[Json]:
        """Yields the first chunk of a chat stream, with role and prompt; yields nothing for a text completion."""
        self._head["object"] = "chat.completion.chunk" if self._chat else "text_completion"
        self._head["weight_version"] = weight_version
        if self._request.include_usage:
            self._head["usage"] = None
        if self._chat:
            opening = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            first = self._chunk([{"index": index, **opening} for index in range(len(self._readers))])
            if self._request.return_token_ids:
                first["prompt_token_ids"] = self._prompt.token_ids
            yield {**first, **self._forced}

    def feed(self, index: int, tokens: Sequence[Token]) -> Json:
        """Returns the chunk for further tokens of a choice; it has no text while the text is held back."""
        text = self._readers[index].feed([token.token_id for token in tokens])
        return self._chunk([{**self._choice(index, tokens), **self._delta(text, [])}])

    def end(self, index: int, generation: Generation) -> Json:
        """Returns the last chunk of a choice, with the text that was held back, tool calls and the finish reason."""
        text = self._readers[index].finish()
        choice: Json = {"index": index, "logprobs": None, "finish_reason": self._finish_reason(index, generation)}
        self._add_extensions(index, choice, generation)
        return self._chunk([{**choice, **self._delta(text, self._readers[index].calls)}])

    def close(self, generations: Sequence[Generation]) -> Iterator[Json]:
        """Yields the chunk with the usage, if requested; call it after the last choice has ended."""
        self._remember(generations)
        if self._request.include_usage:
            yield {**self._chunk([]), "usage": self._usage(generations)}

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "choices": choices}

    def _delta(self, text: str, calls: Sequence[Json]) -> Json:
        if not self._chat:
            return {"text": text}
        delta: Json = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        return {"delta": delta}

    def _add_extensions(self, index: int, choice: Json, generation: Generation) -> None:
        versions, unparsed = generation.weight_versions, self._readers[index].unparsed
        if versions is not None:
            choice["weight_versions"] = versions
        if unparsed:
            choice["tool_calls_unparsed"] = unparsed
            self._completions.conversations.counts["tool_calls_unparsed"] += unparsed
            _warn_of_unparsed(self._completions.model_name)

    def _finish_reason(self, index: int, generation: Generation) -> str:
        return "tool_calls" if self._readers[index].calls else generation.finish_reason

    def _choice(self, index: int, tokens: Sequence[Token]) -> Json:
        request = self._request
        choice: Json = {"index": index, "finish_reason": None, "logprobs": None}
        if request.return_token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
            if not self._chat and index not in self._begun:
                choice["prompt_token_ids"] = self._prompt.token_ids
                self._begun.add(index)
        if isinstance(request, ChatRequest):
            if request.logprobs:
                choice["logprobs"] = {"content": [self._chat_logprob(token) for token in tokens]}
        elif request.logprobs is not None:
            choice["logprobs"] = self._text_logprobs(index, tokens)
        return choice

    def _chat_logprob(self, token: Token) -> Json:
        text = self._completions.token_text
        top = [{**text(other), "logprob": max(value, _LOWEST)} for other, value in token.top_logprobs]
        return {**text(token.token_id), "logprob": token.logprob, "top_logprobs": top}

    def _text_logprobs(self, index: int, tokens: Sequence[Token]) -> Json:
        text = self._completions.token_text
        texts = [text(token.token_id)["token"] for token in tokens]
        offsets = [*itertools.accumulate(map(len, texts), initial=self._offsets[index])]
        self._offsets[index] = offsets.pop()
        tops = [token.top_logprobs for token in tokens if token.top_logprobs]
        return {
            "tokens": texts,
            "text_offset": offsets,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{text(other)["token"]: max(value, _LOWEST) for other, value in top} for top in tops],
        }

    def _usage(self, generations: Sequence[Generation]) -> Json:
        prompt, sampled = len(self._prompt.token_ids), sum(len(generation.tokens) for generation in generations)
        cached = min(generation.cached_tokens for generation in generations)
        details = {"cached_tokens": cached, "continued_tokens": self._prompt.continued}
        totals = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        return {**totals, "prompt_tokens_details": details}

    def _remember(self, generations: Sequence[Generation]) -> None:
        if self._prompt.digest:
            for reader, generation in zip(self._readers, generations, strict=True):
                if not reader.dropped:  # otherwise the agent continues without a part of the answer
                    self._completions.conversations.remember(self._prompt, reader.message(), generation.token_ids)
