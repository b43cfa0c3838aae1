"""Tool calls in the text of a model, in the form that its chat template writes.

    hermes    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    xml       <tool_call><function=add><parameter=a>1</parameter></function></tool_call>, a tag on each line
    llama     {"name": "add", "parameters": {"a": 1}}, which is the whole answer
    mistral   [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}], or [TOOL_CALLS]add[ARGS]{"a": 1}

The form is found by rendering a conversation with a call: it is the one whose reader returns this call. A call that
cannot be read stays text, and so does everything after it: the inside of a broken call must not be run.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agentlightning.errors import ConfigError

Json: TypeAlias = dict[str, Any]
Call: TypeAlias = tuple[str, str]
"""Name and arguments, as JSON."""
Types: TypeAlias = Mapping[str, Mapping[str, frozenset[str]]]
"""For each tool, the JSON types of its parameters; empty if the tool does not declare them."""
TEMPLATE_ERRORS: Final = (TemplateError, ValueError, TypeError, KeyError)
"""Errors that rendering a chat template raises for messages that it does not accept."""
THINK, END_OF_THOUGHT = "<think>", "</think>"


class ToolFormat(NamedTuple):
    """One form of tool calls."""

    name: str
    tags: tuple[str, ...]
    """The texts with which a call may begin."""
    attempt: re.Pattern[str]
    """A match in the text that is left of an answer is a call that could not be read."""
    read: Callable[[str, int, Types], tuple[list[Call], int]]
    """Reads the calls that begin at a position, and returns their end; raises ValueError if they are malformed."""
    closing: str = ""
    """Ends a call; between a call and the next one, it shows that the call ended too early."""

    def find(self, text: str, at: int, thinks: bool) -> tuple[int, int, bool]:
        """Searches for the first call outside of thoughts, from ``at`` on; ``thinks``: inside of a thought.

        Returns the position of the call or -1, the position up to which the text was searched, and whether this is
        inside of a thought.
        """
        while True:
            if thinks:
                end = text.find(END_OF_THOUGHT, at)
                if end < 0:
                    return -1, len(text), True
                at, thinks = end + len(END_OF_THOUGHT), False
            found = re.compile("|".join(map(re.escape, (THINK, *self.tags)))).search(text, at)
            if found is None or (self.name == "llama" and text[: found.start()].strip()):
                return -1, len(text), False
            if found[0] != THINK:
                return found.start(), found.start(), False
            at, thinks = found.end(), True


def split_calls(
    text: str, form: ToolFormat, tools: Sequence[Json] = (), *, thinks: bool = False
) -> tuple[str, list[Call], int]:
    """Returns the text of an answer, its calls, and the number of calls that seem to begin in the text.

    ``tools`` are the request's; ``thinks``: its prompt ends inside of a thought. White space before a call is
    removed with it, and so is white space after it unless it separates two texts.
    """
    types = _read_types(tools)
    calls: list[Call] = []
    said, end, at = "", 0, 0
    while True:
        start, at, thinks = form.find(text, at, thinks)
        if start < 0:
            break
        try:
            found, at = form.read(text, start, types)
        except ValueError:
            break
        closed = text.find(form.closing, at) if form.closing else -1
        if closed >= 0 and not 0 <= text.find(form.tags[0], at) < closed:
            break
        before = text[end:start].rstrip()
        said += before if said or not calls else before.lstrip()
        calls += found
        end = at
    rest = text[end:]
    if calls:
        rest = "" if not rest.strip() else rest if said else rest.lstrip()
    said += rest
    return said, calls, len(form.attempt.findall(said))


def read_json(text: str, at: int = 0) -> tuple[Any, int]:
    """Reads the JSON value that begins at a position, and returns it with its end.

    Raises:
        ValueError: it is not JSON, or cannot be written as JSON in UTF-8: a number without end, half a character.
    """
    try:
        value, end = _DECODER.raw_decode(text, at)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    return value, end


def parse_object(text: str) -> Json | None:
    """Parses a JSON object; returns None for anything else."""
    text = text.strip()
    try:
        value, end = read_json(text)
    except ValueError:
        return None
    return value if end == len(text) and isinstance(value, dict) else None


def _read_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # Python's parser accepts NaN and Infinity, and reads 1e400 as Infinity
        raise ValueError(f"{text} is not a number in JSON")
    return value


_DECODER: Final = json.JSONDecoder(parse_float=_read_number, parse_constant=_read_number)


def _expect(pattern: str, text: str, at: int) -> re.Match[str]:
    found = re.compile(pattern).match(text, at)
    if found is None:
        raise ValueError(f"{pattern} is missing at {at}")
    return found


def _to_call(value: Any, key: str = "arguments") -> Call:
    if not (isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get(key), dict)):
        raise ValueError("a call has a name and an object of arguments")
    return value["name"], json.dumps(value[key], ensure_ascii=False)


def _read_hermes(text: str, start: int, types: Types) -> tuple[list[Call], int]:
    call, end = read_json(text, _expect(r"<tool_call>\s*", text, start).end())
    return [_to_call(call)], _expect(r"\s*</tool_call>", text, end).end()


_END_OF_VALUE: Final = re.compile(r"\n</parameter>\n(?=<parameter=|</function>)")


def _read_xml(text: str, start: int, types: Types) -> tuple[list[Call], int]:
    head = _expect(r"<tool_call>\s*<function=([^\n]+)>\n", text, start)
    arguments: Json = {}
    at = head.end()
    while text.startswith("<parameter=", at):
        key = _expect(r"<parameter=([^\n]+)>\n", text, at)
        end = _END_OF_VALUE.search(text, key.end() - 1)
        if end is None or key[1] in arguments:
            raise ValueError(f"the parameter {key[1]} has no end, or is given twice")
        value = text[key.end() : end.start()]
        _, opened, inner = value.rpartition("<parameter=")
        if opened and inner.partition("\n")[0].endswith(">") and "\n" in inner and "\n</parameter>" not in inner:
            raise ValueError(f"the parameter {key[1]} ends where a call inside of it ends")
        arguments[key[1]] = _read_value(value, types.get(head[1], {}).get(key[1], frozenset()))
        at = end.end()
    return [_to_call({"name": head[1], "arguments": arguments})], _expect(r"</function>\n</tool_call>", text, at).end()


_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
"""Constants as the template of Qwen3-Coder writes them, in JSON."""
_TYPES: Final[Mapping[type, frozenset[str]]] = {
    bool: frozenset(["boolean"]), int: frozenset(["integer", "number"]), float: frozenset(["number"]),
    list: frozenset(["array"]), dict: frozenset(["object"]), type(None): frozenset(["null"]), str: frozenset(),
}  # fmt: skip
"""The JSON types that a value has; none for a text, which a template writes unchanged."""


def _read_value(text: str, types: frozenset[str]) -> Any:
    """Returns the value of a parameter: a template writes strings unchanged, and other values as JSON."""
    written = _PYTHON.get(text, text)
    try:
        value, end = read_json(written)
    except ValueError:
        value, end = "", 0
    if end == len(written) and (_TYPES[type(value)] & types or not (types or isinstance(value, str))):
        return value
    if types and types <= frozenset().union(*_TYPES.values()):
        raise ValueError(f"{text!r:.100} is not a value of the type {', '.join(types)}")
    return text


def _read_types(tools: Sequence[Json]) -> Types:
    found = {}
    for tool in tools:
        with contextlib.suppress(AttributeError, KeyError, TypeError):  # the schema is another program's
            function = tool["function"]
            properties = function["parameters"]["properties"]
            found[function["name"]] = {name: _types_of(schema) for name, schema in properties.items()}
    return found


def _types_of(schema: Json) -> frozenset[str]:
    """Returns the JSON types of a schema; empty if it does not declare them."""
    declared = schema.get("type") or ()
    options = [_types_of(option) for option in schema.get("anyOf") or schema.get("oneOf") or ()]
    own = frozenset(map(str, [declared] if isinstance(declared, str) else declared))
    return own or (frozenset().union(*options) if all(options) else frozenset())


def _read_llama(text: str, start: int, types: Types) -> tuple[list[Call], int]:
    call, end = read_json(text, _expect(r"\s*(?:<\|python_tag\|>)?\s*", text, start).end())
    if text[end:].strip():
        raise ValueError("text follows the call")
    return [_to_call(call, "parameters")], len(text)


def _read_mistral(text: str, start: int, types: Types) -> tuple[list[Call], int]:
    at = _expect(r"\[TOOL_CALLS\]\s*", text, start).end()
    named = re.compile(r"([^\s\[\]{}]+)(?:\[CALL_ID\][^\s\[\]{}]+)?\[ARGS\]").match(text, at)
    value, end = read_json(text, at if named is None else named.end())
    if named is not None:
        return [_to_call({"name": named[1], "arguments": value})], end
    if not isinstance(value, list) or not value:
        raise ValueError("calls are a list")
    return [_to_call(call) for call in value], end


_TAG: Final = re.compile("<tool_call>")
_LLAMA: Final = re.compile(r'\A\s*(?:<\|python_tag\|>|\{\s*"name"\s*:)')
FORMATS: Final = {
    "hermes": ToolFormat("hermes", ("<tool_call>",), _TAG, _read_hermes, "</tool_call>"),
    "xml": ToolFormat("xml", ("<tool_call>",), _TAG, _read_xml, "</tool_call>"),
    "llama": ToolFormat("llama", ("<|python_tag|>", "{"), _LLAMA, _read_llama),
    "mistral": ToolFormat("mistral", ("[TOOL_CALLS]",), re.compile(r"\[TOOL_CALLS\]"), _read_mistral),
}
_TOKENS: Final = (
    *("<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    *("<tool_call>", "</tool_call>", THINK, END_OF_THOUGHT),
)
"""Texts of the forms that are special tokens of some models."""


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Returns the special tokens that are not part of a call or thought, with their texts."""
    added = tokenizer.added_tokens_decoder.items()
    return {token: each.content for token, each in added if each.special and each.content not in _TOKENS}


