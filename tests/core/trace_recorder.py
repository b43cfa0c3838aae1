"""Builds the spans of one attempt by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentlightning.adapter import TraceToTriplet
from agentlightning.types import Span, TraceStatus, Triplet


class Recorder:
    """Builds the spans of one attempt; a span without ``at`` starts when the previous one ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.now = 1000.0

    def add(
        self,
        name: str,
        attributes: dict[str, Any] | None = None,
        *,
        parent: str | None = None,
        span_id: str | None = None,
        at: tuple[float, float] | None = None,
        error: bool = False,
    ) -> str:
        start, end = at or (self.now, self.now + 1.0)
        self.now = max(self.now, end)
        self.spans.append(
            Span.from_attributes(
                attributes=attributes or {},
                rollout_id="ro-1",
                attempt_id="at-1",
                sequence_id=len(self.spans) + 1,
                name=name,
                trace_id="0" * 32,
                span_id=span_id or f"{len(self.spans) + 1:016x}",
                parent_id=parent,
                start_time=start,
                end_time=end,
                status=TraceStatus(status_code="ERROR") if error else None,
            )
        )
        return self.spans[-1].span_id

    def client(self, response_id: str | None, *, text: str = "hi", **where: Any) -> str:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "m",
            "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "ask"}]}]),
        }
        if response_id is not None:
            answer = {"role": "assistant", "parts": [{"type": "text", "content": text}], "finish_reason": "stop"}
            attributes |= {
                "gen_ai.response.id": response_id,
                "gen_ai.output.messages": json.dumps([answer]),
                "gen_ai.response.finish_reasons": ["tool_call"],
            }
        return self.add("openai.chat", attributes, **where)

    def gateway(
        self, response_id: str | None, tokens: Sequence[int] = (7, 8), *, complete: bool = True, **where: Any
    ) -> str:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "m",
            "gen_ai.response.model": "m-1",
            "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "ask me"}]}]),
            "agentlightning.gateway.complete": complete,
        }
        if response_id is not None:
            answer = {"role": "assistant", "parts": [{"type": "text", "content": "sampled"}], "finish_reason": "length"}
            attributes |= {
                "gen_ai.response.id": response_id,
                "gen_ai.output.messages": json.dumps([answer]),
                "gen_ai.response.finish_reasons": ["length"],
                "agentlightning.weight_version": 3,
                "prompt_token_ids": [1, 2, 3],
                "response_token_ids": list(tokens),
                "logprobs": [-0.5] * len(tokens),
            }
        return self.add("chat m", attributes, **where)

    def reward(self, value: float, attributes: dict[str, Any] | None = None, **where: Any) -> str:
        where.setdefault("at", (self.now, self.now))
        return self.add(
            "agentlightning.reward", {"agentlightning.reward.0.value": value, **(attributes or {})}, **where
        )

    def adapt(self, adapter: TraceToTriplet | None = None) -> list[Triplet]:
        return (adapter or TraceToTriplet()).adapt(self.spans)
