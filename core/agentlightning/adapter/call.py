"""Builds the tree of the spans of an attempt, repairs it, and finds the model calls that it contains."""

from __future__ import annotations

import bisect
import contextlib
import json
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentlightning import semconv
from agentlightning.errors import AdapterError
from agentlightning.frozen import parse_lenient
from agentlightning.records import Span
from agentlightning.reward import is_reward_span


class State(NamedTuple):
    """The semantic variables of an agent at one moment."""

    time: float
    variables: dict[str, Any]
    """All variables that are known by then."""
    changed: dict[str, Any]
    """The variables that are new, or whose value differs from the state before."""


def find_states(spans: Iterable[Span]) -> list[State]:
    """Returns the states of an attempt in the order of time: what it emitted, and what its framework recorded.

    Spans that were written after the attempt had ended do not count.
    """
    states: list[State] = []
    known: dict[str, Any] = {}
    in_time = [span for span in spans if semconv.LATE not in span.attributes]
    for span in sorted(in_time, key=lambda span: (span.start_time or 0.0, span.sequence_id)):
        text = semconv.read_attribute(span, semconv.STATE)
        variables = None
        with contextlib.suppress(ValueError):  # any program may write spans
            variables = parse_lenient(text) if isinstance(text, str) else None
        if isinstance(variables, dict):
            changed = {name: each for name, each in variables.items() if name not in known or known[name] != each}
            known = {**known, **changed}
            states.append(State(span.start_time or 0.0, known, changed))
    return states


@dataclass(slots=True, eq=False)
class Node:
    """A span in its tree."""

    span: Span
    start: float
    end: float
    agent_name: str | None
    """Name of the nearest agent, which is the span itself or an ancestor; until the tree is built, the span's own."""
    is_reward: bool
    parent: Node | None = None
    is_in_reward: bool = False
    """Whether the span is part of computing a reward."""


def build_tree(spans: Sequence[Span], *, repair: bool) -> list[Node]:
    """Links spans by their parent ids.

    Args:
        spans: the spans of one attempt, in any order; duplicates count once.
        repair: put spans with an unknown parent under the innermost span that encloses their time (but never under
            model calls and rewards; a span that nothing encloses stays a root), and spans outside agents under the
            agent's span that is their sibling and encloses their time, if there is exactly one.

    Returns:
        All nodes: parents before their children, siblings in the order of their starts.

    Raises:
        AdapterError: the spans belong to several attempts.
    """
    by_id: dict[str, Node] = {}
    for span in spans:
        first = spans[0]
        if span.attempt_id != first.attempt_id or span.rollout_id != first.rollout_id:
            raise AdapterError(
                f"span {span.span_id} belongs to attempt {span.attempt_id!r} of rollout {span.rollout_id!r}, others to "
                f"{first.attempt_id!r} of {first.rollout_id!r}; adapt the spans of one attempt at a time"
            )
        start = span.start_time or 0.0
        end, name = max(start, span.end_time or start), semconv.read_agent_name(span)
        by_id.setdefault(span.span_id, Node(span, start, end, name, is_reward_span(span)))
    nodes = sorted(by_id.values(), key=lambda node: (node.start, -node.end, node.span.sequence_id))
    for node in nodes:
        node.parent = by_id.get(node.span.parent_id or "")
    _cut_cycles(nodes)
    if repair:
        _adopt_orphans(nodes)
        _adopt_siblings(nodes)
    return _in_order(nodes)


def _cut_cycles(nodes: Sequence[Node]) -> None:
    """Removes one parent link from each cycle; only broken instrumentation makes cycles."""
    seen: dict[Node, int] = {}
    for walk, node in enumerate(nodes):
        step: Node | None = node
        while step is not None and step not in seen:
            seen[step] = walk
            if step.parent is not None and seen.get(step.parent) == walk:
                step.parent = None
            step = step.parent


