"""The bodies of OpenAI's chat and text completions, checked.

Token ids are asked for as in vLLM (0.10.2 and later): ``return_token_ids``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentlightning_algorithms.grpo.server.tool_call import restore_arguments

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


class CompletionRequest(BaseModel):
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

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool((self.stream_options or {}).get("include_usage"))


class ChatRequest(CompletionRequest):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Json], Field(min_length=1)]
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Json | None = None

    @property
    def offered_tools(self) -> list[Json] | None:
        """The tools that the model may call."""
        return self.tools if self.tools and self.tool_choice != "none" else None


class TextRequest(CompletionRequest):
    """The body of ``POST /v1/completions``; the prompt is a text or token ids."""

    prompt: str | list[int]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


RequestT = TypeVar("RequestT", bound=CompletionRequest)

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


def read_message(index: int, message: Json) -> Json:
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
