"""Finds the model calls of an attempt and groups the spans that client, framework and gateway recorded of each."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agentlightning import semconv
from agentlightning.adapter.tree import Node
from agentlightning.types import Span


@dataclass(slots=True, eq=False)
class Call:
    """One model call."""

    anchor: Node
    """The outermost span of the client, or the gateway's if there is no other."""
    nodes: list[Node]
    """All spans of the call, the gateway's last."""
    response_id: str | None
    gateway: Node | None = None
    is_complete: bool = True
    """False if the gateway saw only a part of the answer."""

    @property
    def settled_at(self) -> float:
        """The earliest time of a reward for this call.

        The gateway records the end after the agent has received the answer, so its span counts from the start.
        """
        return self.anchor.start if self.anchor is self.gateway else self.anchor.end


def find_calls(nodes: Sequence[Node], is_call: Callable[[Span], bool]) -> list[Call]:
    """Finds the model calls, in the order of their starts.

    The spans of one call are: a client's span and its descendants that do not name another response; spans that overlap
    and name the same response; the gateway's span that has a client's as parent or names its response. A framework's
    span without response id and answer belongs to the single call within its time that is misplaced in the tree.

    Args:
        nodes: parents before their children.
        is_call: selects the spans of calls. A gateway's span that it rejects still gives its tokens to a client's.
    """
    calls: list[Call] = []
    of_client: dict[str, Call] = {}
    by_response: dict[str, list[Call]] = {}
    _add_clients(nodes, is_call, calls, of_client, by_response)
    gateways = [node for node in nodes if semconv.is_gateway_call(node.span)]
    gateways.sort(key=lambda node: (not node.span.attributes[semconv.GATEWAY_COMPLETE], node.start))  # complete first
    for node in gateways:
        response_id = semconv.read_response_id(node.span)
        parent = of_client.get(node.span.parent_id or "")
        candidates: Iterable[Call] = by_response.get(response_id or "", ())
        if parent is not None and _agree(parent.response_id, response_id):
            candidates = (parent, *candidates)
        call = next((call for call in candidates if call.gateway is None), None)
        if call is None:
            if parent is not None or not is_call(node.span):  # a try that the client repeated, or rejected by is_call
                continue
            call = Call(node, [], response_id)
            calls.append(call)
        call.gateway = node
        call.nodes.append(node)
        call.response_id = call.response_id or response_id
        call.is_complete = bool(node.span.attributes[semconv.GATEWAY_COMPLETE])
    return _join_frames(sorted(calls, key=lambda call: (call.anchor.start, call.anchor.span.sequence_id)))


def _join_frames(calls: list[Call]) -> list[Call]:
    """Moves calls that are too high in the tree to the framework's span (frame) around them.

    AgentOps records OpenAI Agents like that: the generation span under the agent has no answer, and the client's span,
    which has it, is a child of the root. If two frames enclose a call, or one encloses two calls, nothing is joined.
    """
    ends: list[tuple[float, int]] = []  # of the frames that started so far, in order
    enclosed: dict[int, list[int]] = {}
    for position, call in enumerate(calls):
        if _is_frame(call):
            bisect.insort(ends, (call.anchor.end, position))
        elif len(ends) - bisect.bisect_left(ends, (call.anchor.end, -1)) == 1:
            enclosed.setdefault(ends[-1][1], []).append(position)
    gone = set()
    for frame, positions in enclosed.items():
        if len(positions) == 1 and _is_misplaced(calls[positions[0]], calls[frame]):
            found = calls[positions[0]]
            found.nodes = [*calls[frame].nodes, *found.nodes]
            found.anchor = calls[frame].anchor
            gone.add(frame)
    return [call for position, call in enumerate(calls) if position not in gone] if gone else calls


def _is_frame(call: Call) -> bool:
    if call.response_id is not None or call.gateway is not None:
        return False
    return not any(
        node.span.status.status_code == "ERROR" or semconv.read_output_messages(node.span) for node in call.nodes
    )


def _is_misplaced(call: Call, frame: Call) -> bool:
    """Whether the call's parent is a proper ancestor of the frame's parent."""
    above = frame.anchor.parent
    while above is not None:
        above = above.parent
        if above is not None and above is call.anchor.parent:
            return True
    return False


def _add_clients(
    nodes: Sequence[Node],
    is_call: Callable[[Span], bool],
    calls: list[Call],
    of_client: dict[str, Call],
    by_response: dict[str, list[Call]],
) -> None:
    enclosing: dict[Node, Call | None] = {}
    for node in nodes:
        call = enclosing.get(node.parent) if node.parent is not None else None
        if is_call(node.span) and not semconv.is_gateway_call(node.span):
            response_id = semconv.read_response_id(node.span)
            if call is None or not _agree(call.response_id, response_id):
                same = by_response.get(response_id or "")
                call = same[-1] if same and _overlap(same[-1].anchor, node) else None
            if call is None:
                call = Call(node, [], response_id)
                calls.append(call)
            call.nodes.append(node)
            of_client[node.span.span_id] = call
            if response_id is not None and (call.response_id is None or len(call.nodes) == 1):
                call.response_id = response_id
                by_response.setdefault(response_id, []).append(call)
        enclosing[node] = call


def _agree(one: str | None, other: str | None) -> bool:
    return one is None or other is None or one == other


def _overlap(one: Node, other: Node) -> bool:
    return one.start < other.end and other.start < one.end
