"""Requests of OpenAI's chat and text completions: their bodies, prompts and sampling parameters."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentlightning.semconv import join_texts
from agentlightning_algorithms.shared.policy.draw import SamplingParams
from agentlightning_algorithms.shared.policy.model import Policy
from agentlightning_algorithms.shared.policy.server.conversation import Conversations, Prompt, PromptTooLongError
from agentlightning_algorithms.shared.policy.server.tool_format import (
    FORMATS,
    KEEP_THOUGHTS,
    TEMPLATE_ERRORS,
    THINK,
    Json,
    begin_call,
    check_thoughts,
    find_format,
    parse_object,
    special_tokens,
)


class CompletionError(Exception):
    """A request that is refused, with its HTTP status, the invalid field and a machine-readable code."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class CompletionRequest(BaseModel):
    """Fields of both APIs; null means the default, and unknown fields are ignored, as in vLLM."""

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

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class ChatRequest(CompletionRequest):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Json], Field(min_length=1)]
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None
    reasoning_effort: str | None = None

    @property
    def offered_tools(self) -> list[Json] | None:
        return self.tools if self.tools and self.tool_choice != "none" else None

    @property
    def forced_tool(self) -> str | None:
        """The tool that has to be called; empty for any; None if the model may answer with a text.

        Raises:
            CompletionError: ``tool_choice`` is unknown, or names a tool that is not offered.
        """
        choice = self.tool_choice
        if choice in (None, "auto", "none"):
            return None
        functions = [tool.get("function") for tool in self.tools or ()]
        names = [str(function.get("name")) for function in functions if isinstance(function, dict)]
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        name = names[0] if len(names) == 1 else ""
        if isinstance(function, dict):
            name = str(function.get("name"))
        elif choice != "required":
            raise CompletionError(
                f"tool_choice = {choice!r:.200} is not supported; use auto, none, required, or a function by its name.",
                param="tool_choice",
            )
        if not names or (name and name not in names):
            said = f"the tools are {', '.join(names)}" if names else "there are no tools"
            raise CompletionError(f"tool_choice = {choice!r:.200}, but {said}.", param="tool_choice")
        return name

    @property
    def template_arguments(self) -> Json:
        """Arguments of the chat template, which ignores those that it does not read.

        As in vLLM, ``reasoning_effort`` also sets ``enable_thinking``, unless ``chat_template_kwargs`` does.
        """
        arguments = self.chat_template_kwargs or {}
        if self.reasoning_effort is None:
            return arguments
        thinks = self.reasoning_effort != "none"
        return {"enable_thinking": thinks, **arguments, "reasoning_effort": self.reasoning_effort}


class TextRequest(CompletionRequest):
    """The body of ``POST /v1/completions``."""

    prompt: str | list[int]
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None


logger = logging.getLogger("agentlightning")
BodyT = TypeVar("BodyT", bound=BaseModel)
RequestT = TypeVar("RequestT", bound=CompletionRequest)

_MAX_STOPS: Final = 64
_MAX_STOP_CHARS: Final = 1000
"""Each token is compared with the beginnings of all stop strings."""
_MIN_TEMPERATURE: Final = 1e-5

_NOTHING: Final[tuple[object, ...]] = (None, False, 0, "", [], {})
_UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    **dict.fromkeys(
        (
            "add_special_tokens", "allowed_token_ids", "bad_words", "chat_template", "continue_final_message",
            "documents", "ebnf", "echo", "frequency_penalty", "grammar", "guided_choice", "guided_grammar",
            "guided_json", "guided_regex", "guided_whitespace_pattern", "ignore_eos", "include_stop_str_in_output",
            "json_schema", "logit_bias", "logits_processors", "min_p", "min_tokens", "presence_penalty",
            "prompt_embeds", "regex", "repetition_detection", "stop_regex", "stop_token_ids", "structural_tag",
            "structured_outputs", "suffix", "top_a", "use_beam_search", "watermarking",
        ),
        _NOTHING,
    ),
    "add_generation_prompt": (None, True),
    "best_of": (*_NOTHING, 1),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "skip_special_tokens": (None, True),
    "thinking_token_budget": (None,),
    # -1 would shorten only a prompt that leaves no room for the answer, and the server refuses such a prompt.
    "truncate_prompt_tokens": (None, -1),
    "typical_p": (None, 0, 1),
}  # fmt: skip
"""Fields of OpenAI, vLLM and SGLang, with the values at which they have no effect.

Other values are refused, because ignoring them would change the prompt, the distribution or the answer's form."""
_TEMPLATE_ARGUMENTS: Final = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages", "tokenize", "tools",
)  # fmt: skip
"""Arguments that the server or ``apply_chat_template`` sets; ``chat_template_kwargs`` may not contain them."""


