"""Request bodies of OpenAI's chat and text completions, with vLLM's ``return_token_ids`` (0.10.2 and later)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentlightning_algorithms.shared.policy.server.reply import Json, restore_arguments


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
    # Not supported, and refused because ignoring them would change the prompt, the distribution or the answer's form.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Json | None = None
    min_p: float | None = None
    skip_special_tokens: bool | None = None
    thinking_token_budget: int | None = None
    response_format: Json | None = None
    repetition_penalty: float | None = None
    typical_p: float | None = None
    truncate_prompt_tokens: int | None = None

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
    # Not supported, and refused.
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    documents: list[Json] | None = None

    @property
    def offered_tools(self) -> list[Json] | None:
        return self.tools if self.tools and self.tool_choice != "none" else None

    def template_arguments(self, template: str) -> Json:
        """Returns the arguments for a chat template: ``chat_template_kwargs``, and those from ``reasoning_effort``.

        As in vLLM, a template that reads ``reasoning_effort`` gets the field, and a template that reads
        ``enable_thinking`` gets whether the field is other than "none", unless ``chat_template_kwargs`` sets it.
        """
        arguments = self.chat_template_kwargs or {}
        if self.reasoning_effort is None:
            return arguments
        given = {"enable_thinking": self.reasoning_effort != "none", **arguments}
        given["reasoning_effort"] = self.reasoning_effort
        return {name: value for name, value in given.items() if name in arguments or name in template}


class TextRequest(CompletionRequest):
    """The body of ``POST /v1/completions``."""

    prompt: str | list[int]
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


BodyT = TypeVar("BodyT", bound=BaseModel)
RequestT = TypeVar("RequestT", bound=CompletionRequest)

# Values at which an unsupported field has no effect.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "typical_p": (None, 0, 1),
    "skip_special_tokens": (None, True),
    "thinking_token_budget": (None,),
    # -1 would shorten only a prompt that leaves no room for the answer, and the server refuses such a prompt.
    "truncate_prompt_tokens": (None, -1),
    "add_generation_prompt": (None, True),
    "chat_template": (None, ""),
    "documents": (None, []),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "echo": (None, False),
    "best_of": (None, 1),
    "suffix": (None, ""),
}
_CONSTRAINTS: Final = (
    "add_special_tokens", "allowed_token_ids", "bad_words", "continue_final_message", "ebnf", "echo", "grammar",
    "guided_choice", "guided_grammar", "guided_json", "guided_regex", "guided_whitespace_pattern", "ignore_eos",
    "include_stop_str_in_output", "json_schema", "logits_processors", "min_tokens", "prompt_embeds", "regex",
    "repetition_detection", "stop_regex", "stop_token_ids", "structural_tag", "structured_outputs", "top_a",
    "use_beam_search", "watermarking",
)  # fmt: skip
"""Further fields of vLLM and SGLang. They have no effect where they are empty, 0 or false; otherwise a request is
refused, unless its class declares the field."""
_TEMPLATE_ARGUMENTS: Final = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages", "tokenize", "tools",
)  # fmt: skip
"""Arguments that the server or ``apply_chat_template`` sets; ``chat_template_kwargs`` may not contain them."""


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
    given = {name: getattr(request, name, None) for name in _NEUTRAL}
    unsupported = {name: value for name, value in given.items() if value not in _NEUTRAL[name]}
    unsupported |= {name: body[name] for name in _CONSTRAINTS if body.get(name) and name not in kind.model_fields}
    if unsupported:
        name, value = next(iter(unsupported.items()))
        raise CompletionError(f"{name} = {value!r:.200} is not supported by this server; leave it out.", param=name)
    for name in getattr(request, "chat_template_kwargs", None) or ():
        if name in _TEMPLATE_ARGUMENTS:
            raise CompletionError(f"chat_template_kwargs may not have {name}.", param="chat_template_kwargs")
    return request


def read_message(index: int, message: Json) -> Json:
    """Returns a message with a string as content, the form that all chat templates of text models accept."""
    if not isinstance(message.get("role"), str):
        raise CompletionError(f"messages.{index} has no role.", param=f"messages.{index}.role")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
            raise CompletionError("this model reads only text.", param=f"messages.{index}.content")
        content = "".join(map(str, texts))
    elif content is not None and not isinstance(content, str):
        raise CompletionError("content must be a string or a list of parts.", param=f"messages.{index}.content")
    if not _are_calls(message.get("tool_calls")):
        raise CompletionError("tool_calls must be a list of function calls.", param=f"messages.{index}.tool_calls")
    return restore_arguments({**message, "content": content or ""})


def _are_calls(calls: Any) -> bool:
    if calls is None:
        return True
    return isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function", {}), dict) for call in calls
    )
