"""``LlmProxyTraceToTriplet``: triplets from the gateway's spans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from agentlightning import semconv
from agentlightning.adapter.call import Node, TracedCall
from agentlightning.adapter.triplet import CreditSpec, RewardMatchPolicy, TraceToTriplet
from agentlightning.types import Span


class LlmProxyTraceToTriplet(TraceToTriplet):
    """Makes triplets from the gateway's spans only, in the order of their ``sequence_id``.

    The gateway and the agent may run on machines whose clocks differ. If every call has a client's span, rewards are
    matched by the times of these spans, which the agent's machine recorded like the rewards; else by ``sequence_id``.
    """

    def __init__(
        self,
        reward_match: RewardMatchPolicy = RewardMatchPolicy.FIRST_OCCURRENCE,
        *,
        credit: CreditSpec | None = None,
        side_calls: bool = False,
    ) -> None:
        super().__init__(reward_match=reward_match, credit=credit, side_calls=side_calls)

    def _select(self, nodes: Sequence[Node]) -> tuple[list[TracedCall], Counter[str]]:
        calls, left_out = super()._select(nodes)
        return sorted(calls, key=lambda call: call.anchor.span.sequence_id), left_out

    def _choose_clock(self, calls: Sequence[TracedCall]) -> Callable[[TracedCall | Node], float]:
        if all(_find_client(call) is not None for call in calls):
            return _time_of_client
        return _arrival

    def _is_call(self, span: Span) -> bool:
        return semconv.is_gateway_call(span)


def _find_client(call: TracedCall) -> Node | None:
    """Returns the client's span of a call whose anchor is the gateway's span, if the trace has one."""
    client = call.anchor.parent
    if client is None or client.span.span_id != call.anchor.span.parent_id:
        return None
    return client if semconv.is_llm_call(client.span) and not semconv.is_gateway_call(client.span) else None


def _time_of_client(item: TracedCall | Node) -> float:
    client = _find_client(item) if isinstance(item, TracedCall) else None
    return item.start if isinstance(item, Node) else (client or item.anchor).end


def _arrival(item: TracedCall | Node) -> float:
    return item.span.sequence_id if isinstance(item, Node) else item.anchor.span.sequence_id
