"""The checks of a finished rollout: its model calls, spans, tokens, reward, triplets, task and prompts."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from agentlightning import semconv
from agentlightning.adapter import TraceToTriplet, build_trajectories
from agentlightning.errors import AdapterError, ConfigError
from agentlightning.resources import PromptTemplate, Resource
from agentlightning.reward import find_final_reward
from agentlightning.types import AttemptedRollout, Span, Triplet
from agentlightning_plugins.shared.chat_history import link_calls
from agentlightning_plugins.shared.rendering.text import show_error
from agentlightning_plugins.shared.terminal import shorten

State: TypeAlias = Literal["ok", "broken", "unchecked"]
NAMES: tuple[str, ...] = (
    *("environment", "agent", "endpoint", "rollout"),
    *("calls", "task", "prompts", "spans", "token ids", "logprobs", "reward", "triplets", "template", "tools", "model"),
)
"""Names of the checks, in the order in which they run."""


class Check(NamedTuple):
    """The outcome of one check."""

    name: str
    state: State
    text: str
    """The finding, as a sentence."""
    fix: str = ""
    """The remedy; empty unless the check failed."""


def ok(name: str, text: str) -> Check:
    """Returns a check that passed."""
    return Check(name, "ok", text)


def broken(name: str, text: str, fix: str) -> Check:
    """Returns a check that failed."""
    return Check(name, "broken", text, fix)


def unchecked(name: str, text: str) -> Check:
    """Returns a check that could not run, with the reason."""
    return Check(name, "unchecked", text)


def one_line(text: object, limit: int = 300) -> str:
    """Converts to text, joins its lines, and cuts it to ``limit`` characters."""
    return shorten(str(text), limit)


_MIN_LINE_CHARS: Final = 8
"""A text is found if one of its lines of at least this length is found, because agents may send only a part of it."""
_JINJA: Final = re.compile(r"\{\{.*?(?:\}\}|\Z)|\{%.*?(?:%\}|\Z)|\{#.*?(?:#\}|\Z)", re.DOTALL)


def check_task(task: Any, calls: Sequence[Span]) -> Check:
    """Checks that a text or number of the task occurs in the input of a model call."""
    wanted = [text for text in _leaves(task) if text.strip()]
    if not calls or not wanted:
        return unchecked("task", "no model call is recorded" if wanted else "the task has no text")
    sent = _sent(calls)
    if any(_occurs(text, sent) for text in wanted):
        return ok("task", "a model call contains the task")
    fix = "pass the task to the model: use the agent's first parameter, or task_to_input of agl.wrap"
    return broken("task", f"no model call contains any part of the task {one_line(repr(task), 80)}", fix)


def check_prompts(prompts: Mapping[str, PromptTemplate], calls: Sequence[Span]) -> Check:
    """Checks that the fixed text of each prompt occurs in the input of a model call."""
    fixed = {name: text for name, prompt in prompts.items() if (text := _longest_text(prompt))}
    if not calls or not fixed:
        return unchecked("prompts", "no model call is recorded" if fixed else "no prompt has fixed text to search for")
    sent = _sent(calls)
    unused = [name for name, text in fixed.items() if not _occurs(text, sent)]
    if not unused:
        return ok("prompts", f"model calls contain {', '.join(fixed)}")
    fix = "use the prompt that the agent gets as a parameter of this name; training changes no other text"
    return broken("prompts", f"no model call contains the text of {', '.join(unused)}", fix)


def _sent(calls: Iterable[Span]) -> str:
    """Returns the input of all calls as one text."""
    texts: list[str] = []
    for span in calls:
        texts += _leaves(semconv.read_input_messages(span))
        texts += _leaves(span.attributes.get(semconv.GEN_AI_SYSTEM_INSTRUCTIONS))
    return _normalize("\n".join(texts).replace("\\n", "\n").replace('\\"', '"'))  # texts may be in JSON


def _leaves(value: Any) -> Iterator[str]:
    """Yields the texts and numbers in nested lists and mappings."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for child in value:
            yield from _leaves(child)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def _occurs(text: str, sent: str) -> bool:
    lines = [line for line in text.splitlines() if len(line.strip()) >= _MIN_LINE_CHARS]
    return any(re.search(rf"(?<!\w){re.escape(_normalize(part))}(?!\w)", sent) for part in (text, *lines))


