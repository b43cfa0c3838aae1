"""A call of an agent, from its arrival to the end of its answer."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from agentlightning_plugins.gateway.dialects.dialect import Completion, Dialect

if TYPE_CHECKING:
    from agentlightning_plugins.gateway.backends.backend import Backend
    from agentlightning_plugins.gateway.backends.request import BackendRequest

AttemptKey: TypeAlias = tuple[str, str]
"""Rollout and attempt id."""
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


@dataclass(slots=True)
class Call:
    """A call while it is relayed: the agent's request, and what is recorded of the answer."""

    attempt: AttemptKey | None
    """None if unknown: such a call is relayed and not recorded."""
    dialect: Dialect
    """Of the agent."""
    text: bytes
    """The body as the agent sent it."""
    body: Mapping[str, Any]
    """The same, parsed."""
    model: str
    trace: TraceContext
    query: str = ""
    """Of the agent's URL, without the question mark."""
    seed: int | None = None
    """Derived from the rollout's, for backends that seed calls."""
    start_time: float = field(default_factory=time.time)
    first_time: float = 0.0
    """Arrival of the first bytes of a stream."""
    end_time: float = 0.0
    backend: Backend | None = None
    """The one that answered, or was tried last."""
    request: BackendRequest | None = None
    """The request of the last try; None if none could be made."""
    completion: Completion = field(default_factory=Completion)
    is_complete: bool = False
    """Whether the whole answer arrived."""
    exceeded_limit: str | None = None
    """The limit of the attempt's usage for which the call was refused."""
    http_status: int | None = None
    """Of the answer to the agent, if that is an error."""
    error: str | None = None

    def redact_key(self, text: bytes) -> bytes:
        """Removes the API key of the backend: some servers quote a key that they refuse."""
        return text if self.backend is None else self.backend.redact_key(text)


def used_tokens(call: Call) -> tuple[int, int]:
    """Input and output tokens of a call: as the backend states them, else the number of token ids."""
    completion = call.completion
    if completion.input_tokens is not None:
        stated: tuple[object, object] = completion.input_tokens, completion.output_tokens  # backends may state anything
        input_tokens, output_tokens = (number if isinstance(number, int) else 0 for number in stated)
        return input_tokens, output_tokens
    choices = completion.choices.values()
    prompt = completion.prompt_token_ids or next((c.prompt_token_ids for c in choices if c.prompt_token_ids), None)
    return len(prompt or ()), sum(len(choice.token_ids or ()) for choice in choices)
