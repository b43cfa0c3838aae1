"""Semantic conventions: names of spans and attributes, and readers of model calls.

The readers read OpenTelemetry's conventions for generative AI and our own. Components of the kind ``span_reader``
translate the spans of libraries with other conventions. The readers return None or [] for missing data, and messages in
``openai``'s format.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import orjson

from agentlightning.errors import PluginError
from agentlightning.frozen import MAX_DEPTH, freeze_attributes, is_deep, parse_lenient, thaw
from agentlightning.plugin.registry import PluginManager, get_manager
from agentlightning.records import Span

logger = logging.getLogger("agentlightning")

SPAN_ANNOTATION: Final = "agentlightning.annotation"
SPAN_MESSAGE: Final = "agentlightning.message"
SPAN_FEEDBACK: Final = "agentlightning.feedback"
SPAN_STATE: Final = "agentlightning.state"
SPAN_OBJECT: Final = "agentlightning.object"
SPAN_EXCEPTION: Final = "agentlightning.exception"
SPAN_OPERATION: Final = "agentlightning.operation"
SPAN_REWARD: Final = "agentlightning.reward"
SPAN_VIRTUAL: Final = "agentlightning.virtual"  # made without a tracer
SPAN_ROLLOUT: Final = "agentlightning.rollout"  # the root of an attempt's trace

# Attributes of the resource.
ROLLOUT_ID: Final = "agentlightning.rollout_id"
ATTEMPT_ID: Final = "agentlightning.attempt_id"
SPAN_SEQUENCE_ID: Final = "agentlightning.span_sequence_id"
TRACER_NAME: Final = "agentlightning.tracer.name"

REWARD: Final = "agentlightning.reward"  # ``.{i}.name`` and ``.{i}.value``; the first is the primary reward
MAX_REWARD: Final = 1e30  # largest absolute value of a reward: sums and squares of rewards stay finite
LINK: Final = "agentlightning.link"  # ``.{i}.key_match``, ``.{i}.value_match``: the span with this attribute and value
TAG: Final = "agentlightning.tag"  # ``.{i}``
MESSAGE_BODY: Final = "agentlightning.message.body"
FEEDBACK_TEXT: Final = "agentlightning.feedback.text"
FEEDBACK_PROMPT: Final = "agentlightning.feedback.prompt"  # the prompt that the feedback is about; else about all
STATE: Final = "agentlightning.state.json"  # variables of the agent, by name, as JSON
OBJECT_TYPE: Final = "agentlightning.object.type"
OBJECT_LITERAL: Final = "agentlightning.object.literal"
OBJECT_JSON: Final = "agentlightning.object.json"
OPERATION_NAME: Final = "agentlightning.operation.name"
OPERATION_INPUT: Final = "agentlightning.operation.input"
OPERATION_OUTPUT: Final = "agentlightning.operation.output"

# Attributes of model calls.
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"  # links a client's span and the gateway's
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"  # seconds from the request, for a stream
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_INPUT_MESSAGES: Final = "gen_ai.input.messages"
GEN_AI_OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
GEN_AI_SYSTEM_INSTRUCTIONS: Final = "gen_ai.system_instructions"  # as parts, if the input messages lack it
GEN_AI_TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
PROMPT_TOKEN_IDS: Final = "prompt_token_ids"
RESPONSE_TOKEN_IDS: Final = "response_token_ids"
LOGPROBS: Final = "logprobs"  # one for each of ``response_token_ids``
CHOICE: Final = "agentlightning.choice"  # with n > 1: ``.{i}.response_token_ids`` and ``.{i}.logprobs`` of choice i > 0
WEIGHT_VERSION: Final = "agentlightning.weight_version"  # of the weights that sampled the answer or its first token
WEIGHT_VERSIONS: Final = "agentlightning.weight_versions"  # one per token, if the weights changed during the answer
GATEWAY_COMPLETE: Final = "agentlightning.gateway.complete"  # whether the whole answer passed; else not trained on
GATEWAY_REPLACED: Final = "agentlightning.gateway.replaced"  # names of sampling parameters that others replaced
TOOL_CALLS_UNPARSED: Final = "agentlightning.gateway.tool_calls_unparsed"  # number of calls left in the text
CACHED_SUFFIX: Final = " (cached)"  # ends the name of the gateway's span if its cache answered the call
LATE: Final = "agentlightning.late"  # set on a span that ended after its attempt; rewards in it do not count
UNFINISHED: Final = "agentlightning.unfinished"  # set by the tracer on a span that the end of its attempt has ended
UNTRUSTED: Final = "agentlightning.untrusted"  # names of what the store removed from a span that an agent wrote
TRAINING: Final = "agentlightning.training"  # begins the names of the spans of training records and their attributes
TRAINING_ID: Final = "training-"  # begins the ids of these spans, so that no other span can take their ids
GEN_AI_CONVERSATION_ID: Final = "gen_ai.conversation.id"
RETRY_OF: Final = "agentlightning.gateway.retry_of"  # the span of the try before, which the client gave up
PARENT_CONVERSATION: Final = "agentlightning.gateway.parent_conversation"  # the one that began a sub-agent's
GEN_AI_AGENT_NAME: Final = "gen_ai.agent.name"
GEN_AI_TOOL_NAME: Final = "gen_ai.tool.name"
ANSWERED_TOOL_CALL: Final = "agentlightning.answered_tool_call"
"""Given by span readers: a tool call (``make_tool_call``) of the answer to the model call above the span."""

RAW_ANSWER: Final = "agentlightning.raw_answer"
"""Given by span readers: the answer of the model server, with token ids if it is vLLM, as a mapping."""

_PROTECTED: Final = frozenset(
    {PROMPT_TOKEN_IDS, RESPONSE_TOKEN_IDS, LOGPROBS, WEIGHT_VERSION, WEIGHT_VERSIONS, RAW_ANSWER}
    | {LATE, UNTRUSTED, TRAINING}
)
_PROTECTED_PREFIXES: Final = (f"{CHOICE}.", "agentlightning.gateway.", f"{TRAINING}.")
GENERATING: Final = frozenset({"chat", "text_completion", "generate_content", "completion", "response"})
"""Operations that generate an answer; calls of embedding models, token counters, agents and tools do not."""
_MAX_TOKEN_ID, _MIN_LOGPROB, _ROUNDING = 2**31 - 1, -1000.0, 1e-4  # a sampler that rounds may report more than 0
_FINISH_REASONS: Final = {"tool_call": "tool_calls"}
Message = dict[str, Any]


SpanReader: TypeAlias = Mapping[str, Callable[[Span], Any]]
"""Reads spans of a library that has conventions of its own.