def _longest_text(prompt: PromptTemplate) -> str:
    if prompt.engine == "f-string":
        parts = [literal for literal, *_ in string.Formatter().parse(prompt.template)]
    elif prompt.engine == "jinja":
        parts = _JINJA.split(prompt.template)
    else:  # with other engines, the template may not contain the text that is sent
        return ""
    return max((part.strip() for part in parts if re.search(r"\w", part)), key=len, default="")


def _normalize(text: str) -> str:
    return " ".join(text.split()).casefold()


_USE_LLM = (
    "create the client with the rollout's endpoint: OpenAI(base_url=llm.get_base_url(), "
    "api_key=llm.api_key), where llm is a parameter of the agent"
)
_SEE_SERVER = "see the model server's log, or omit --endpoint to use a scripted server"
_SERVER = "serve the model with vLLM 0.10.2 or newer, or let Trainer(algorithm='grpo') serve it"


@dataclass(frozen=True)
class RolloutChecks:
    """Checks one finished rollout."""

    rollout: AttemptedRollout
    spans: Sequence[Span]
    adapter: TraceToTriplet
    is_scripted: bool
    """Whether the model server was the scripted one."""
    trains_weights: bool
    reads_calls: bool
    """Whether token ids are needed; prompt tuning does not need them."""
    resources: Mapping[str, Resource] = field(default_factory=dict)
    """Resources of the rollout, by name."""
    server: str = ""
    """Model and URL of the model server."""
    has_own_task: bool = False
    """Whether the user gave the task, so that a model call should contain it."""

    def checks(self) -> list[Check]:
        """Runs the checks ``calls`` to ``template``."""
        triplets, check = self._triplets()
        before = [self._calls(), *self._texts(), self._spans(), self._token_ids(), self._logprobs(), self._reward()]
        return [*before, check, self._template(triplets), self._tools()]

    @property
    def _recorded(self) -> list[Span]:
        return [span for span in self.spans if semconv.is_gateway_call(span)]

    @property
    def _answered(self) -> list[Span]:
        return [span for span in self._recorded if span.attributes[semconv.GATEWAY_COMPLETE]]

    def _calls(self) -> Check:
        """Checks that the agent called the rollout's endpoint and got responses."""
        recorded, answered = self._recorded, self._answered
        if not recorded and self.rollout.status != "succeeded":
            return unchecked("calls", "the rollout failed before its first model call")
        if not recorded:
            elsewhere = [span for span in self.spans if semconv.is_llm_call(span)]
            if not self.trains_weights:
                return self._prompt_calls(elsewhere)
            if elsewhere:
                said = (
                    f"the agent made {_count(elsewhere, 'model call')}, none of them through the rollout's endpoint: "
                    f"{_describe_call(elsewhere[-1])}"
                )
            else:
                said = "the agent made no model call"
            return broken("calls", said, _USE_LLM)
        if not answered:
            why = one_line(recorded[-1].status.description or "no reason given")
            said = f"none of {_count(recorded, 'model call')} to {self.server} was answered; the last: {why}"
            return broken("calls", said, _fix_refusal(recorded[-1]))
        if failed := [span for span in recorded if span not in answered]:
            why = one_line(failed[-1].status.description or "no reason given")
            said = f"{len(failed)} of {_count(recorded, 'model call')} to {self.server} failed; the last: {why}"
            return broken("calls", said, _fix_refusal(failed[-1]))
        return ok("calls", f"{_count(answered, 'model call')} went through the rollout's endpoint")

    def _prompt_calls(self, traced: Sequence[Span]) -> Check:
        """Checks the calls for prompt tuning, which may bypass the rollout's endpoint: critics read the trace."""
        if failed := [span for span in traced if span.status.status_code == "ERROR"]:
            said = (
                f"{len(failed)} of {_count(traced, 'model call')} failed: {_describe_call(failed[-1])}: "
                f"{one_line(failed[-1].status.description or 'no reason given')}"
            )
            return broken("calls", said, "fix the endpoint, the model or the key in the agent")
        if traced:
            said = f"{_count(traced, 'model call')} bypassed the rollout's endpoint, which prompt tuning allows"
            return ok("calls", said)
        if any(semconv.OPERATION_OUTPUT in span.attributes for span in self.spans):
            return unchecked("calls", "the agent made no traced model call; critics read its output")
        if not self.reads_calls:
            return unchecked("calls", "the agent made no traced model call, and the algorithm reads none")
        said = "the agent made no traced model call: critics would see only tasks and rewards"
        return broken("calls", said, f"{_USE_LLM}; or call the model with a library that the tracer supports")

    def _texts(self) -> list[Check]:
        calls = [span for span in self.spans if semconv.is_llm_call(span)]
        prompts = {name: prompt for name, prompt in self.resources.items() if isinstance(prompt, PromptTemplate)}
        task = unchecked("task", "doctor's default task was used; give another with --task")
        return [check_task(self.rollout.input, calls) if self.has_own_task else task, check_prompts(prompts, calls)]

    def _spans(self) -> Check:
        dropped = self.rollout.attempt.spans_dropped
        if dropped:
            fix = "the store was too slow or unreachable; attempts with lost spans are excluded from training"
            return broken("spans", f"{_count(dropped, 'span')} of {dropped + len(self.spans)} did not arrive", fix)
        if not any(span.name == semconv.SPAN_ROLLOUT for span in self.spans):
            said = f"{_count(self.spans, 'span')} arrived, but the root span did not"
            return broken("spans", said, "end the tracer's trace_context before the attempt ends")
        clients = [s for s in self.spans if semconv.is_llm_call(s) and not semconv.is_gateway_call(s)]
        seen = "" if clients else "; no library of the agent is instrumented, so agents have no names"
        late = sum(semconv.LATE in span.attributes for span in self.spans)
        after = f", {late} of them after the end of the attempt" if late else ""
        return ok("spans", f"{_count(self.spans, 'span')} arrived{after}, none lost{seen}")

    def _token_ids(self) -> Check:
        missing = self._not_needed("token ids")
        if missing is not None:
            return missing
        tokens = [semconv.read_token_data(span) for span in self._answered]
        without = [data for data in tokens if data is None or not data.prompt_token_ids or not data.response_token_ids]
        if without:
            has_response = any(data is not None and data.response_token_ids for data in without)
            what, name = ("token ids of the prompt", "prompt_token_ids") if has_response else ("token ids", "token_ids")
            said = f"{len(without)} of {_count(tokens, 'answered call')} have no {what}"
            fix = f"the model server must answer return_token_ids: true with {name}: {_SERVER}"
            return broken("token ids", said, f"{fix}. To tune only prompts: --tunes prompts")
        count = sum(len(data.response_token_ids) for data in tokens if data is not None)
        return ok("token ids", f"{count} sampled tokens, and the tokens of their prompts")

    def _logprobs(self) -> Check:
        missing = self._not_needed("logprobs")
        if missing is not None:
            return missing
        tokens = [data for span in self._answered if (data := semconv.read_token_data(span)) is not None]
        if not tokens:
            return unchecked("logprobs", "needs token ids")
        without = [data for data in tokens if data.logprobs is None]
        if without:
            said = f"{len(without)} of {_count(tokens, 'answered call')} have no logprobs"
            return broken("logprobs", said, f"the model server must support logprobs=True: {_SERVER}")
        uneven = [data for data in tokens if len(data.logprobs or ()) != len(data.response_token_ids)]
        if uneven:
            said = (
                f"a call has {len(uneven[0].response_token_ids)} response tokens and "
                f"{len(uneven[0].logprobs or ())} logprobs"
            )
            if len(uneven[0].response_token_ids) < len(uneven[0].logprobs or ()):
                fix = "the model server must answer return_token_ids: true with token_ids in every chunk of a stream"
            else:
                fix = "the model server must answer logprobs: true with a logprob for each sampled token"
            return broken("logprobs", said, f"{fix}: {_SERVER}")
        return ok("logprobs", "each sampled token has one")

    def _not_needed(self, name: str) -> Check | None:
        if not self.trains_weights:
            return unchecked(name, "not needed to tune prompts")
        return None if self._answered else unchecked(name, "needs an answered call")

    def _reward(self) -> Check:
        reward = find_final_reward(self.spans, self.rollout)
        if reward is not None:
            return ok("reward", f"the rollout's reward is {reward:g}")
        if self.rollout.status != "succeeded":
            return unchecked("reward", "the rollout failed before it returned a reward")
        fix = (
            "return a number from the agent, call agl.emit_reward(...), or pass a reward function: "
            "--reward module:function"
        )
        return broken("reward", "the agent returned no reward", fix)

    def _triplets(self) -> tuple[list[Triplet], Check]:
        try:
            triplets = self.adapter.adapt(self.spans)
        except AdapterError as error:
            return [], broken("triplets", one_line(error), "follow the message; see also docs/tracing.md")
        if triplets:
            names = _agent_names(triplets)
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
        fix = "see the checks above"
        if self.adapter.agent_match is not None:
            names = _agent_names(TraceToTriplet().adapt(self.spans))
            fix = f"agents in this rollout: {', '.join(names) or 'none has a name'}; select one with --agent-match"
        return [], broken("triplets", f"no triplets, model calls were excluded: {reasons}", fix)

    def _template(self, triplets: Sequence[Triplet]) -> Check:
        """Checks that sampled tokens are unchanged when they come back as conversation history."""
        if not self.trains_weights:
            return unchecked("template", "not needed to tune prompts")
        if self.is_scripted:
            return unchecked("template", "the scripted server has no chat template; check a real one with --endpoint")
        if not any(triplet.prompt["token_ids"] for triplet in triplets):
            return unchecked("template", "needs token ids")
        result = build_trajectories(triplets)
        if result.mismatches:
            counts = ", ".join(f"{count} {kind}" for kind, count in result.counts.items() if count)
            said = f"{_count(result.mismatches, 'call')} cannot be joined with the previous call ({counts}): "
            fix = (
                "training on single calls still works; to train on whole conversations use a chat template that "
                "keeps history unchanged"
            )
            if result.counts["other"]:
                fix = "training on single calls still works; to train on whole conversations, only append messages"
            return broken("template", said + result.mismatches[0].explanation, fix)
        joined = sum(previous is not None for previous in link_calls(triplets))
        if not joined:
            return unchecked("template", "no call continues the conversation of another")
        begin = "begins" if joined == 1 else "begin"
        return ok("template", f"{_count(joined, 'call')} {begin} exactly with the tokens of the previous call")

    def _tools(self) -> Check:
        """Checks that the model server read the tool calls of the model."""
        if not any(map(semconv.read_tools, self._answered)):
            return unchecked("tools", "no answered call offers tools")
        unparsed = sum(int(span.attributes.get(semconv.TOOL_CALLS_UNPARSED) or 0) for span in self._answered)
        if unparsed:
            said = f"{_count(unparsed, 'tool call')} of the model are text: malformed, cut off, or inside of a thought"
            return broken("tools", said, "raise max_tokens, or first train the form of calls, with sft")
        return ok("tools", "no tool call is left in the text of an answer")