def new_call_id() -> str:
    """Returns an id of nine letters and digits, as the templates of Mistral require."""
    return "".join(random.SystemRandom().choices(string.ascii_letters + string.digits, k=9))


_NAME, _KEY, _ID = "probe_tool", "probe_key", "probe0001"


_Probe: TypeAlias = tuple[str, str, int, ToolFormat | None]
"""A conversation with a call, as the template writes it; the conversation before the answer; where the call begins in
the text; and the call's form, None if it is unknown."""


def _probe(tokenizer: PreTrainedTokenizerBase, arguments: Json, *, as_text: bool = False) -> _Probe | None:
    """Renders a conversation with a call; returns None if the template does not write calls.

    ``as_text``: the call's arguments are JSON; some templates do not accept an object.
    """
    parameters = {"type": "object", "properties": {_KEY: {"type": "string", "description": "A text."}}}
    function = {"name": _NAME, "description": "A tool.", "parameters": parameters}
    tools: list[Any] = [{"type": "function", "function": function}]
    given: Json = {_KEY: "a value"}
    call = {"name": _NAME, "arguments": json.dumps(given) if as_text else given}
    user = {"role": "user", "content": "A question."}

    def render(messages: list[Json], generate: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=generate, tokenize=False, **arguments
            )
        )

    try:
        calls = [{"id": _ID, "type": "function", "function": call}]
        text = render([user, {"role": "assistant", "content": "", "tool_calls": calls}], False)
        before, prompt = render([user], False), render([user], True)
    except TEMPLATE_ERRORS:
        return None if as_text else _probe(tokenizer, arguments, as_text=True)
    begin = next((i for i, (one, other) in enumerate(zip(before, text, strict=False)) if one != other), len(before))
    named = text.find(_NAME, begin)
    if named < 0:
        return None
    ends = [end for end in (text.find(special, named) for special in special_tokens(tokenizer).values()) if end >= 0]
    text = text[: min(ends, default=len(text))]
    for form in FORMATS.values():
        for start in sorted({each.start() for tag in form.tags for each in re.finditer(re.escape(tag), text[begin:])}):
            try:
                found, _ = form.read(text, begin + start, {_NAME: {_KEY: frozenset(["string"])}})
            except ValueError:
                continue
            if found == [(_NAME, json.dumps(given))]:
                return text, prompt, begin + start, form
    return text, prompt, begin, None