A function for each attribute of OpenTelemetry's or our conventions that can be read from such a span: it returns the
value that the attribute would have, messages in ``openai``'s format, or None. It is called for spans of all libraries.
"""


@functools.cache
def _load_readers(manager: PluginManager) -> Mapping[str, Sequence[Callable[[Span], Any]]]:
    """Returns the functions of all span readers by attribute."""
    found: dict[str, list[Callable[[Span], Any]]] = {}
    for component in manager.components("span_reader"):
        try:
            for name, read in manager.get("span_reader", component).items():
                found.setdefault(name, []).append(read)
        except PluginError as error:
            logger.warning("spans are read without a reader: %s", error)
    return found


def read_attribute(span: Span, name: str) -> Any:
    """Returns an attribute of OpenTelemetry's or our conventions, if necessary from a span reader; None if missing."""
    value = span.attributes.get(name)
    if value is not None:
        return value
    for read in _load_readers(get_manager()).get(name, ()):
        try:
            value = read(span)
        except Exception:  # isolation point: a plugin's reader, and a span that any program may have written
            logger.debug("span %s cannot be read", span.span_id, exc_info=True)
            continue
        if value is not None:
            return value
    return None


def distrust(span: Span) -> Span:
    """Returns a span that an agent wrote itself, without what only the gateway, the trainer and the store may write.

    That is the evidence on which weights are trained (tokens, log-probabilities, versions of weights, choices), the
    gateway's accounts, and training records. ``UNTRUSTED`` lists the names that were removed.
    """
    names = [name for name in span.attributes if _is_protected(name)]
    changes: dict[str, Any] = {}
    if f"{span.name}.".startswith(f"{TRAINING}."):
        names.append(span.name)
        changes["name"] = UNTRUSTED
    if span.span_id.startswith(TRAINING_ID):
        names.append(span.span_id)
        changes["span_id"] = os.urandom(8).hex()
    kept = {name: value for name, value in span.attributes.items() if not _is_protected(name)}
    return span.model_copy(update={**changes, "attributes": {**kept, UNTRUSTED: names}}).sealed()


def _is_protected(name: str) -> bool:
    return name in _PROTECTED or name.startswith(_PROTECTED_PREFIXES)