def check_model(model: str, calls: Sequence[Span]) -> Check:
    """Checks that the policy server can read a model's tool calls, and that the model has positions for the requests.

    ``model`` is the directory or hub name in the settings of an algorithm; nothing is downloaded.
    """
    try:
        from transformers import AutoConfig, AutoTokenizer

        from agentlightning_algorithms.shared.policy.server.request import CompletionError, read_messages
        from agentlightning_algorithms.shared.policy.server.tool_format import TEMPLATE_ERRORS, find_format
        from agentlightning_algorithms.shared.trained_model import find_model
    except ImportError as error:
        return unchecked("model", f"needs the extra grpo: {one_line(error)}")
    try:
        path = find_model(model)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        form = find_format(tokenizer)
    except ConfigError as error:
        return broken("model", one_line(error, 600), "follow the message")
    except (OSError, ValueError):
        return unchecked("model", f"{model} is not on this machine yet")
    if form is None and any(map(semconv.read_tools, calls)):
        said = f"the agent offers tools, but the chat template of {model} writes no tool calls"
        return broken("model", said, "use a model with a chat template for tools, or set tool_format of the backend")
    lengths = []
    for span in calls:
        options: Any = {"tools": semconv.read_tools(span) or None, "add_generation_prompt": True, "tokenize": False}
        try:
            text = tokenizer.apply_chat_template(read_messages(semconv.read_input_messages(span)), **options)
        except (CompletionError, *TEMPLATE_ERRORS) as error:
            said = f"the chat template of {model} refuses a request: {one_line(error)}"
            return broken("model", said, "change the messages of the agent, or use another model")
        lengths.append(len(tokenizer.encode(text, add_special_tokens=False)))
    positions = getattr(config, "max_position_embeddings", None)
    if lengths and positions and max(lengths) >= positions:
        which, length = ("first", lengths[0]) if lengths[0] >= positions else ("longest", max(lengths))
        said = f"the {which} request has {length} tokens, but {model} has {positions} positions"
        return broken("model", said, "use a model with more positions, or an agent with a shorter prompt")
    first = f"; the first request has {lengths[0]} tokens" if lengths else ""
    calls_of = "no tool calls" if form is None else f"tool calls in the form {form.name}"
    return ok("model", f"{model} has {calls_of} and {positions or 'unlimited'} positions{first}")