def _adopt_orphans(nodes: Sequence[Node]) -> None:
    """Gives orphans the innermost enclosing span as parent; ``nodes`` are in the order of their starts."""
    own_root: dict[Node, Node] = {}
    for node in nodes:
        path = []
        step = node
        while step not in own_root and step.parent is not None:
            path.append(step)
            step = step.parent
        root = own_root.setdefault(step, step)
        for passed in path:
            own_root[passed] = root
    # A span that ends no later than a span started after it is never the innermost. Without such spans, the ends
    # decrease from the bottom of the stack to its top, so bisection finds the enclosing span.
    stack: list[Node] = []
    falling_ends: list[float] = []
    for node in nodes:
        if node.parent is None:
            position = bisect.bisect_right(falling_ends, -node.end) - 1
            while position >= 0 and own_root[stack[position]] is node:  # its own descendant, if the clock is coarse
                position -= 1
            if position >= 0:
                node.parent = stack[position]
        if node.end > node.start and not node.is_reward and not semconv.is_llm_call(node.span):
            while stack and stack[-1].end <= node.end:
                stack.pop()
                falling_ends.pop()
            stack.append(node)
            falling_ends.append(-node.end)


def _adopt_siblings(nodes: Sequence[Node]) -> None:
    """Puts spans outside agents under the sibling that is an agent and encloses their time; see ``build_tree``.

    Unrelated tracing libraries in one process make such traces: an agent and its calls are children of the root.
    """
    children: dict[Node, list[Node]] = {}
    for node in nodes:
        if node.parent is not None:
            children.setdefault(node.parent, []).append(node)
    outside = [node for node in nodes if node.parent is None and not _is_agent(node)]
    for node in outside:  # the loop extends it
        inside = [child for child in children.get(node, ()) if not _is_agent(child)]
        outside += inside
        waiting = [(node, inside)]
        while waiting:
            parent, movable = waiting.pop()
            agents = [child for child in children.get(parent, ()) if _is_agent(child)]
            for agent, moved in enclosed_by_one(agents, movable).items():
                for each in moved:
                    each.parent = agent
                waiting.append((agent, moved))  # below the agent there may be further agents


def enclosed_by_one(outer: Sequence[Node], inner: Sequence[Node]) -> dict[Node, list[Node]]:
    """Maps each outer node to the inner nodes that only it encloses in time; both are ordered by start."""
    found: dict[Node, list[Node]] = {}
    ends: list[tuple[float, int]] = []  # sorted, of the outer nodes that started so far
    started = 0
    for node in inner if outer else ():
        while started < len(outer) and outer[started].start <= node.start:
            bisect.insort(ends, (outer[started].end, started))
            started += 1
        if len(ends) - bisect.bisect_left(ends, (node.end, -1)) == 1:
            found.setdefault(outer[ends[-1][1]], []).append(node)
    return found


def _is_agent(node: Node) -> bool:
    return node.agent_name is not None and not semconv.is_llm_call(node.span)


def _in_order(nodes: Sequence[Node]) -> list[Node]:
    """Returns parents before children, with inherited agent names and reward flags."""
    children: dict[Node | None, list[Node]] = {}
    for node in nodes:
        children.setdefault(node.parent, []).append(node)
    ordered: list[Node] = []
    stack = children.get(None, [])[::-1]
    while stack:
        node = stack.pop()
        ordered.append(node)
        parent = node.parent
        if parent is not None:
            node.agent_name = node.agent_name or parent.agent_name
            node.is_in_reward = parent.is_in_reward
        computes_reward = node.is_reward or node.span.attributes.get(semconv.OPERATION_NAME) == "reward"
        node.is_in_reward = node.is_in_reward or computes_reward
        stack.extend(reversed(children.get(node, ())))
    return ordered