class TokenData(NamedTuple):
    """The tokens of one answer."""

    prompt_token_ids: list[int]
    response_token_ids: list[int]
    logprobs: list[float] | None


def is_llm_call(span: Span) -> bool:
    """Whether a span is a call of a generative model (not of an embedding model, an agent or a tool)."""
    if (generates := says_generating(span)) is not None:
        return generates
    attributes = span.attributes
    if RESPONSE_TOKEN_IDS in attributes or GEN_AI_RESPONSE_ID in attributes:
        return True
    return GEN_AI_REQUEST_MODEL in attributes and GEN_AI_INPUT_MESSAGES in attributes


def says_generating(span: Span) -> bool | None:
    """Whether the operation that a span names generates an answer; None if the span names none."""
    operation = read_attribute(span, GEN_AI_OPERATION_NAME)
    return None if operation is None else isinstance(operation, str) and operation in GENERATING


def is_tool_call(span: Span) -> bool:
    """Whether a span is a tool run."""
    found = (read_attribute(span, GEN_AI_OPERATION_NAME), span.attributes.get("mcp.method.name"))
    return "execute_tool" in found or "tools/call" in found


def read_tool_name(span: Span) -> str | None:
    """Returns the name of the tool that ran."""
    return _read_text(span, GEN_AI_TOOL_NAME)


def read_agent_name(span: Span) -> str | None:
    """Returns the name of the agent, or of the workflow, that a span belongs to; None if the span names none."""
    return _read_text(span, GEN_AI_AGENT_NAME) or _read_text(span, "gen_ai.workflow.name")


def is_gateway_call(span: Span) -> bool:
    """Whether a span is a call of a generative model that the gateway recorded; its spans include tokens."""
    return GATEWAY_COMPLETE in span.attributes and says_generating(span) is not False


def read_response_id(span: Span) -> str | None:
    """Returns the id that the model server gave to its answer."""
    return _read_text(span, GEN_AI_RESPONSE_ID)


def read_model(span: Span) -> str | None:
    """Returns the model that answered, else the requested one."""
    return _read_text(span, GEN_AI_RESPONSE_MODEL) or read_requested_model(span)


def read_requested_model(span: Span) -> str | None:
    """Returns the model that the agent asked for."""
    return _read_text(span, GEN_AI_REQUEST_MODEL)


def read_token_data(span: Span, choice: int = 0) -> TokenData | None:
    """Returns the tokens of the answer with index ``choice``, if they were recorded, and not by an agent itself."""
    return None if UNTRUSTED in span.attributes else _read_tokens(span, choice)


def claims_tokens(span: Span) -> bool:
    """Whether an agent itself claims which tokens were sampled; ``read_token_data`` ignores such a claim."""
    removed = span.attributes.get(UNTRUSTED)
    try:
        return bool(removed) or (removed is not None and _read_tokens(span, 0) is not None)
    except ValueError:
        return True


