"""``TraceToTriplet``: converts each model call of an attempt to (prompt, response, reward), and finds its reward."""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, TypeAlias, TypeVar

from agentlightning import semconv
from agentlightning.adapter.adapter import TraceAdapter, reading
from agentlightning.adapter.call import Node, TracedCall, build_tree, find_calls, find_given_up, find_unused
from agentlightning.errors import AdapterError, ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning.records import Span, Triplet
from agentlightning.reward import REWARD_SUM, find_final_reward, get_reward_value


class RewardMatchPolicy(StrEnum):
    """How to find the call of a reward that has no link to a call (``semconv.link_attributes``)."""

    FIRST_OCCURRENCE = "first_occurrence"
    """The last call that ended before the reward and has no reward yet."""
    FIRST_SIBLING = "first_sibling"
    """The last such call among those with the same parent as the reward."""


def match_rewards(
    nodes: Sequence[Node],
    calls: Sequence[TracedCall],
    policy: RewardMatchPolicy,
    *,
    is_exclusive: bool = True,
    settled_at: Callable[[TracedCall | Node], float] | None = None,
) -> dict[TracedCall, float]:
    """Finds the call of each reward: by its link, otherwise by time.

    Args:
        nodes: all spans of the attempt.
        calls: the calls that may have a reward.
        policy: how to find the calls of rewards without a link.
        is_exclusive: a call takes one reward, and a second consecutive reward goes to the previous call. If False,
            every reward is added to the nearest call before it.
        settled_at: the position of a call or a reward in the trace; default is the time.
    """
    settled_at = settled_at or (lambda item: item.settled_at if isinstance(item, TracedCall) else item.start)
    rewards: dict[TracedCall, float] = {}
    index = functools.cache(functools.partial(_index, calls))
    unlinked: list[Node] = []
    for node in nodes:
        if node.is_reward and REWARD_SUM not in node.span.attributes:
            linked = _find_linked(node, index, settled_at)
            if linked is None:
                unlinked.append(node)
            else:
                before = 0.0 if is_exclusive else rewards.get(linked, 0.0)
                rewards[linked] = before + (get_reward_value(node.span) or 0.0)
    events: list[tuple[float, int, TracedCall | Node]] = [(settled_at(call), 0, call) for call in calls]
    events += [(settled_at(node), 1, node) for node in unlinked]
    events.sort(key=lambda event: event[:2])
    by_sibling = policy is RewardMatchPolicy.FIRST_SIBLING
    waiting: dict[Node | None, list[TracedCall]] = {}
    for _, _, item in events:
        place = item.anchor if isinstance(item, TracedCall) else item
        stack = waiting.setdefault(place.parent if by_sibling else None, [])
        if isinstance(item, TracedCall):
            if not is_exclusive or item not in rewards:
                stack.append(item)
        elif stack:
            call = stack.pop() if is_exclusive else stack[-1]
            rewards[call] = rewards.get(call, 0.0) + (get_reward_value(item.span) or 0.0)
    return rewards


def _find_linked(
    reward: Node,
    index: Callable[[str], dict[Any, dict[TracedCall, None]]],
    settled_at: Callable[[TracedCall | Node], float],
) -> TracedCall | None:
    """Returns the call that has all linked attributes, the last one before the reward if there are several."""
    links = semconv.read_links(reward.span)
    linked = sorted((index(key).get(_hashable(value), {}) for key, value in links), key=len)
    found = [call for call in linked[0] if all(call in others for others in linked[1:])] if linked else []
    if len(found) > 1:
        found = [call for call in found if settled_at(call) <= settled_at(reward)]
    return max(found, key=settled_at, default=None)


def _index(calls: Sequence[TracedCall], key: str) -> dict[Any, dict[TracedCall, None]]:
    """Returns the calls by the value of a span attribute, or of the field ``span_id`` or ``trace_id``."""
    index: dict[Any, dict[TracedCall, None]] = {}
    for call in calls:
        for span in (node.span for node in call.nodes):
            if key in span.attributes:
                index.setdefault(_hashable(span.attributes[key]), {})[call] = None
            elif key in ("span_id", "trace_id"):
                index.setdefault(getattr(span, key), {})[call] = None
    return index


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


T = TypeVar("T")
logger = logging.getLogger("agentlightning")

BROKE_OFF: Final = "broke off at the gateway"
"""The reason why an incomplete call gives no triplet."""


CreditSpec: TypeAlias = Any
"""A ``CreditRule``, its registered name, or ``{"name": ..., **settings}``."""


def load_credit_rule(spec: CreditSpec) -> Any:
    """Makes a credit rule from its name; raises PluginError or ConfigError if it cannot be made or is not a rule."""
    rule = get_manager().create("credit", spec) if isinstance(spec, (str, Mapping)) else spec
    if not callable(getattr(rule, "apply", None)):
        raise ConfigError(f"credit = {rule!r} is not a CreditRule; give one, or a name that `agl plugins` lists")
    return rule