@dataclass(slots=True, eq=False)
class TracedCall:
    """One model call."""

    anchor: Node
    """The outermost span of the client, or the gateway's span if no client recorded the call."""
    nodes: list[Node]
    """All spans of the call; the gateway's span is last."""
    response_id: str | None
    gateway: Node | None = None
    is_complete: bool = True
    """False if the gateway received only a part of the answer."""
    tool_calls: list[semconv.Message] = field(default_factory=list)
    """Tool calls of the answer, if the client records them as children of its span instead of in its messages."""

    def read_answers(self) -> list[semconv.Message]:
        """Returns the answers, one message for each choice, from the gateway's span if it has them."""
        answers = next(filter(None, (semconv.read_output_messages(node.span) for node in reversed(self.nodes))), [])
        if not self.tool_calls or len(answers) > 1 or any(answer.get("tool_calls") for answer in answers):
            return answers
        (answer,) = answers or [{"role": "assistant", "content": None}]
        return [{**answer, "content": answer.get("content") or None, "tool_calls": self.tool_calls}]

    @property
    def conversation_id(self) -> str | None:
        """The id of the agent's conversation, if the gateway knows it."""
        value = None if self.gateway is None else self.gateway.span.attributes.get(semconv.GEN_AI_CONVERSATION_ID)
        return None if value is None else str(value)

    @property
    def settled_at(self) -> float:
        """The earliest time at which a reward for this call can be recorded.

        The gateway records the end of its span after the agent has received the answer, so the span's start counts.
        """
        return self.anchor.start if self.anchor is self.gateway else self.anchor.end


def find_calls(nodes: Sequence[Node], is_call: Callable[[Span], bool]) -> list[TracedCall]:
    """Finds the model calls, ordered by start.

    The spans of one call are: a client's span and its descendants that do not name another response; spans that name
    the same response and overlap or have the same messages, unless the gateway received a request for each; the
    gateway's span whose parent is a client's span, that names its response, or that has its answer, if the client's
    span (of another process) has neither response id nor request at the gateway. A framework's span without response
    id and answer belongs to the only call that it encloses in time, if that call is misplaced in the tree.

    Args:
        nodes: parents before their children.
        is_call: selects the spans of calls. If it rejects a gateway's span, the client's call still gets the tokens.
    """
    calls, of_client, by_response = _find_client_calls(nodes, is_call)
    gateways = [node for node in nodes if semconv.is_gateway_call(node.span)]
    gateways.sort(key=lambda node: (not node.span.attributes[semconv.GATEWAY_COMPLETE], node.start))  # complete first
    unnamed = _find_unnamed(calls, gateways)
    for node in gateways:
        response_id = semconv.read_response_id(node.span)
        parent = of_client.get(node.span.parent_id or "")
        candidates: Iterable[TracedCall] = by_response.get(response_id or "", ())
        if parent is not None and _agree(parent.response_id, response_id):
            candidates = (parent, *candidates)
        call = next((call for call in candidates if call.gateway is None), None)
        alike = unnamed.get(_read_answer(node), []) if call is None and parent is None else []
        while alike and call is None:
            found = alike.pop()
            call = found if found.gateway is None else None
        if call is None:
            if parent is not None or not is_call(node.span):  # retried by the client, or rejected by is_call
                continue
            call = TracedCall(node, [], response_id)
            calls.append(call)
        call.gateway = node
        call.nodes.append(node)
        call.response_id = call.response_id or response_id
        call.is_complete = bool(node.span.attributes[semconv.GATEWAY_COMPLETE])
    calls.sort(key=lambda call: (call.anchor.start, call.anchor.span.sequence_id))
    return _join_frames(_join_repeated(calls))


def find_given_up(nodes: Iterable[Node]) -> set[str]:
    """Returns the ids of the gateway's spans whose request the client sent again, and then got an answer."""
    complete = (node.span.attributes for node in nodes if node.span.attributes.get(semconv.GATEWAY_COMPLETE))
    return {str(attributes[semconv.RETRY_OF]) for attributes in complete if semconv.RETRY_OF in attributes}


