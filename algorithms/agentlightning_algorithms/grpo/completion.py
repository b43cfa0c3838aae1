"""OpenAI's chat and text completions: requests checked and tokenized, generations turned into answers.

Token ids are asked for and answered as in vLLM (0.10.2 and later): ``return_token_ids`` brings ``prompt_token_ids``
and each choice's ``token_ids``. Ours is ``weight_version``, the version of the weights that sampled the answer.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentlightning_algorithms.grpo.policy import Policy
from agentlightning_algorithms.grpo.sampler import Generation
from agentlightning_algorithms.grpo.sampling import SamplingParams
from agentlightning_algorithms.grpo.tool_call import ToolCall, parse_tool_calls, restore_arguments

Json = dict[str, Any]


class RequestError(Exception):
    """A request that cannot be served as it is.

    Attributes:
        status: HTTP status, 4xx.
        param: the field at fault.
        code: machine-readable reason.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class _Request(BaseModel):
    """Fields of both APIs; null means the default, and what is not listed is ignored, as in vLLM."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: Json | None = None
    return_token_ids: bool | None = None
    # What would change the distribution or the form of the answer is refused rather than ignored.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Json | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ChatRequest(_Request):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Json], Field(min_length=1)]
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Json | None = None


class TextRequest(_Request):
    """The body of ``POST /v1/completions``; the prompt is a text or token ids."""

    prompt: str | list[int]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


RequestT = TypeVar("RequestT", bound=_Request)

# Values under which a field that is not supported means nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "echo": (None, False),
    "best_of": (None, 1),
    "suffix": (None, ""),
}


def parse_request(kind: type[RequestT], body: bytes, model_name: str) -> RequestT:
    """Reads and checks a request body.

    Raises:
        RequestError: with the field at fault.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        raise RequestError(f"{param or 'body'}: {first['msg']}", param=param) from None
    if request.model not in (None, model_name):
        message = f"the model {request.model!r} does not exist; this server has {model_name!r}."
        raise RequestError(message, status=404, param="model", code="model_not_found")
    for name, allowed in _NEUTRAL.items():
        value = getattr(request, name, None)
        if value not in allowed:
            raise RequestError(f"{name} = {value!r} is not supported by this server; leave it out.", param=name)
    return request


class Completions:
    """Turns requests into token ids and settings, and generations into answers, with one policy's tokenizer."""

    def __init__(self, policy: Policy, model_name: str, max_length: int) -> None:
        """Takes a policy, what requests call it, and the tokens that a prompt and its response may have together."""
        self.model_name = model_name
        self.max_length = max_length
        self._tokenizer = policy.tokenizer
        self._vocabulary = int(policy.model.config.vocab_size)
        self._token_text = lru_cache(maxsize=None)(self._read_token)

    def chat_prompt(self, request: ChatRequest) -> list[int]:
        """Returns the conversation as tokens, as the model's chat template renders it.

        Raises:
            RequestError: messages the template does not take, or a model without a chat template.
        """
        messages = [_text_message(i, message) for i, message in enumerate(request.messages)]
        tools: Any = request.tools if request.tools and request.tool_choice != "none" else None
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        return self._encode(str(text), special_tokens=False)

    def text_prompt(self, request: TextRequest) -> list[int]:
        """Returns the prompt as tokens.

        Raises:
            RequestError: an empty prompt or a token id outside the vocabulary.
        """
        if isinstance(request.prompt, str):
            return self._encode(request.prompt, special_tokens=True)
        for token in request.prompt:
            if not 0 <= token < self._vocabulary:
                raise RequestError(f"token id {token} is not in 0 to {self._vocabulary - 1}.", param="prompt")
        return request.prompt

    def sampling_params(self, request: ChatRequest | TextRequest, prompt_length: int) -> list[SamplingParams]:
        """Returns the settings of each of the ``n`` responses.

        Raises:
            RequestError: the response does not fit behind the prompt.
        """
        room = self.max_length - prompt_length
        asked = request.max_tokens
        if isinstance(request, ChatRequest):
            asked = request.max_completion_tokens or asked
            tops = (request.top_logprobs or 0) if request.logprobs else 0
        else:
            tops = request.logprobs or 0
        if not prompt_length:
            raise RequestError("the prompt is empty.", param="prompt")
        if room < (asked or 1):
            raise RequestError(
                f"the prompt has {prompt_length} tokens and the answer may have {asked or 1}, but the model has room "
                f"for {self.max_length} together; shorten the messages or lower max_tokens.",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )
        stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
        if "" in stop:
            raise RequestError("stop: an empty string would end every answer.", param="stop")
        return [
            SamplingParams(
                max_tokens=asked or room,
                temperature=1.0 if request.temperature is None else request.temperature,
                top_p=request.top_p or 1.0,
                top_k=max(0, request.top_k or 0),
                stop=stop,
                seed=None if request.seed is None else f"{request.seed}/{i}",
                top_logprobs=tops,
            )
            for i in range(request.n or 1)
        ]

    def chat_answer(self, request: ChatRequest, prompt_ids: list[int], generations: Sequence[Generation]) -> Json:
        """Returns the body of a chat completion."""
        answer = self._answer("chatcmpl", "chat.completion", request, prompt_ids, generations)
        if request.return_token_ids:
            answer["prompt_token_ids"] = prompt_ids
        for choice, generation in zip(answer["choices"], generations, strict=True):
            text = self._text(generation, request.stop)
            calls: list[ToolCall] = []
            if request.tools and request.tool_choice != "none":
                text, calls = parse_tool_calls(text)
            message: Json = {"role": "assistant", "content": text or (None if calls else "")}
            if calls:
                choice["finish_reason"] = "tool_calls"
                message["tool_calls"] = [
                    {
                        "id": f"call_{uuid.uuid4().hex[:24]}",
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in calls
                ]
            choice["message"] = message
            choice["logprobs"] = {"content": self._chat_logprobs(generation)} if request.logprobs else None
        return answer

    def text_answer(self, request: TextRequest, prompt_ids: list[int], generations: Sequence[Generation]) -> Json:
        """Returns the body of a text completion."""
        answer = self._answer("cmpl", "text_completion", request, prompt_ids, generations)
        for choice, generation in zip(answer["choices"], generations, strict=True):
            choice["text"] = self._text(generation, request.stop)
            choice["logprobs"] = None if request.logprobs is None else self._text_logprobs(generation)
            if request.return_token_ids:
                choice["prompt_token_ids"] = prompt_ids
        return answer

    def _answer(
        self, prefix: str, kind: str, request: _Request, prompt_ids: list[int], generations: Sequence[Generation]
    ) -> Json:
        choices: list[Json] = []
        for index, generation in enumerate(generations):
            choice: Json = {"index": index, "finish_reason": generation.finish_reason}
            if request.return_token_ids:
                choice["token_ids"] = generation.token_ids
            choices.append(choice)
        sampled = sum(len(generation.token_ids) for generation in generations)
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model_name,
            "choices": choices,
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": sampled,
                "total_tokens": len(prompt_ids) + sampled,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
            "weight_version": generations[0].weight_version,
        }

    def _encode(self, text: str, *, special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        return ids

    def _text(self, generation: Generation, stop: str | list[str] | None) -> str:
        text = str(self._tokenizer.decode(generation.token_ids, skip_special_tokens=True))
        for end in [stop] if isinstance(stop, str) else stop or []:
            text = text.partition(end)[0]
        return text

    def _read_token(self, token: int) -> Json:
        text = str(self._tokenizer.decode([token]))
        return {"token": text, "bytes": list(text.encode())}

    def _chat_logprobs(self, generation: Generation) -> list[Json]:
        content = [
            {**self._token_text(token), "logprob": logprob, "top_logprobs": []}
            for token, logprob in zip(generation.token_ids, generation.logprobs, strict=True)
        ]
        for entry, likeliest in zip(content, generation.top_logprobs, strict=False):
            entry["top_logprobs"] = [
                {**self._token_text(token), "logprob": max(logprob, _LOWEST)} for token, logprob in likeliest
            ]
        return content

    def _text_logprobs(self, generation: Generation) -> Json:
        texts = [self._token_text(token)["token"] for token in generation.token_ids]
        offsets = [0]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": generation.logprobs,
            "top_logprobs": [
                {self._token_text(token)["token"]: max(logprob, _LOWEST) for token, logprob in likeliest}
                for likeliest in generation.top_logprobs
            ],
            "text_offset": offsets[:-1],
        }