def find_format(tokenizer: PreTrainedTokenizerBase) -> ToolFormat | None:
    """Returns the form of the calls that the chat template writes; None if it does not write calls.

    Raises:
        ConfigError: the form is unknown.
    """
    probe = _probe(tokenizer, {})
    if probe is None:
        return None
    text, _, start, form = probe
    if form is None:
        raise ConfigError(
            f"the model's chat template writes tool calls in an unknown form, {text[start:]!r:.300}, so the server "
            f"could not read the model's calls. Known forms: {', '.join(FORMATS)}. Use another model, or tool_format: "
            "none if the agent has no tools."
        )
    return form


def begin_call(tokenizer: PreTrainedTokenizerBase, name: str | None, arguments: Json) -> tuple[str, str]:
    """Returns how an answer begins that has to call the tool ``name``, or any tool.

    The first text is what the template writes before a call, such as an empty thought; the second begins the call.

    Raises:
        ValueError: the template does not write a call whose beginning is known.
    """
    probe = _probe(tokenizer, arguments)
    if probe is None or probe[3] is None:
        raise ValueError("the chat template writes no tool calls")
    text, prompt, start, _ = probe
    named, key = text.index(_NAME, start), text.index(_KEY, start)
    if key < named:
        raise ValueError("the chat template writes arguments before the name of the tool")
    if text.startswith(prompt) and start >= len(prompt):
        before = text[len(prompt) : start]
    else:
        before = f"\n{END_OF_THOUGHT}\n\n" if prompt.rstrip().endswith(THINK) else ""
    if name is None:
        return before, text[start:named]
    end = max(text.rfind("{", named, key), text.rfind("<parameter=", named, key))
    if _ID in text[named:end]:  # the answer's call gets an id when it is complete
        end = named + len(_NAME)
    return before, f"{text[start:named]}{name}{text[named + len(_NAME) : end]}".rstrip(" ")


KEEP_THOUGHTS: Final = {"preserve_thinking": True, "clear_thinking": False, "truncate_history_thinking": False}
"""Arguments with which chat templates keep thoughts of earlier turns; a template reads one of them."""


def check_thoughts(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises a ConfigError if the chat template drops thoughts of earlier turns even with ``KEEP_THOUGHTS``."""
    thought = f"{THINK}\nA thought.\n{END_OF_THOUGHT}\n\nAn answer."
    question = {"role": "user", "content": "A question."}
    chat = [question, {"role": "assistant", "content": thought}, question]
    if "A thought." not in str(tokenizer.apply_chat_template(chat, tokenize=False, **KEEP_THOUGHTS)):
        raise ConfigError(
            f"keep_thinking: the model's chat template drops {THINK} blocks of earlier turns, whatever its arguments; "
            "leave keep_thinking out. Each turn is then a row of its own."
        )
