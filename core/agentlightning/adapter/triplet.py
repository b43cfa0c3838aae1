"""``TraceToTriplet``: (prompt, response, reward) of each model call of an attempt."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from agentlightning import semconv
from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.adapter.call import Call, find_calls
from agentlightning.adapter.credit import CreditRule, CreditSpec, assign_credit, create_credit
from agentlightning.adapter.matching import RewardMatchPolicy, match_rewards
from agentlightning.adapter.tree import Node, build_tree
from agentlightning.errors import AdapterError, ConfigError
from agentlightning.reward import find_final_reward
from agentlightning.types import Span, Triplet

logger = logging.getLogger("agentlightning")


class TraceToTriplet(TraceAdapter[list[Triplet]]):
    """Makes a triplet of each answer to each model call, in the order of the calls.

    ``prompt`` is ``{"token_ids", "raw_content", "image_urls"}`` and ``response`` is ``{"token_ids", "raw_content"}``,
    with ``"logprobs"`` where they are known; ``raw_content`` is a list of chat messages. Tokens and log-probabilities
    are the gateway's; where nobody recorded them the lists are empty. ``metadata`` has ``response_id``, ``agent_name``,
    ``model``, ``finish_reason``, ``weight_version``, ``complete`` (True: the gateway saw the whole answer), ``span_id``
    and ``choice`` (of n answers), None where not known. Calls whose answer did not pass the gateway whole, and calls
    without an answer, give no triplet.

    ``reward`` is what the agent emitted about this very call; ``find_final_reward`` of the same spans tells how the
    attempt went as a whole. With a ``credit`` rule, ``reward`` is what that rule says the call is worth, and
    ``metadata["credit"]`` names the rule.
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
    ) -> None:
        """Chooses the calls.

        Args:
            repair_hierarchy: put spans that lost their parent where their time says they belong.
            llm_call_match: regular expression that is found in the names of the spans of model calls; default is
                whatever ``semconv.is_llm_call`` recognises.
            agent_match: regular expression that is found in the name of the agent that makes the call; default is any
                agent, and calls outside agents too.
            exclude_llm_call_in_reward: leave out calls that compute a reward, as a judge's.
            reward_match: how rewards find their calls.
            credit: a rule that says what each call is worth, its name (``agl plugins`` lists them), or
                ``{"name": ..., **settings}``. Default is none: algorithms then give every call the final reward.

        Raises:
            ConfigError: not a regular expression, an unknown policy or setting.
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
        self._told: set[str] = set()
        """Reasons for traces without triplets that were logged as warnings: what goes wrong once goes wrong always."""
        self.credit: CreditRule | None = None if credit is None else create_credit(credit)

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        """Makes the triplets of one attempt, in time linear in its spans.

        A trace that gives none is logged, with the reason.

        Raises:
            AdapterError: spans of several attempts, token data that contradict each other, or a credit rule that does
                not give one value for each call.
        """
        nodes = build_tree(source, repair=self.repair_hierarchy)
        calls, left_out = self._choose(nodes)
        if not calls:
            self._log_nothing(source, left_out)
            return []
        rewards = match_rewards(nodes, calls, self.reward_match, is_exclusive=self.credit is None)
        if self.credit is None:
            return [triplet for call in calls for triplet in _to_triplets(call, rewards.get(call))]
        triplets = [list(_to_triplets(call, None)) for call in calls]
        credited = assign_credit(self.credit, nodes, calls, triplets, rewards, find_final_reward(source))
        return [triplet for own in credited for triplet in own]

    def _log_nothing(self, spans: Sequence[Span], left_out: Counter[str]) -> None:
        if not spans:
            logger.warning("a trace without spans gives no triplets")
            return
        if not left_out:
            why = f"none of its {len(spans)} spans is a model call"
        else:
            why = "its model calls were left out: " + "; ".join(f"{n} {reason}" for reason, n in left_out.items())
        attempt = f"attempt {spans[0].attempt_id} of rollout {spans[0].rollout_id}"
        failure = _find_failure(spans)
        if failure is not None:  # which is recorded on the attempt, and the reason for what is missing here
            logger.info("%s failed (%s) and gives no triplets: %s", attempt, failure, why)
        elif why in self._told:
            logger.info("%s gives no triplets: %s", attempt, why)
        else:
            self._told.add(why)
            logger.warning("%s gives no triplets: %s. `agl doctor AGENT` says how to mend it", attempt, why)

    def explain_left_out(self, source: Sequence[Span], /) -> dict[str, int]:
        """Why model calls of an attempt give no triplet, and how many for each reason."""
        return dict(self._choose(build_tree(source, repair=self.repair_hierarchy))[1])

    def _choose(self, nodes: Sequence[Node]) -> tuple[list[Call], Counter[str]]:
        """The calls to make triplets of, and how many are left out for which reason."""
        calls = []
        left_out: Counter[str] = Counter()
        for call in find_calls(nodes, self._is_call):
            reason = self._reason_to_leave_out(call)
            if reason is None:
                calls.append(call)
            else:
                left_out[reason] += 1
        return calls, left_out

    def _is_call(self, span: Span) -> bool:
        if self.llm_call_match is None:
            return semconv.is_llm_call(span)
        return self.llm_call_match.search(span.name) is not None

    def _reason_to_leave_out(self, call: Call) -> str | None:
        agent_name = call.anchor.agent_name
        if not call.is_complete:
            return "broke off at the gateway"
        if self.agent_match is not None and (agent_name is None or self.agent_match.search(agent_name) is None):
            return f"made by agent {agent_name!r}, which agent_match={self.agent_match.pattern!r} does not want"
        if self.exclude_llm_call_in_reward and call.anchor.is_in_reward:
            return "made to compute a reward"
        if call.response_id is None and not any(_has_answer(node.span) for node in call.nodes):
            return "without an answer"
        return None


TracerTraceToTriplet = TraceToTriplet


class LlmProxyTraceToTriplet(TraceToTriplet):
    """Makes triplets of what the gateway recorded, whatever else was traced."""

    def __init__(
        self,
        reward_match: RewardMatchPolicy = RewardMatchPolicy.FIRST_OCCURRENCE,
        *,
        credit: CreditSpec | None = None,
    ) -> None:
        """Takes every call of the gateway.

        Args:
            reward_match: how rewards find their calls.
            credit: as ``TraceToTriplet`` takes it.
        """
        super().__init__(reward_match=reward_match, credit=credit)

    def _is_call(self, span: Span) -> bool:
        return semconv.is_gateway_call(span)


def _to_triplets(call: Call, reward: float | None) -> Iterator[Triplet]:
    spans = [node.span for node in reversed(call.nodes)]  # the gateway's first: it knows best
    messages = next(filter(None, map(semconv.read_input_messages, spans)), [])
    answers = next(filter(None, map(semconv.read_output_messages, spans)), [])
    finish_reasons = next(filter(None, map(semconv.read_finish_reasons, spans)), [])
    metadata = {
        "response_id": call.response_id,
        "agent_name": call.anchor.agent_name,
        "model": next(filter(None, map(semconv.read_model, spans)), None),
        "weight_version": next(
            (v for span in spans if (v := span.attributes.get(semconv.WEIGHT_VERSION)) is not None), None
        ),
        "complete": True if call.gateway is not None else None,
        "span_id": call.anchor.span.span_id,
    }
    image_urls = semconv.find_image_urls(messages)
    for choice in range(max(1, len(answers))):
        tokens = next(filter(None, (semconv.read_token_data(span, choice) for span in spans)), None)
        response: dict[str, Any] = {
            "token_ids": [] if tokens is None else tokens.response_token_ids,
            "raw_content": answers[choice : choice + 1],
        }
        if tokens is not None and tokens.logprobs is not None:
            if len(tokens.logprobs) != len(tokens.response_token_ids):
                span = call.anchor.span
                raise AdapterError(
                    f"model call {call.response_id} (rollout {span.rollout_id}, attempt {span.attempt_id}, span "
                    f"{span.span_id}) has {len(tokens.response_token_ids)} response tokens and {len(tokens.logprobs)} "
                    "logprobs; the model server must return one logprob for each sampled token"
                )
            response["logprobs"] = tokens.logprobs
        yield Triplet(
            prompt={
                "token_ids": [] if tokens is None else tokens.prompt_token_ids,
                "raw_content": messages,
                "image_urls": image_urls,
            },
            response=response,
            reward=reward,
            metadata={
                **metadata,
                "finish_reason": finish_reasons[choice] if choice < len(finish_reasons) else None,
                "choice": choice,
            },
        )


def _has_answer(span: Span) -> bool:
    return bool(semconv.read_token_data(span) or semconv.read_output_messages(span))


def _compile(name: str, pattern: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{name} = {pattern!r} is not a regular expression: {error}") from error


def _find_failure(spans: Sequence[Span]) -> str | None:
    """What the agent failed with, when the root of its trace says so."""
    for span in spans:
        if span.name == semconv.SPAN_ROLLOUT and span.status.status_code == "ERROR":
            return span.status.description or "no reason given"
    return None