_LEARNED_FORMATS: Final = ("json_object", "json_schema")
"""Forms of answers that agents may ask for; the model has to know them, because nothing is excluded from sampling."""


@lru_cache
def _warn_of_format(kind: str) -> None:
    logger.warning(
        "a call asks for response_format %r, which this server does not enforce: the model samples from its whole "
        "distribution, so check the answer in the agent, and reward the right form",
        kind,
    )


def parse_body(kind: type[BodyT], body: Any) -> BodyT:
    """Validates a request body; a CompletionError names the invalid field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        raise CompletionError(f"{param or 'body'}: {first['msg']}", param=param) from None


def parse_request(kind: type[RequestT], body: Any, models: Collection[str]) -> RequestT:
    """Validates the body of a completion request, its model and its unsupported fields."""
    request = parse_body(kind, body)
    if request.model is not None and request.model not in models:
        message = f"the model {request.model!r} does not exist; this server has {', '.join(map(repr, models))}."
        raise CompletionError(message, status=404, param="model", code="model_not_found")
    for name, value in body.items():
        supports = kind is TextRequest and name == "add_special_tokens"
        if name == "response_format" and isinstance(value, dict) and value.get("type") in _LEARNED_FORMATS:
            supports = True
            _warn_of_format(value["type"])
        if not supports and value not in _UNSUPPORTED.get(name, (value,)):
            raise CompletionError(f"{name} = {value!r:.200} is not supported by this server; leave it out.", param=name)
    for name in getattr(request, "chat_template_kwargs", None) or ():
        if name in _TEMPLATE_ARGUMENTS:
            raise CompletionError(f"chat_template_kwargs may not have {name}.", param="chat_template_kwargs")
    return request


class PolicyCompletions:
    """Turns requests into prompts and sampling parameters."""

    def __init__(
        self,
        policy: Policy,
        model_name: str,
        max_length: int,
        *,
        tool_format: str = "auto",
        keep_thinking: bool = False,
    ) -> None:
        """Takes a policy, its name, and the maximum tokens of a prompt and its response together.

        ``tool_format`` is the form of tool calls: ``auto`` for the chat template's, ``none``, or one of
        ``FORMATS``. With ``keep_thinking``, prompts keep the thoughts of earlier turns.

        Raises:
            ConfigError: the chat template writes tool calls in an unknown form, or cannot keep thoughts.
        """
        self.tool_format = find_format(policy.tokenizer) if tool_format == "auto" else FORMATS.get(tool_format)
        if keep_thinking:
            check_thoughts(policy.tokenizer)
        self._template_arguments = KEEP_THOUGHTS if keep_thinking else {}
        self.special_tokens = special_tokens(policy.tokenizer)
        self.model_name = model_name
        self.max_length = max_length
        self.conversations = Conversations(policy.tokenizer, policy.stop_ids, max_length=max_length)
        self.tokenizer = policy.tokenizer
        self._vocabulary = int(policy.model.config.vocab_size)
        self.token_text = lru_cache(maxsize=None)(self._read_token)

    def prompt(self, request: ChatRequest | TextRequest) -> Prompt:
        """Tokenizes and checks a prompt; the model's chat template renders the messages of a chat."""
        try:
            return self._chat_prompt(request) if isinstance(request, ChatRequest) else self._text_prompt(request)
        except PromptTooLongError as error:
            what = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise CompletionError(f"{error}; shorten it.", param=what, code="context_length_exceeded") from None

    def _text_prompt(self, request: TextRequest) -> Prompt:
        if isinstance(request.prompt, str):
            special_tokens = request.add_special_tokens is not False
            return Prompt(self.conversations.encode(request.prompt, special_tokens=special_tokens))
        for token in request.prompt[: self.max_length]:
            if not 0 <= token < self._vocabulary:
                raise CompletionError(f"token id {token} is not in 0 to {self._vocabulary - 1}.", param="prompt")
        return Prompt(request.prompt)

    def _chat_prompt(self, request: ChatRequest) -> Prompt:
        messages = read_messages(request.messages)
        arguments = {**self._template_arguments, **request.template_arguments}
        tools, forced = request.offered_tools, request.forced_tool
        if tools and self.tool_format is None:
            raise CompletionError(
                "the model's chat template writes no tool calls, so the server cannot read calls; leave tools out, or "
                "start the server with the tool_format that the model was trained with.",
                param="tools",
            )
        try:
            prompt = self.conversations.prompt(messages, tools, arguments or None)
        except TEMPLATE_ERRORS as error:
            fields = [name for name in ("chat_template_kwargs", "reasoning_effort") if getattr(request, name)]
            refused = " and ".join(["these messages", *fields])
            param = fields[0] if fields else "messages"
            raise CompletionError(f"the chat template refuses {refused}: {error}", param=param) from error
        if forced is None:
            return prompt._replace(thinks=prompt.text.rstrip().endswith(THINK))
        try:
            before, begun = begin_call(self.tokenizer, forced or None, arguments)
        except ValueError as error:
            raise CompletionError(f"tool_choice: {error}.", param="tool_choice") from error
        added = self.conversations.encode(before + begun)
        text, token_ids = prompt.text + before + begun, [*prompt.token_ids, *added]
        return prompt._replace(token_ids=token_ids, text=text, begun=begun, n_forced=len(added))

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
        if len(request.stops) > _MAX_STOPS or any(len(stop) > _MAX_STOP_CHARS for stop in request.stops):
            raise CompletionError(
                f"stop: at most {_MAX_STOPS} strings of {_MAX_STOP_CHARS} characters are allowed.", param="stop"
            )
        return [
            SamplingParams(
                max_tokens=asked or room,
                temperature=_read_temperature(request.temperature),
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


def _read_temperature(given: float | None) -> float:
    """Returns the temperature; 0 for one so low that logits divided by it overflow, as in vLLM."""
    temperature = 1.0 if given is None else given
    return temperature if temperature >= _MIN_TEMPERATURE else 0.0


def read_messages(messages: Sequence[Json], place: str = "messages") -> list[Json]:
    """Returns messages with a string as content, the form that all chat templates of text models accept.

    Serving and training read with this function, so that a model is trained on the prompts that it receives.

    Raises:
        CompletionError: a message cannot be read; the error names the field below ``place``.
    """
    return [_read_message(f"{place}.{i}", message) for i, message in enumerate(messages)]


def _read_message(place: str, message: Json) -> Json:
    if not isinstance(message.get("role"), str):
        raise CompletionError(f"{place} has no role.", param=f"{place}.role")
    content = join_texts(message.get("content"))
    if isinstance(content, list):
        i = next(i for i, part in enumerate(content) if isinstance(join_texts([part]), list))
        raise CompletionError(f"{place}.content.{i}: this model reads only text.", param=f"{place}.content")
    if content is not None and not isinstance(content, str):
        raise CompletionError(f"{place}.content must be a string or a list of parts.", param=f"{place}.content")
    if not _are_calls(message.get("tool_calls")):
        raise CompletionError(f"{place}.tool_calls must be a list of function calls.", param=f"{place}.tool_calls")
    return _restore_arguments({**message, "content": content or ""})


def _are_calls(calls: Any) -> bool:
    if calls is None:
        return True
    return isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function", {}), dict) for call in calls
    )


def _restore_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose tool calls have arguments as objects, which chat templates expect."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    restored = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            arguments = parse_object(function["arguments"])
            if arguments is not None:
                call = {**call, "function": {**function, "arguments": arguments}}
        restored.append(call)
    return {**message, "tool_calls": restored}
