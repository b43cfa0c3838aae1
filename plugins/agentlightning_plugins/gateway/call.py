"""A call of an agent, from its arrival to the end of its answer."""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from aiohttp import HttpVersion11, web

from agentlightning.frozen import FrozenDict
from agentlightning.semconv import GENERATING
from agentlightning.store.span_writer import AttemptKey
from agentlightning_plugins.gateway.backends.provider import ModelBackend
from agentlightning_plugins.gateway.dialects.dialect import (
    CallRefused,
    Completion,
    Dialect,
    TokenOptions,
    Translation,
    TranslationError,
)
from agentlightning_plugins.gateway.dialects.fields import CHAT_FIELDS
from agentlightning_plugins.gateway.dialects.openai import CHAT
from agentlightning_plugins.gateway.dialects.wire import dump_json
from agentlightning_plugins.gateway.dialects.wire import parse_json as load_json
from agentlightning_plugins.gateway.history import SampledHistory
from agentlightning_plugins.shared.web.request import RequestRefused, parse_json, read_body

logger = logging.getLogger("agentlightning")


class BackendRequest(NamedTuple):
    """One try of a call. Immutable: each try, at the same or another backend, has its own request."""

    backend: ModelBackend
    dialect: Dialect
    """The dialect of the request: the agent's, or Chat Completions with a ``translation``."""
    path: str
    """Path below ``/v1/`` of the backend, with the query of the agent's URL."""
    body: Mapping[str, Any]
    options: TokenOptions
    """The token data that the agent gets; the gateway keeps the rest for itself."""
    translation: Translation | None = None
    sampling: Mapping[str, Any] = FrozenDict()
    """Fields that the backend's entry in the model list sets."""

    def encode(self, fields: Mapping[str, Any]) -> bytes:
        """Returns the body with some fields set."""
        return dump_json({**self.body, **fields})


_BYTES_PER_TOKEN: Final = 4
"""Approximate length of a token in English text."""
_OUTPUT_LIMITS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_UNSTATED_OUTPUT: Final = 1024
"""Assumed number of output tokens of a call that sets no limit."""
_MAX_COUNT: Final = 2**53
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-|$)")


