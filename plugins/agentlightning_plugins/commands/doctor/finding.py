"""The links that the spans of a finished rollout tell of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning import semconv
from agentlightning.adapter import TraceToTriplet, build_trajectories
from agentlightning.errors import AdapterError
from agentlightning.reward import find_final_reward
from agentlightning.types import AttemptedRollout, Span, Triplet
from agentlightning_plugins.chat_history.linking import link_calls
from agentlightning_plugins.commands.doctor.link import Link, broken, ok, one_line, unchecked

_USE_LLM = (
    "make the client with the endpoint that the rollout is given: OpenAI(base_url=llm.get_base_url(), "
    "api_key=llm.api_key), with a parameter llm of the agent"
)
_SERVER = "serve the model with vLLM 0.10.2 or newer, or let Trainer(algorithm='grpo') serve it"


@dataclass(frozen=True)
class Finding:
    """A rollout as it ended, and what it was run for."""

    rollout: AttemptedRollout
    spans: Sequence[Span]
    adapter: TraceToTriplet
    is_scripted: bool
    """Whether the model server was ours."""
    trains_weights: bool
    """Whether tokens are needed: tuning prompts needs none."""

    def links(self) -> list[Link]:
        """From ``calls`` on."""
        triplets, link = self._triplets()
        return [
            self._calls(),
            self._spans(),
            self._token_ids(),
            self._logprobs(),
            self._reward(),
            link,
            self._template(triplets),
        ]

    @property
    def _recorded(self) -> list[Span]:
        return [span for span in self.spans if semconv.is_gateway_call(span)]

    @property
    def _answered(self) -> list[Span]:
        return [span for span in self._recorded if span.attributes[semconv.GATEWAY_COMPLETE]]

    def _calls(self) -> Link:
        """Whether the agent used the endpoint it was given, and was answered."""
        recorded, answered = self._recorded, self._answered
        if not recorded and self.rollout.status != "succeeded":
            return unchecked("calls", "the rollout failed before it made one")
        if not recorded:
            elsewhere = [span for span in self.spans if semconv.is_llm_call(span)]
            if not self.trains_weights:
                return _prompt_calls(elsewhere)
            if elsewhere:
                said = f"the agent made {_count(elsewhere, 'model call')}, none of them through the rollout's endpoint"
            else:
                said = "the agent made no model call"
            return broken("calls", said, _USE_LLM)
        if not answered:
            why = one_line(recorded[-1].status.description or "no reason given")
            said = f"none of {_count(recorded, 'model call')} was answered; the last: {why}"
            return broken("calls", said, "see what the model server says; agl doctor without --endpoint uses our own")
        failed = f", {len(recorded) - len(answered)} failed" if len(answered) < len(recorded) else ""
        return ok("calls", f"{_count(answered, 'model call')} went through the rollout's endpoint{failed}")

    def _spans(self) -> Link:
        dropped = self.rollout.attempt.spans_dropped
        if dropped:
            mend = "the store was too slow or out of reach; an attempt that lost spans is left out of training"
            return broken("spans", f"{_count(dropped, 'span')} of {dropped + len(self.spans)} did not arrive", mend)
        if not any(span.name == semconv.SPAN_ROLLOUT for span in self.spans):
            said = f"{_count(self.spans, 'span')} arrived, and the root of the trace is not among them"
            return broken("spans", said, "let the tracer's trace_context end before the attempt does")
        clients = [s for s in self.spans if semconv.is_llm_call(s) and not semconv.is_gateway_call(s)]
        seen = "" if clients else "; no library of the agent is instrumented, so that agents have no names"
        return ok("spans", f"{_count(self.spans, 'span')} arrived, none was lost{seen}")

    def _token_ids(self) -> Link:
        missing = self._not_needed("token ids")
        if missing is not None:
            return missing
        tokens = [semconv.read_token_data(span) for span in self._answered]
        without = [data for data in tokens if data is None or not data.prompt_token_ids or not data.response_token_ids]
        if without:
            said = f"{len(without)} of {_count(tokens, 'answered call')} came without token ids"
            mend = f"the model server must know return_token_ids: {_SERVER}. To tune prompts only: --tunes prompts"
            return broken("token ids", said, mend)
        count = sum(len(data.response_token_ids) for data in tokens if data is not None)
        return ok("token ids", f"{count} sampled tokens, with those of their prompts")

    def _logprobs(self) -> Link:
        missing = self._not_needed("logprobs")
        if missing is not None:
            return missing
        tokens = [data for span in self._answered if (data := semconv.read_token_data(span)) is not None]
        if not tokens:
            return unchecked("logprobs", "needs token ids")
        without = [data for data in tokens if data.logprobs is None]
        if without:
            said = f"{len(without)} of {_count(tokens, 'answered call')} came without logprobs"
            return broken("logprobs", said, f"the model server must answer logprobs=True: {_SERVER}")
        uneven = [data for data in tokens if len(data.logprobs or ()) != len(data.response_token_ids)]
        if uneven:
            said = (
                f"a call has {len(uneven[0].response_token_ids)} response tokens and "
                f"{len(uneven[0].logprobs or ())} logprobs"
            )
            return broken("logprobs", said, f"there must be one for each sampled token: {_SERVER}")
        return ok("logprobs", "one for each sampled token")

    def _not_needed(self, name: str) -> Link | None:
        if not self.trains_weights:
            return unchecked(name, "not needed to tune prompts")
        return None if self._answered else unchecked(name, "needs an answered call")

    def _reward(self) -> Link:
        reward = find_final_reward(self.spans, self.rollout)
        if reward is not None:
            return ok("reward", f"the rollout's reward is {reward:g}")
        if self.rollout.status != "succeeded":
            return unchecked("reward", "the rollout failed before it said one")
        mend = (
            "return a number from the agent, call agl.emit_reward(...) in it, or give a function of the output: "
            "--reward module:function"
        )
        return broken("reward", "the agent said no reward", mend)

    def _triplets(self) -> tuple[list[Triplet], Link]:
        try:
            triplets = self.adapter.adapt(self.spans)
        except AdapterError as error:
            return [], broken("triplets", one_line(error), "the message says it; see also docs/tracing.md")
        if triplets:
            names = sorted({str(t.metadata["agent_name"]) for t in triplets if t.metadata["agent_name"]})
            by = f", by {', '.join(names)}" if names else ""
            return triplets, ok("triplets", f"{_count(triplets, 'triplet')} to learn from{by}")
        left_out = self.adapter.explain_left_out(self.spans)
        if not left_out and self.rollout.status != "succeeded":
            return [], unchecked("triplets", "the rollout failed before it made a model call")
        if not self.trains_weights:
            return [], unchecked("triplets", "not needed to tune prompts")
        if not left_out:
            return [], broken("triplets", "no triplets: no span is a model call", _USE_LLM)
        reasons = "; ".join(f"{count} {reason}" for reason, count in left_out.items())
        names = sorted(_agent_names(self.spans))
        mend = "see the links above"
        if self.adapter.agent_match is not None:
            mend = f"agents here: {', '.join(names) or 'none has a name'}; choose one of them with --agent-match"
        return [], broken("triplets", f"no triplets, model calls were left out: {reasons}", mend)

    def _template(self, triplets: Sequence[Triplet]) -> Link:
        """Whether what was sampled comes back as the same tokens when it is history."""
        if not self.trains_weights:
            return unchecked("template", "not needed to tune prompts")
        if self.is_scripted:
            return unchecked("template", "the scripted server has none; give --endpoint to check a model's")
        if not any(triplet.prompt["token_ids"] for triplet in triplets):
            return unchecked("template", "needs token ids")
        result = build_trajectories(triplets)
        if result.mismatches:
            counts = ", ".join(f"{count} {kind}" for kind, count in result.counts.items() if count)
            said = f"{_count(result.mismatches, 'call')} cannot be joined with the one before ({counts}): "
            mend = (
                "training call by call works all the same; to train whole conversations use a chat template that "
                "keeps history as it was sampled"
            )
            if result.counts["other"]:
                mend = "training call by call works all the same; to train whole conversations only append messages"
            return broken("template", said + result.mismatches[0].explanation, mend)
        joined = sum(previous is not None for previous in link_calls(triplets))
        if not joined:
            return unchecked("template", "no call goes on with the conversation of another")
        begin = "begins" if joined == 1 else "begin"
        return ok("template", f"{_count(joined, 'call')} {begin} exactly with the tokens of the one before")


def _prompt_calls(traced: Sequence[Span]) -> Link:
    """Calls around the rollout's endpoint do for a critic of prompts: it reads what is traced."""
    if traced:
        return ok("calls", f"{_count(traced, 'model call')}, none through the rollout's endpoint, as prompts allow")
    return unchecked("calls", "the agent made no model call that is traced: critics would read tasks and rewards only")


def describe_failure(rollout: AttemptedRollout) -> str:
    """What a failed attempt died of, and where."""
    error = rollout.attempt.error
    if error is None:
        return f"the attempt ended as {rollout.attempt.status}"
    places = re.findall(r'File "([^"]+)", line (\d+)', error.traceback)
    where = f", at {places[-1][0]}:{places[-1][1]}" if places else ""
    return f"{error.type}: {one_line(error.message)}{where}"


def _agent_names(spans: Sequence[Span]) -> set[str]:
    triplets = TraceToTriplet().adapt(spans)
    return {str(triplet.metadata["agent_name"]) for triplet in triplets if triplet.metadata["agent_name"]}


def _count(things: Sequence[object] | int, name: str) -> str:
    number = things if isinstance(things, int) else len(things)
    return f"{number} {name}{'' if number == 1 else 's'}"
