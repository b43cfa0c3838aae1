"""OpenAI's chat and text completions: tokenizes requests and builds answers, whole or as a stream.

As in vLLM (0.10.2 and later), ``return_token_ids`` adds ``prompt_token_ids`` and each choice's ``token_ids``. Our own
fields are ``weight_version``, the version of the weights that sampled the answer; ``weight_versions`` of a choice, the
version for each token, if the weights changed meanwhile; and ``continued_tokens`` in ``usage.prompt_tokens_details``,
next to ``cached_tokens``: prompt tokens reused from an earlier answer and its prompt, and not tokenized again.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import lru_cache

from jinja2 import TemplateError

from agentlightning_algorithms.shared.policy.draw import Generation, SamplingParams, Token
from agentlightning_algorithms.shared.policy.model import Policy
from agentlightning_algorithms.shared.policy.server.conversation import Conversations, Prompt
from agentlightning_algorithms.shared.policy.server.reply import Json, ReplyReader
from agentlightning_algorithms.shared.policy.server.request import (
    ChatRequest,
    CompletionError,
    TextRequest,
    read_message,
)

logger = logging.getLogger("agentlightning")

# JSON has no infinity; OpenAI and vLLM report this for tokens of probability 0.
_LOWEST = -9999.0


class PolicyCompletions:
    """Turns requests into prompts and sampling parameters."""

    def __init__(self, policy: Policy, model_name: str, max_length: int) -> None:
        """Takes a policy, its name, and the maximum tokens of a prompt and its response together."""
        self.model_name = model_name
        self.max_length = max_length
        self.conversations = Conversations(policy.tokenizer, policy.stop_ids)
        self.tokenizer = policy.tokenizer
        self._vocabulary = int(policy.model.config.vocab_size)
        self._effort_logged = False
        """Whether the log says that the chat template does not read ``reasoning_effort``."""
        self.token_text = lru_cache(maxsize=None)(self._read_token)

    def prompt(self, request: ChatRequest | TextRequest) -> Prompt:
        """Tokenizes and checks a prompt; the model's chat template renders the messages of a chat."""
        if isinstance(request, ChatRequest):
            return self._chat_prompt(request)
        if isinstance(request.prompt, str):
            special_tokens = request.add_special_tokens is not False
            return Prompt(self.conversations.encode(request.prompt, special_tokens=special_tokens))
        for token in request.prompt:
            if not 0 <= token < self._vocabulary:
                raise CompletionError(f"token id {token} is not in 0 to {self._vocabulary - 1}.", param="prompt")
        return Prompt(request.prompt)

    def _chat_prompt(self, request: ChatRequest) -> Prompt:
        messages = [read_message(i, message) for i, message in enumerate(request.messages)]
        own = request.chat_template_kwargs or {}
        arguments = request.template_arguments(self._read_template(request))
        try:
            return self.conversations.prompt(messages, request.offered_tools, arguments or None)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            fields = [*(["chat_template_kwargs"] if own else []), *(["reasoning_effort"] if arguments != own else [])]
            refused = " and ".join(["these messages", *fields])
            param = fields[0] if fields else "messages"
            raise CompletionError(f"the chat template refuses {refused}: {error}", param=param) from error

    def _read_template(self, request: ChatRequest) -> str:
        """Returns the template, or all templates as one text; logs once that it does not read ``reasoning_effort``."""
        template = str(self.tokenizer.chat_template)
        if request.reasoning_effort is not None and "reasoning_effort" not in template and not self._effort_logged:
            self._effort_logged = True
            does = "passes enable_thinking instead" if "enable_thinking" in template else "ignores this field"
            logger.warning(
                "the chat template of %r does not read reasoning_effort, so the server %s", self.model_name, does
            )
        return template

    def sampling_params(self, request: ChatRequest | TextRequest, prompt_length: int) -> list[SamplingParams]:
        """Returns the sampling parameters of each of the ``n`` responses, and checks that they fit after the prompt."""
        room = self.max_length - prompt_length
        asked = request.max_tokens
        if isinstance(request, ChatRequest):
            asked = request.max_completion_tokens or asked
            tops = (request.top_logprobs or 0) if request.logprobs else 0
        else:
            tops = request.logprobs or 0
        if not prompt_length:
            raise CompletionError("the prompt is empty.", param="prompt")
        if room < (asked or 1):
            raise CompletionError(
                f"the prompt has {prompt_length} tokens and the answer may have {asked or 1}, but the model has room "
                f"for {self.max_length} together; shorten the messages or lower max_tokens.",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )
        if "" in request.stops:
            raise CompletionError("stop: an empty string would end every answer.", param="stop")
        return [
            SamplingParams(
                max_tokens=asked or room,
                temperature=1.0 if request.temperature is None else request.temperature,
                top_p=request.top_p or 1.0,
                top_k=max(0, request.top_k or 0),
                stop=request.stops,
                seed=None if request.seed is None else f"{request.seed}/{i}",
                top_logprobs=tops,
            )
            for i in range(request.n or 1)
        ]

    def _read_token(self, token: int) -> Json:
        text = str(self.tokenizer.decode([token]))
        return {"token": text, "bytes": list(text.encode())}