class TraceContext(NamedTuple):
    """The position of a call's span: a child of the agent's span if the request names one, else the root of a trace."""

    trace_id: str
    span_id: str
    parent_id: str | None
    flags: str

    @classmethod
    def from_header(cls, traceparent: str | None) -> TraceContext:
        """Reads W3C's ``traceparent``; a missing or malformed one starts a new trace."""
        match = _TRACEPARENT.match(traceparent) if traceparent else None
        span_id = f"{random.getrandbits(64):016x}"
        if match is None:
            return cls(f"{random.getrandbits(128):032x}", span_id, None, "01")
        return cls(match[1], span_id, match[2], match[3])

    def to_header(self) -> str:
        """Returns the ``traceparent`` for the backend, whose spans become children of this one."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


_IDLE: Final = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
"""Fields of Chat Completions that servers refuse if there are no tools."""


@dataclass(slots=True)
class ModelCall:
    """A call while it is relayed: the agent's request, and what is recorded of the answer."""

    attempt: AttemptKey | None
    """Attempt of the call; None if unknown: such a call is relayed but not recorded."""
    dialect: Dialect
    """Dialect of the agent."""
    body: Mapping[str, Any]
    """Body of the request, without fields that are not passed on."""
    model: str
    trace: TraceContext
    digest: int = 0
    """Hash of the body."""
    is_retry: bool = False
    """Whether the client says that it sends the request again."""
    retry_of: str | None = None
    """The span of the client's try before, if the gateway knows it."""
    conversation: str | None = None
    """The id of the agent's conversation, if a header names it."""
    parent_conversation: str | None = None
    """The id of the conversation that began this one, if it is a sub-agent's."""
    query: str = ""
    """Query of the backend's URL, without the question mark."""
    history: SampledHistory | None = None
    """The answers that models sampled before, to restore them."""
    seed: int | None = None
    """Seed derived from the rollout's seed, for backends that seed calls."""
    start_time: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    """The same, by the monotonic clock."""
    first_time: float = 0.0
    """Time at which the first bytes of a stream arrived."""
    end_time: float = 0.0
    backend: ModelBackend | None = None
    """The backend that answered, or that was tried last."""
    request: BackendRequest | None = None
    """The request of the last try; None if none could be made."""
    completion: Completion = field(default_factory=Completion)
    is_complete: bool = False
    """Whether the whole answer arrived."""
    gateway_version: int | None = None
    """The weight version that the gateway stated when the call was sent."""
    left_out_tools: Sequence[str] = ()
    """Types of the agent's tools that the backend did not get, because only the provider of their API can run them."""
    is_cached: bool = False
    """Whether the answer comes from an earlier call."""
    answer: bytearray = field(default_factory=bytearray)
    """The answer as the backend sent it, if answers are cached."""
    cache_key: str | None = None
    """Key of the answer in the cache."""
    http_status: int | None = None
    """Status of the answer to the agent, if the answer is an error."""
    error: str | None = None
    error_code: str | None = None
    """Code of the error, if the gateway refused the call."""
    is_streaming: bool = False
    """Whether the status and headers of an answer have been sent to the agent."""

    def now(self) -> float:
        """Returns the Unix time, without moves of the clock since the start."""
        return self.start_time + time.monotonic() - self.began

    @property
    def generates(self) -> bool:
        """Whether a model generates the answer; else the call has no seed and no sampling parameters."""
        return self.dialect.operation in GENERATING

    def prepare(self, backend: ModelBackend) -> BackendRequest:
        """Returns the request for a backend, with the backend's sampling parameters.

        Raises:
            TranslationError: the backend speaks neither the agent's dialect nor one that the call can be translated to.
            Exception: one of ``MALFORMED``, if the request is malformed.
        """
        spoken, dialect, body, path, translation = backend.provider.dialects, self.dialect, self.body, "", None
        if dialect.name in spoken:
            path = f"{dialect.path}?{self.query}" if self.query else dialect.path
        else:
            translation = dialect.translate(body) if CHAT.name in spoken else None
            if translation is None:
                raise TranslationError(
                    f"{backend.endpoint} of model {self.model!r} does not speak {dialect.name}, only "
                    f"{', '.join(sorted(spoken))}; set the entry's 'provider' if it does, or to 'litellm'"
                )
            body = {name: value for name, value in translation.request().items() if name in CHAT_FIELDS}
            self.left_out_tools = getattr(translation, "left_out_tools", ())
            dialect, path = CHAT, CHAT.path
        if dialect.name == CHAT.name:
            if not body.get("tools") and not _IDLE.isdisjoint(body):
                body = {name: value for name, value in body.items() if name not in _IDLE}
            if self.history is not None and self.attempt is not None and isinstance(body.get("messages"), list):
                body = {**body, "messages": self.history.restore(self.attempt, body["messages"])}
        # The answers to calls that are not recorded pass unchanged.
        options = TokenOptions(True, True) if self.attempt is None else dialect.read_token_options(body)
        sampling = backend.sampling_fields(body, self.seed) if self.generates else {}
        return BackendRequest(backend, dialect, path, body, options, translation, sampling)


def used_tokens(call: ModelCall) -> tuple[int, int]:
    """Returns the input and output tokens of a call.

    Uses the backend's counts, else the numbers of token ids, else an estimate from the texts: a backend may not count,
    and an agent may disconnect before the counts arrive. A cached answer and a count of tokens count as no tokens.
    """
    if call.is_cached or call.dialect.operation == "count_tokens":
        return 0, 0
    completion = call.completion
    read, written = stated_tokens(completion)
    if read is not None and (written is not None or completion.output_tokens is None):
        return read, written or 0
    choices = completion.choices.values()
    prompt = completion.prompt_token_ids or next((c.prompt_token_ids for c in choices if c.prompt_token_ids), None)
    if prompt is not None:
        return len(prompt), sum(len(choice.token_ids or ()) for choice in choices)
    if call.backend is None or call.http_status is not None:  # the call ended in an error
        return 0, 0
    texts = [text for c in choices for text in (c.text, c.reasoning, c.refusal)]
    texts += [tool.name + tool.arguments for choice in choices for tool in choice.tool_calls.values()]
    n_bytes = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    return len(dump_json(call.body)) // _BYTES_PER_TOKEN, -(-n_bytes // _BYTES_PER_TOKEN)