class TraceToTriplet(TraceAdapter[list[Triplet]]):
    """Makes a triplet of each answer to each model call, in the order of the calls.

    ``prompt`` is ``{"token_ids", "raw_content", "image_urls"}`` and ``response`` is ``{"token_ids", "raw_content"}``,
    with ``"logprobs"`` if they are known; ``raw_content`` is a list of chat messages. Tokens and log-probabilities are
    the gateway's; the lists are empty if they were not recorded. ``metadata`` has ``response_id``, ``agent_name``,
    ``model`` (that answered), ``requested_model`` (the name that the agent asked for), ``finish_reason``,
    ``weight_version``, ``complete`` (True: the whole answer passed the gateway), ``span_id`` and ``choice`` (of n
    answers), or None for unknown values. If the weights changed during an answer, ``weight_versions`` has one for each
    token. ``untrusted`` (True) is present if only the agent itself claims which tokens were sampled, so that they are
    left out, ``conversation_id`` if the agent names it, and ``unused`` with the reason if trajectories leave the call
    out: ``side_call``, or ``given_up`` for a try that the client repeated.
    Calls without a complete answer give no triplet.

    ``reward`` is what the agent emitted for this call; ``find_final_reward`` of the same spans gives the reward of
    the attempt. With a ``credit`` rule, ``reward`` is what the rule assigns to the call, and ``metadata["credit"]``
    names the rule.
    """

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str | None = None,
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        reward_match: RewardMatchPolicy = RewardMatchPolicy.FIRST_OCCURRENCE,
        *,
        credit: CreditSpec | None = None,
        side_calls: bool = False,
    ) -> None:
        """Selects the calls.

        Args:
            repair_hierarchy: find a parent for spans that lost theirs, by time.
            llm_call_match: regular expression for the span names of model calls, among spans that name no operation
                or one that generates; default is ``semconv.is_llm_call``.
            agent_match: regular expression for the name of the calling agent; default also includes calls outside
                agents.
            exclude_llm_call_in_reward: leave out calls that compute a reward, such as a judge's.
            reward_match: how rewards find their calls.
            side_calls: train on side calls of coding agents too, such as titles and summaries (``find_side_calls``).
            credit: a rule that assigns a reward to each call, its name (``agl plugins`` lists them), or
                ``{"name": ..., **settings}``. Without one, algorithms give every call the final reward.

        Raises:
            ConfigError: an invalid regular expression, or an unknown policy or setting.
            PluginError: no plugin offers the credit rule.
        """
        self.repair_hierarchy = repair_hierarchy
        self.llm_call_match = _compile("llm_call_match", llm_call_match)
        self.agent_match = _compile("agent_match", agent_match)
        self.exclude_llm_call_in_reward = exclude_llm_call_in_reward
        try:
            self.reward_match = RewardMatchPolicy(reward_match)
        except ValueError:
            allowed = ", ".join(RewardMatchPolicy)
            raise ConfigError(f"reward_match = {reward_match!r}; it is one of: {allowed}") from None
        self.side_calls = side_calls
        self.credit = None if credit is None else load_credit_rule(credit)
        self._warned: set[str] = set()
        """Reasons for missing triplets that were already logged; each is logged as a warning only once."""

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        """Makes the triplets of one attempt in linear time, and logs why if there are none.

        Raises:
            AdapterError: spans of several attempts, contradicting token data, attributes that cannot be read, or a
                credit rule that does not return one value for each call.
        """
        with reading(source):
            nodes = build_tree(source, repair=self.repair_hierarchy)
            calls, left_out = self._select(nodes)
            if not calls:
                self._log_missing(source, left_out)
                return []
            position, is_exclusive = self._choose_clock(calls), self.credit is None
            unused = find_unused(nodes, calls, side_calls=self.side_calls)
            rewards = match_rewards(nodes, calls, self.reward_match, is_exclusive=is_exclusive, settled_at=position)
            if self.credit is None:
                return [each for call in calls for each in _to_triplets(call, rewards.get(call), unused.get(call))]
            triplets = [list(_to_triplets(call, None, unused.get(call))) for call in calls]
            credited = self.credit.apply(nodes, calls, triplets, rewards, find_final_reward(source))
            return [triplet for own in credited for triplet in own]

    def _log_missing(self, spans: Sequence[Span], left_out: Counter[str]) -> None:
        if not spans:
            logger.warning("a trace without spans gives no triplets")
            return
        why = f"none of its {len(spans)} spans is a model call"
        if left_out:
            why = "its model calls were left out: " + "; ".join(f"{n} {reason}" for reason, n in left_out.items())
        attempt = f"attempt {spans[0].attempt_id} of rollout {spans[0].rollout_id}"
        roots = (span for span in spans if span.name == semconv.SPAN_ROLLOUT and span.status.status_code == "ERROR")
        failure = next((root.status.description or "no reason given" for root in roots), None)
        if failure is not None:  # it explains the missing triplets and is recorded on the attempt
            logger.info("%s failed (%s) and gives no triplets: %s", attempt, failure, why)
        elif why in self._warned:
            logger.info("%s gives no triplets: %s", attempt, why)
        else:
            self._warned.add(why)
            logger.warning("%s gives no triplets: %s. `agl doctor AGENT` tells how to fix it", attempt, why)

    def explain_left_out(self, source: Sequence[Span], /) -> dict[str, int]:
        """Returns the reasons why model calls of an attempt give no triplet, with the number of calls for each."""
        with reading(source):
            return dict(self._select(build_tree(source, repair=self.repair_hierarchy))[1])

    def _select(self, nodes: Sequence[Node]) -> tuple[list[TracedCall], Counter[str]]:
        """Returns the calls that give triplets, and the number of other calls by reason."""
        calls = []
        left_out: Counter[str] = Counter()
        given_up = find_given_up(nodes)
        for call in find_calls(nodes, self._is_call):
            reason = self._reason_to_leave_out(call)
            if reason == BROKE_OFF and call.gateway and call.gateway.span.span_id in given_up:
                reason = "given up by the client, which tried again"
            if reason is None:
                calls.append(call)
            else:
                left_out[reason] += 1
        return calls, left_out

    def _choose_clock(self, calls: Sequence[TracedCall]) -> Callable[[TracedCall | Node], float] | None:
        """Returns a function that positions calls and rewards in the trace; None positions them by time."""
        return None

    def _is_call(self, span: Span) -> bool:
        if self.llm_call_match is None:
            return semconv.is_llm_call(span)
        return self.llm_call_match.search(span.name) is not None and semconv.says_generating(span) is not False

    def _reason_to_leave_out(self, call: TracedCall) -> str | None:
        agent_name = call.anchor.agent_name
        if not call.is_complete:
            return BROKE_OFF
        if self.agent_match is not None and (agent_name is None or self.agent_match.search(agent_name) is None):
            return f"made by agent {agent_name!r:.100}, which agent_match={self.agent_match.pattern!r} excludes"
        if self.exclude_llm_call_in_reward and call.anchor.is_in_reward:
            return "made to compute a reward"
        if call.response_id is None and not any(
            read(node.span)
            for node in call.nodes
            for read in (semconv.read_token_data, semconv.claims_tokens, semconv.read_output_messages)
        ):
            return "without an answer"
        return None