def find_unused(
    nodes: Iterable[Node], calls: Sequence[TracedCall], *, side_calls: bool = False
) -> dict[TracedCall, str]:
    """Returns the calls to leave out of training, each with the reason.

    ``given_up``: a try that the client repeated. ``side_call``: found by ``find_side_calls``, unless they are wanted.
    """
    given_up = find_given_up(nodes)
    unused = dict.fromkeys([] if side_calls else find_side_calls(calls), "side_call")
    return unused | {call: "given_up" for call in calls if call.gateway and call.gateway.span.span_id in given_up}


def find_side_calls(calls: Sequence[TracedCall]) -> set[TracedCall]:
    """Finds the calls that coding agents make beside their work, such as for a title or to summarise a conversation.

    They have no tools, in a conversation whose other calls have some, and another system message or later calls with
    tools. Only conversations that the agent itself names are searched.
    """
    found: set[TracedCall] = set()
    working: dict[str, list[Span]] = {}
    for call in calls:
        if call.gateway is not None and call.conversation_id and _has_tools(call.gateway.span):
            working.setdefault(call.conversation_id, []).append(call.gateway.span)
    for call in calls:
        spans = working.get(call.conversation_id or "")
        if spans and call.gateway is not None and not _has_tools(call.gateway.span):
            is_last = call.gateway.start >= (spans[-1].start_time or 0.0)
            if not is_last or _read_system(call.gateway.span) != _read_system(spans[0]):
                found.add(call)
    return found


def _has_tools(span: Span) -> bool:
    return semconv.GEN_AI_TOOL_DEFINITIONS in span.attributes


def _read_system(span: Span) -> object:
    return next((each["content"] for each in semconv.read_input_messages(span) if each.get("role") == "system"), None)


def _find_unnamed(calls: Sequence[TracedCall], gateways: Sequence[Node]) -> dict[str, list[TracedCall]]:
    """Returns the calls without response id and request at the gateway by their answer, the last call first."""
    requested = {node.span.parent_id for node in gateways}
    unnamed: dict[str, list[TracedCall]] = {}
    for call in sorted(calls if gateways else [], key=lambda call: call.anchor.start, reverse=True):
        if call.response_id is None and not any(node.span.span_id in requested for node in call.nodes):
            answer = next(filter(None, map(_read_answer, call.nodes)), "")
            if answer:
                unnamed.setdefault(answer, []).append(call)
    return unnamed


def _read_answer(node: Node) -> str:
    """Returns a text that is equal for spans with the same answer; empty if the span has none."""
    found = []
    for answer in semconv.read_output_messages(node.span):
        content = answer.get("content") or ""
        parts = [{"text": content}] if isinstance(content, str) else content
        texts = [str(part.get("text") or "") for part in parts if isinstance(part, dict)]
        functions = [call.get("function") for call in answer.get("tool_calls") or () if isinstance(call, dict)]
        tools = [(each.get("name"), semconv.parse_json(each.get("arguments"))) for each in functions if each]
        found.append(("".join(texts), tools))
    return json.dumps(found, sort_keys=True, default=str) if found else ""


def _join_repeated(calls: list[TracedCall]) -> list[TracedCall]:
    """Joins the two spans of a call, if a framework records one as well, beside the client's span and before it.

    The framework's span of a stream may end before the request is sent. It has no response id and no request at the
    gateway, but the same parent and the same answer as the client's span, which follows.
    """
    waiting: dict[tuple[Node | None, str], list[TracedCall]] = {}
    gone: set[TracedCall] = set()
    for call in calls:
        is_known = call.gateway is not None
        if (is_known and waiting) or not (is_known or call.response_id):
            answer = next(filter(None, map(_read_answer, call.nodes)), "")
            same = waiting.setdefault((call.anchor.parent, answer), [])
            if not is_known and answer:
                same.append(call)
            elif same:
                gone.add(same[0])
                call.nodes = [*same.pop(0).nodes, *call.nodes]
    return [call for call in calls if call not in gone]