def estimate_tokens(call: ModelCall, backend: ModelBackend) -> tuple[int, int]:
    """Returns about how many input and output tokens a call may use, before it is sent."""
    asked = {**backend.sampling_defaults, **call.body, **backend.sampling_parameters}
    limits = [asked[name] for name in _OUTPUT_LIMITS if asked.get(name) is not None]
    output = _read_count(limits[0]) if limits else _UNSTATED_OUTPUT
    return len(dump_json(call.body)) // _BYTES_PER_TOKEN, output * (_read_count(asked.get("n")) or 1)


def _read_count(stated: object) -> int:
    """Returns a number of a request, within bounds; 0 if it is not an integer."""
    return min(max(stated, 0), _MAX_COUNT) if isinstance(stated, int) else 0


def stated_tokens(completion: Completion) -> tuple[int | None, int | None]:
    """Returns the input and output tokens that a backend states; None for what is not an integer of 0 or more."""
    read, written = (
        min(stated, _MAX_COUNT) if type(stated) is int and stated >= 0 else None
        for stated in (completion.input_tokens, completion.output_tokens)
    )
    return read, written


MAX_BODY_BYTES: Final = 32 * 2**20
"""Limit of a request's size, both before and after decompression."""
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_QUERY: Final = frozenset({"api-version", "beta"})
"""Query parameters of Azure and Anthropic that are passed on from the agent's URL."""
_CODES: Final = {413: "request_too_large", 415: "unsupported_encoding"}
_CONVERSATIONS: Final = (
    ("x-claude-code-agent-id", "x-claude-code-session-id"),
    ("x-claude-code-session-id", ""),
    ("x-session-id", "x-parent-session-id"),
    ("thread-id", "session-id"),
    ("session-id", ""),
    ("x-codex-window-id", ""),
)
"""Headers of coding agents with the id of a conversation, and of the conversation that began it. The first counts."""
_MAX_ID: Final = 200
_MAX_WARNINGS: Final = 100
_warned: Final[set[str]] = set()
"""Fields that were not passed on; each is logged once."""


async def read_call(
    request: web.BaseRequest, dialect: Dialect, attempt: AttemptKey | None, fields: Mapping[str, Any]
) -> ModelCall:
    """Reads the call of a request, with fields that its path has; raises CallRefused if it contains no call."""
    if request.headers.get("Upgrade", "").lower() == "websocket":  # Codex tries other statuses seven times
        raise CallRefused(426, f"{request.path} takes POST, not WebSockets", "upgrade_required")
    if request.method != "POST":
        raise CallRefused(405, f"{request.path} takes POST, not {request.method}", "method_not_allowed")
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version == HttpVersion11:
        await request.writer.write(_CONTINUE)  # curl, for example, waits for it before it sends a large body
        request.writer.output_size = 0
    try:
        text = await read_body(request, MAX_BODY_BYTES, MAX_BODY_BYTES)
        body = await parse_json(text, loads=load_json)
    except RequestRefused as error:
        raise CallRefused(error.status, str(error), _CODES.get(error.status, "invalid_json")) from None
    body = {**body, **fields} if isinstance(body, dict) and fields else body
    model = body.get("model") if isinstance(body, dict) else None
    if not isinstance(model, str):
        raise CallRefused(400, "the request is not an object with a 'model'", "invalid_request")
    trace = TraceContext.from_header(request.headers.get("traceparent"))
    query = [(name, value) for name, value in request.query.items() if name in _QUERY] if request.query_string else ()
    own, parent = next((pair for pair in _CONVERSATIONS if request.headers.get(pair[0])), ("", ""))
    ids = [request.headers.get(name, "")[:_MAX_ID] or None for name in (own, parent)]
    call = ModelCall(attempt, dialect, _keep_fields(body, dialect), model, trace, query=urlencode(query))
    call.digest = hash(text)
    call.is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
    call.conversation, call.parent_conversation = ids[0], ids[1] if ids[0] != ids[1] else None
    return call


def _keep_fields(body: Mapping[str, Any], dialect: Dialect) -> Mapping[str, Any]:
    """Returns the fields of a request that are passed on."""
    if dialect.fields is None or body.keys() <= dialect.fields:
        return body
    for name in body.keys() - dialect.fields:
        if name not in _warned and len(_warned) < _MAX_WARNINGS:
            _warned.add(name)
            logger.warning(
                "the field %.100r of %s is not passed on to backends; if they need it, set it in the "
                "sampling_parameters of the model list",
                name,
                dialect.path,
            )
    return {name: value for name, value in body.items() if name in dialect.fields}