def _fix_refusal(span: Span) -> str:
    """Returns the remedy for a call that the model server refused."""
    roles = [message.get("role") for message in semconv.read_input_messages(span)]
    if "system" not in roles[1:]:
        return _SEE_SERVER
    return f"if its chat template refuses late system messages, give the gateway late_system: user; else {_SEE_SERVER}"


def _describe_call(span: Span) -> str:
    """Returns the model and the URL of a call that the tracer recorded."""
    attributes = span.attributes
    url = attributes.get("gen_ai.openai.api_base") or attributes.get("server.address") or "an unknown URL"
    return f"{semconv.read_model(span) or 'an unknown model'} at {url}"


def describe_failure(rollout: AttemptedRollout) -> str:
    """Describes the error of a failed attempt, with file and line."""
    error = rollout.attempt.error
    if error is None:
        return f"the attempt ended as {rollout.attempt.status}"
    places = re.findall(r'File "([^"]+)", line (\d+)', error.traceback)
    where = f", at {places[-1][0]}:{places[-1][1]}" if places else ""
    return f"{show_error(f'{error.type}: {error.message}')}{where}"


def _agent_names(triplets: Sequence[Triplet]) -> list[str]:
    return sorted({str(triplet.metadata["agent_name"]) for triplet in triplets if triplet.metadata["agent_name"]})


def _count(things: Sequence[object] | int, name: str) -> str:
    number = things if isinstance(things, int) else len(things)
    return f"{number} {name}{'' if number == 1 else 's'}"