def _join_frames(calls: list[TracedCall]) -> list[TracedCall]:
    """Moves calls that are too high in the tree to the framework's span (frame) around them.

    Some libraries record them like that: the framework's span under the agent has no answer, and the client's span,
    which has the answer, is a child of the root. Nothing is joined if two frames enclose a call or one encloses two.
    """
    frames = {call.anchor: call for call in calls if _is_frame(call)}
    others = {call.anchor: call for call in calls if call.anchor not in frames}
    gone: set[TracedCall] = set()
    for frame, enclosed in enclosed_by_one(list(frames), list(others)).items():
        call = others[enclosed[0]]
        if len(enclosed) == 1 and _is_misplaced(call, frame):
            gone.add(frames[frame])
            call.nodes = [*frames[frame].nodes, *call.nodes]
            call.anchor = frame
    return [call for call in calls if call not in gone]


def _is_frame(call: TracedCall) -> bool:
    if call.response_id is not None or call.gateway is not None:
        return False
    return not any(
        node.span.status.status_code == "ERROR" or semconv.read_output_messages(node.span) for node in call.nodes
    )


def _is_misplaced(call: TracedCall, frame: Node) -> bool:
    """Whether the call's recorded parent is a proper ancestor of the frame's parent."""
    above = frame.parent
    if above is not None and above is call.anchor.parent:
        return call.anchor.span.parent_id != above.span.span_id  # ``build_tree`` has put it there
    while above is not None:
        above = above.parent
        if above is not None and above is call.anchor.parent:
            return True
    return False


def _find_client_calls(
    nodes: Sequence[Node], is_call: Callable[[Span], bool]
) -> tuple[list[TracedCall], dict[str, TracedCall], dict[str, list[TracedCall]]]:
    """Returns the calls that clients recorded: as a list, by span id, and by response id."""
    calls: list[TracedCall] = []
    of_client: dict[str, TracedCall] = {}
    by_response: dict[str, list[TracedCall]] = {}
    enclosing: dict[Node, TracedCall | None] = {}
    through_gateway = {node.span.parent_id for node in nodes if semconv.is_gateway_call(node.span)}
    for node in nodes:
        call = enclosing.get(node.parent) if node.parent is not None else None
        if call is not None and node.parent in call.nodes:
            tool_call = semconv.read_attribute(node.span, semconv.ANSWERED_TOOL_CALL)
            if tool_call is not None and tool_call not in call.tool_calls:
                call.tool_calls.append(tool_call)
        if is_call(node.span) and not semconv.is_gateway_call(node.span):
            response_id = semconv.read_response_id(node.span)
            if call is None or not _agree(call.response_id, response_id):
                same = by_response.get(response_id or "")
                call = same[-1] if same and _is_same_answer(same[-1], node, through_gateway) else None
            if call is None:
                call = TracedCall(node, [], response_id)
                calls.append(call)
            call.nodes.append(node)
            of_client[node.span.span_id] = call
            if response_id is not None and (call.response_id is None or len(call.nodes) == 1):
                call.response_id = response_id
                by_response.setdefault(response_id, []).append(call)
        enclosing[node] = call
    return calls, of_client, by_response


def _agree(one: str | None, other: str | None) -> bool:
    return one is None or other is None or one == other


def _is_same_answer(call: TracedCall, node: Node, through_gateway: Container[str | None]) -> bool:
    """Whether a span with the call's response id belongs to the call: some servers give all answers the same id."""
    anchor = call.anchor
    if node.span.span_id in through_gateway and any(other.span.span_id in through_gateway for other in call.nodes):
        return False  # it made its own request
    if anchor.start < node.end and node.start < anchor.end:
        return True
    readers = (semconv.read_input_messages, semconv.read_output_messages)
    return all(read(anchor.span) == read(node.span) for read in readers)