# JSON has no infinity; OpenAI and vLLM report impossible tokens with this.
_LOWEST = -9999.0


def stream_chunks(answer: Json, *, include_usage: bool) -> Iterator[Json]:
    """Cuts a finished answer into the chunks of a stream: who speaks, what is said, how it ended, what it cost."""
    chat = answer["object"] == "chat.completion"
    head = {key: answer[key] for key in ("id", "created", "model", "weight_version")}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    if include_usage:
        head["usage"] = None
    if chat:
        roles = [_chunk_choice(choice, delta={"role": "assistant", "content": ""}) for choice in answer["choices"]]
        first = {**head, "choices": roles}
        if "prompt_token_ids" in answer:
            first["prompt_token_ids"] = answer["prompt_token_ids"]
        yield first
    for choice in answer["choices"]:
        said = {key: choice[key] for key in ("logprobs", "token_ids", "prompt_token_ids") if key in choice}
        if not chat:
            yield {**head, "choices": [_chunk_choice(choice, text=choice["text"], **said)]}
            yield {**head, "choices": [_chunk_choice(choice, text="", finish_reason=choice["finish_reason"])]}
            continue
        delta = {key: value for key, value in choice["message"].items() if key != "role" and value}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        yield {**head, "choices": [_chunk_choice(choice, delta=delta, **said)]}
        yield {**head, "choices": [_chunk_choice(choice, delta={}, finish_reason=choice["finish_reason"])]}
    if include_usage:
        yield {**head, "choices": [], "usage": answer["usage"]}


def _chunk_choice(choice: Json, **fields: Any) -> Json:
    return {"index": choice["index"], "logprobs": None, "finish_reason": None, **fields}


def _text_message(index: int, message: Json) -> Json:
    """Returns a message with plain text for content, which is all that chat templates of text models agree on."""
    if not isinstance(message.get("role"), str):
        raise RequestError(f"messages.{index} has no role.", param=f"messages.{index}.role")
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise RequestError("only text can be read by this model.", param=f"messages.{index}.content")
        content = "".join(str(text) for text in texts)
    elif content is not None and not isinstance(content, str):
        raise RequestError("content must be a string or a list of parts.", param=f"messages.{index}.content")
    return restore_arguments({**message, "content": content or ""})