class CompletionAnswer:
    """The answer to one request: complete from :meth:`whole`, or in chunks from the other methods."""

    def __init__(self, completions: PolicyCompletions, request: ChatRequest | TextRequest, prompt: Prompt) -> None:
        self._completions = completions
        self._request = request
        self._prompt = prompt
        self._chat = isinstance(request, ChatRequest)
        max_calls: float = 0
        if isinstance(request, ChatRequest) and request.offered_tools:
            max_calls = 1 if request.parallel_tool_calls is False else math.inf
        self._readers = [ReplyReader(completions.tokenizer, request.stops, max_calls) for _ in range(request.n or 1)]
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
            _add_versions(choices[-1], generation)
        self._remember(generations)
        version = min(generation.weight_version for generation in generations)
        answer = {**self._head, "choices": choices, "usage": self._usage(generations), "weight_version": version}
        if self._request.return_token_ids and self._chat:
            answer["prompt_token_ids"] = self._prompt.token_ids
        return answer

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
            yield first

    def feed(self, index: int, tokens: Sequence[Token]) -> Json:
        """Returns the chunk for further tokens of a choice; it has no text while the text is held back."""
        text, calls = self._readers[index].feed([token.token_id for token in tokens])
        return self._chunk([{**self._choice(index, tokens), **self._delta(index, text, calls)}])

    def end(self, index: int, generation: Generation) -> Json:
        """Returns the last chunk of a choice, with the text that was held back and the finish reason."""
        text, calls = self._readers[index].finish()
        choice: Json = {"index": index, "logprobs": None, "finish_reason": self._finish_reason(index, generation)}
        _add_versions(choice, generation)
        return self._chunk([{**choice, **self._delta(index, text, calls)}])

    def close(self, generations: Sequence[Generation]) -> Iterator[Json]:
        """Yields the chunk with the usage, if requested; call it after the last choice has ended."""
        self._remember(generations)
        if self._request.include_usage:
            yield {**self._chunk([]), "usage": self._usage(generations)}

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "choices": choices}

    def _delta(self, index: int, text: str, calls: list[Json]) -> Json:
        if not self._chat:
            return {"text": text}
        delta: Json = {"content": text} if text else {}
        if calls:
            before = len(self._readers[index].calls) - len(calls)
            delta["tool_calls"] = [{"index": before + i, **call} for i, call in enumerate(calls)]
        return {"delta": delta}

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


def _add_versions(choice: Json, generation: Generation) -> None:
    versions = generation.weight_versions
    if versions is not None:
        choice["weight_versions"] = versions