def _read_tokens(span: Span, choice: int) -> TokenData | None:
    """Reads tokens, trusted or not; raises ValueError if they have another form."""
    attributes: Mapping[str, Any] = span.attributes
    prefix = f"{CHOICE}.{choice}." if choice else ""
    response = attributes.get(prefix + RESPONSE_TOKEN_IDS)
    if response is not None:
        prompt = attributes.get(prefix + PROMPT_TOKEN_IDS)
        if prompt is None:
            prompt = attributes.get(PROMPT_TOKEN_IDS) or ()
        return _to_token_data(prompt, response, attributes.get(prefix + LOGPROBS))
    try:
        raw = read_attribute(span, RAW_ANSWER) or {}
        answers = raw.get("choices") or ()
        if choice >= len(answers) or not answers[choice].get("token_ids"):
            return None
        answer = answers[choice]
        logprobs = (answer.get("logprobs") or {}).get("content")
        return _to_token_data(
            raw.get("prompt_token_ids") or answer.get("prompt_token_ids") or (),
            answer["token_ids"],
            None if logprobs is None else [token["logprob"] for token in logprobs],
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the raw answer is of another form than vLLM's ({type(error).__name__}: {error})") from error


def _to_token_data(prompt: Any, response: Any, logprobs: Any) -> TokenData:
    for ids in (prompt, response):
        if not isinstance(ids, (list, tuple)) or not set(map(type, ids)) <= {int}:
            raise ValueError(f"token ids = {ids!r:.100} are not a list of integers")
        if ids and not (min(ids) >= 0 and max(ids) <= _MAX_TOKEN_ID):
            raise ValueError(f"token ids reach from {min(ids)} to {max(ids)}; they are from 0 to 2**31 - 1")
    if logprobs is not None and not (isinstance(logprobs, list) and set(map(type, logprobs)) <= {int, float}):
        raise ValueError(f"log-probabilities = {logprobs!r:.100} are not a list of numbers")
    if logprobs and not (min(logprobs) >= _MIN_LOGPROB and max(logprobs) <= _ROUNDING):
        raise ValueError(f"log-probabilities reach from {min(logprobs)} to {max(logprobs)}; they are from -1000 to 0")
    return TokenData(list(prompt), list(response), None if logprobs is None else list(logprobs))


def read_finish_reasons(span: Span) -> list[str]:
    """Returns why each answer ended, in OpenAI's terms."""
    value = read_attribute(span, GEN_AI_FINISH_REASONS)
    if isinstance(value, str):
        parsed = parse_json(value)
        value = parsed if isinstance(parsed, list) else [value]
    reasons = value if isinstance(value, list) else ()
    return [_FINISH_REASONS.get(str(reason), str(reason)) for reason in reasons if reason]


def read_input_messages(span: Span) -> list[Message]:
    """Returns the messages of the prompt."""
    messages = _read_messages(span, GEN_AI_INPUT_MESSAGES)
    parts = parse_json(span.attributes.get(GEN_AI_SYSTEM_INSTRUCTIONS))
    if isinstance(parts, list) and not (messages and messages[0].get("role") == "system"):
        return [*_from_parts({"role": "system", "parts": parts}), *messages]
    return messages


def read_output_messages(span: Span) -> list[Message]:
    """Returns the answers: one message per choice."""
    return _read_messages(span, GEN_AI_OUTPUT_MESSAGES)


def read_tools(span: Span) -> list[Message]:
    """Returns the tools that the model could call."""
    tools = parse_json(read_attribute(span, GEN_AI_TOOL_DEFINITIONS))
    return [_to_tool(tool) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []


def find_image_urls(messages: Sequence[Message]) -> list[str]:
    """Returns the URLs of the images in messages, including ``data:`` URLs, in order."""
    return [
        url
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part.get("type") == "image_url" and isinstance(image := part.get("image_url"), dict)
        if isinstance(url := image.get("url"), str)
    ]


def read_links(span: Span) -> list[tuple[str, Any]]:
    """Returns the span's references to others: pairs of an attribute's name and value."""
    return [
        (str(link["key_match"]), link["value_match"])
        for link in read_indexed(span.attributes, LINK)
        if "key_match" in link and "value_match" in link
    ]


def link_attributes(links: Mapping[str, Any]) -> dict[str, Any]:
    """Returns attributes that refer to another span: ``emit_reward(1.0, attributes=link_attributes({...}))``.

    Args:
        links: attributes of that span, such as ``{"gen_ai.response.id": completion.id}``, or its ``span_id`` and
            ``trace_id``. All of them must match.
    """
    pairs = [{"key_match": key, "value_match": value} for key, value in links.items()]
    return {f"{LINK}.{i}.{name}": part for i, pair in enumerate(pairs) for name, part in pair.items()}


def tag_attributes(tags: Sequence[str]) -> dict[str, str]:
    """Returns attributes that tag a span: ``emit_reward(1.0, attributes=tag_attributes(["fast"]))``."""
    return {f"{TAG}.{i}": tag for i, tag in enumerate(tags)}


def read_tags(span: Span) -> list[str]:
    """Returns the span's tags."""
    return [
        str(span.attributes[name]) for i in range(len(span.attributes)) if (name := f"{TAG}.{i}") in span.attributes
    ]


def _read_text(span: Span, name: str) -> str | None:
    value = read_attribute(span, name)
    return str(value) if value else None


def _read_messages(span: Span, name: str) -> list[Message]:
    parsed = parse_json(read_attribute(span, name))
    if not isinstance(parsed, list):
        return []
    return [_repair(message) for item in parsed if isinstance(item, dict) for message in _from_parts(item)]


def _repair(message: Message) -> Message:
    """Gives content and tool calls the types of chat messages, because any program may write spans."""
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if isinstance(role, str) and isinstance(content, str) and calls is None:  # nearly all messages
        return message
    changes: dict[str, Any] = {"role": _text_of(role) or "assistant"}
    if isinstance(content, list):
        changes["content"] = join_texts([_repair_part(part) for part in content])
    elif content is not None:
        changes["content"] = _text_of(content)
    if calls is not None:
        items = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
        functions = [found if isinstance(found := call.get("function"), dict) else {} for call in items]
        changes["tool_calls"] = [
            {**call, "function": {**function, **{key: _text_of(function.get(key)) for key in ("name", "arguments")}}}
            for call, function in zip(items, functions, strict=True)
        ]
    return {**message, **changes}


def _repair_part(part: Any) -> dict[str, Any]:
    if not isinstance(part, dict):
        return {"type": "text", "text": _text_of(part)}
    if part.get("type") == "text" and not isinstance(part.get("text"), str):
        return {**part, "text": _text_of(part.get("text"))}
    return part


def _from_parts(item: Mapping[str, Any]) -> Iterator[Message]:
    """Converts one OpenTelemetry message (role and parts) to chat messages, one more for each tool response."""
    role = item.get("role") or "assistant"
    if "parts" not in item:
        yield {key: value for key, value in item.items() if key != "finish_reason"}
        return
    parts: Sequence[Any] = item["parts"] if isinstance(item["parts"], list) else ()
    if len(parts) == 1 and isinstance(parts[0], dict) and parts[0].get("type") == "text":  # nearly all messages
        yield {"role": role, "content": parts[0].get("content", "")}
        return
    content: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    others: dict[str, str] = {}
    responses = 0
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else "text"
        if kind == "tool_call_response":
            responses += 1
            answer = part.get("response", part.get("result"))
            yield {"role": "tool", "tool_call_id": part.get("id"), "content": _text_of(join_texts(answer))}
        elif kind == "tool_call":
            calls.append(make_tool_call(part.get("id"), part.get("name"), part.get("arguments")))
        elif kind == "text":
            content.append({"type": "text", "text": _text_of(part.get("content") if isinstance(part, dict) else part)})
        elif kind in ("reasoning", "refusal"):
            key = "reasoning_content" if kind == "reasoning" else kind
            others[key] = others.get(key, "") + str(part.get("content") or "")
        elif kind in ("blob", "uri") and part.get("modality") == "image":
            url = part.get("uri") or f"data:{part.get('mime_type')};base64,{part.get('content')}"
            content.append({"type": "image_url", "image_url": {"url": url}})
        else:
            content.append(dict(part))
    if not responses or content or calls:
        yield make_message(role, content, calls, others)


def make_message(role: str, content: Any, calls: list[dict[str, Any]], others: Mapping[str, str]) -> Message:
    """Makes a chat message; ``content`` is text or a list of parts, which becomes text if all parts are text."""
    message: Message = {"role": role, "content": None if content == [] and calls else join_texts(content), **others}
    if calls:
        message["tool_calls"] = calls
    return message


def join_texts(content: Any) -> Any:
    """Returns the content of a chat message as text if it is a list of text parts; anything else is unchanged."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    is_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(map(str, texts)) if is_text else content


def make_tool_call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Makes a tool call in the format of chat messages."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": _text_of(arguments)}}


def _to_tool(tool: dict[str, Any]) -> Message:
    if isinstance(tool.get("function"), dict):
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def read_indexed(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """Collects ``{prefix}.{n}.{path}`` into one nested dict per n, in order."""
    start = prefix + "."
    tree: dict[str, Any] = {}
    for key, value in attributes.items():
        if key.startswith(start):
            *path, leaf = key[len(start) :].split(".", MAX_DEPTH)
            node = tree
            for step in path:
                deeper = node.setdefault(step, {})
                node = deeper if isinstance(deeper, dict) else node
            node[leaf] = value
    return [item for item in listed(tree) if isinstance(item, dict)]


def listed(value: Any) -> list[Any]:
    """Returns the values of a mapping with numbers as keys, in order."""
    keys = [key for key in value if key.isdecimal() and len(key) < 10] if isinstance(value, dict) else []
    return [value[key] for key in sorted(keys, key=int)]


def parse_json(text: Any, default: Any = None) -> Any:
    """Parses JSON; ``default`` for other text, also if it is nested too deeply. Other types are returned unchanged.

    Texts in spans are parsed with this function, because any program may have written them: the value can be walked
    recursively and written as JSON. NaN, lone surrogates and integers of more than 64 bits become text.
    """
    if not isinstance(text, str):
        return text
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            value = thaw(freeze_attributes(parse_lenient(text)))
        except ValueError:
            return default
    return default if text.count("[") + text.count("{") > MAX_DEPTH and is_deep(value) else value


def _text_of(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)