TracerTraceToTriplet = TraceToTriplet


def _to_triplets(call: TracedCall, reward: float | None, unused: str | None) -> Iterator[Triplet]:
    spans = [node.span for node in reversed(call.nodes)]  # the gateway's span, the most complete one, comes first

    def read(reader: Callable[[Span], T]) -> T | None:
        return next(filter(None, map(reader, spans)), None)

    messages = read(semconv.read_input_messages) or []
    answers = call.read_answers()
    finish_reasons = read(semconv.read_finish_reasons) or []
    versions = (span.attributes.get(semconv.WEIGHT_VERSION) for span in spans)
    is_claimed = any(map(semconv.claims_tokens, spans))
    metadata = {
        "response_id": call.response_id,
        "agent_name": call.anchor.agent_name,
        "model": read(semconv.read_model),
        "requested_model": read(semconv.read_requested_model),
        "weight_version": next((version for version in versions if version is not None), None),
        "complete": True if call.gateway is not None else None,
        "span_id": call.anchor.span.span_id,
        **({} if call.conversation_id is None else {"conversation_id": call.conversation_id}),
    }
    image_urls = semconv.find_image_urls(messages)
    for choice in range(max(1, len(answers))):
        tokens = next(filter(None, (semconv.read_token_data(span, choice) for span in spans)), None)
        prompt_ids, response_ids, logprobs = tokens or ([], [], None)
        mixed = spans[0].attributes.get(f"{semconv.CHOICE}.{choice}." * bool(choice) + semconv.WEIGHT_VERSIONS) or None
        for name, values in (("logprob", logprobs), ("weight version", mixed)):
            if values is not None and len(values) != len(response_ids):
                span = call.anchor.span
                raise AdapterError(
                    f"model call {call.response_id} (rollout {span.rollout_id}, attempt {span.attempt_id}, span "
                    f"{span.span_id}) has {len(response_ids)} response tokens and {len(values)} {name}s; the "
                    f"model server must return one {name} for each sampled token"
                )
        if mixed and not (set(map(type, mixed)) <= {int} and 0 <= min(mixed) <= max(mixed) < 2**31):
            raise AdapterError(f"weight versions = {mixed!r:.100} are not integers from 0 to 2**31 - 1")
        response = {"token_ids": response_ids, "raw_content": answers[choice : choice + 1]}
        finish_reason = finish_reasons[choice] if choice < len(finish_reasons) else None
        yield Triplet(
            prompt={"token_ids": prompt_ids, "raw_content": messages, "image_urls": image_urls},
            response=response if logprobs is None else {**response, "logprobs": logprobs},
            reward=reward,
            metadata={
                **metadata,
                "finish_reason": finish_reason,
                "choice": choice,
                **({"weight_versions": list(mixed)} if mixed else {}),
                **({"unused": unused} if unused else {}),
                **({"untrusted": True} if is_claimed and tokens is None else {}),
            },
        )


def _compile(name: str, pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{name} = {pattern!r} is not a regular expression: {error}") from error
