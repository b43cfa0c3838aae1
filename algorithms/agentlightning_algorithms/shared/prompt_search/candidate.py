"""Candidates: sets of prompts with their lineage and scores.

An edit of a prompt must keep all of its placeholders, such as ``{question}``, and add no others.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import string
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import AfterValidator, Field

from agentlightning.errors import ConfigError
from agentlightning.frozen import FrozenDict
from agentlightning.resources import PromptTemplate, Resource

CANDIDATE_NAME: Final = "prompt_candidate"
"""The resource name of this record in a candidate's snapshot."""


class Candidate(Resource):
    """One set of prompts with its lineage and scores, stored next to the prompts in a snapshot of resources."""

    resource_type: Literal["prompt_candidate"] = "prompt_candidate"
    candidate_id: str
    """A hash of the prompts."""
    prompts: Annotated[dict[str, PromptTemplate], AfterValidator(FrozenDict)] = Field(repr=False)
    """The tuned prompts by resource name."""
    round: int = 0
    """The round that made it; 0 for the seed."""
    parent_id: str | None = None
    """The candidate that was edited."""
    edited: tuple[str, ...] = ()
    """The names of the prompts that differ from the parent's."""
    critique: str | None = Field(default=None, repr=False)
    """The critique that the edit answers."""
    batch_score: float | None = None
    """Mean reward over the validation tasks that it ran on."""
    full_score: float | None = None
    """Mean reward over all validation tasks of the search; None if the candidate was not run on all of them."""
    task_scores: tuple[float, ...] = Field(default=(), repr=False)
    """The rewards behind ``full_score``, in the order of the validation tasks."""

    @classmethod
    def of(cls, prompts: Mapping[str, PromptTemplate], parent: Candidate | None = None, **fields: object) -> Candidate:
        """Makes a candidate of these prompts."""
        text = json.dumps({name: [prompt.engine, prompt.template] for name, prompt in sorted(prompts.items())})
        edited = () if parent is None else tuple(n for n, prompt in prompts.items() if prompt != parent.prompts[n])
        data = {
            "candidate_id": hashlib.blake2b(text.encode(), digest_size=6).hexdigest(),
            "prompts": dict(prompts),
            "parent_id": None if parent is None else parent.candidate_id,
            "edited": edited,
            **fields,
        }
        return cls.model_validate(data)

    @property
    def score(self) -> float | None:
        """The score over the whole validation set, else over a batch of it."""
        return self.batch_score if self.full_score is None else self.full_score

    def prompt_name(self, name: str | None = None) -> str:
        """Returns the name of a prompt; ``name`` may be None if there is only one prompt."""
        names = ", ".join(sorted(self.prompts))
        if name is None and len(self.prompts) > 1:
            raise ConfigError(f"{len(self.prompts)} prompts are tuned; name one of: {names}")
        if name is not None and name not in self.prompts:
            raise ConfigError(f"no prompt {name!r} is tuned; the tuned prompts are {names}")
        return name if name is not None else next(iter(self.prompts))

    def diff(self, older: Candidate) -> str:
        """A unified diff of every prompt from an older candidate; empty when they are equal."""
        changes: list[str] = []
        for name, prompt in self.prompts.items():
            before, after = older.prompts[name].template.splitlines(), prompt.template.splitlines()
            labels = f"{name} ({older.candidate_id})", f"{name} ({self.candidate_id})"
            changes += difflib.unified_diff(before, after, *labels, lineterm="", n=99)
        return "\n".join(changes)


def has_caught_up(history: Sequence[Candidate], best: Candidate, earlier: Candidate) -> bool:
    """Whether a resumed search has scored the earlier best candidate again, or found a better one."""
    known = {each.candidate_id: each.score for each in history}
    is_better = best.score is not None and (earlier.score is None or best.score > earlier.score)
    return is_better or known.get(earlier.candidate_id) is not None


def choose_prompts(
    resources: Mapping[str, Resource], wanted: Sequence[str] | None, *, skip_untunable: bool = False
) -> dict[str, PromptTemplate]:
    """Returns the prompts to tune: all prompts, or those named in ``wanted``.

    With ``skip_untunable``, prompts that cannot be tuned are skipped if others remain.
    """
    known = {name: value for name, value in resources.items() if isinstance(value, PromptTemplate)}
    if not known:
        raise ConfigError(
            "there is no prompt to tune: give one as in Trainer(initial_resources={'prompt': 'Answer: {question}'}); "
            f"resources: {', '.join(sorted(resources)) or 'none'}"
        )
    if wanted is not None and (not wanted or any(name not in known for name in wanted)):
        raise ConfigError(f"prompts = {list(wanted)}: the prompts of this run are {', '.join(sorted(known))}")
    chosen = {name: known[name] for name in (sorted(known) if wanted is None else wanted)}
    errors: dict[str, ConfigError] = {}
    for name, prompt in chosen.items():
        try:
            find_placeholders(prompt)
        except ConfigError as error:
            errors[name] = error
    if errors and (not skip_untunable or len(errors) == len(chosen)):
        name, cause = next(iter(errors.items()))
        raise ConfigError(f"prompt {name!r}: {cause}") from cause
    return {name: prompt for name, prompt in chosen.items() if name not in errors}


def find_placeholders(prompt: PromptTemplate) -> frozenset[str]:
    """Returns the names of a prompt's placeholders; raises ConfigError if the prompt cannot be tuned."""
    if prompt.engine == "poml":
        raise ConfigError(
            "a prompt of engine 'poml' cannot be tuned, because POML runs JavaScript and a model would write it; use "
            "'jinja' or 'f-string', or name the other prompts in `prompts`"
        )
    if prompt.engine == "f-string":
        return frozenset(field.name for field in _fields(prompt.template))
    from jinja2 import TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        return frozenset(meta.find_undeclared_variables(ImmutableSandboxedEnvironment().parse(prompt.template)))
    except TemplateError as error:
        raise ConfigError(f"not a jinja template: {error}") from error


def show_text(prompt: PromptTemplate) -> str:
    """Returns the prompt as models read and edit it; ``fit`` converts it back.

    An f-string is shown with single braces, as the agent's model sees it: a model that reads ``{{"a": 1}}`` answers
    with either form of JSON. The template is shown unchanged if single braces would turn a literal brace into a
    placeholder, as in ``{{question}} {question}``.
    """
    plain = _unescape(prompt)
    return prompt.template if plain is None else plain


def fit(text: str, original: PromptTemplate) -> PromptTemplate:
    """Converts an edited ``show_text(original)`` to a template with the placeholders of the original.

    The white space around the original is kept. In an f-string that was shown with single braces, braces around
    anything but a placeholder are literal, as in an example of JSON. An answer that nevertheless doubles all its
    literal braces is read as a template.

    Raises:
        ConfigError: a placeholder is missing or new, or the text is not a template.
    """
    shown = show_text(original)
    body = shown.strip()
    start = shown.index(body)
    text = shown[:start] + text.strip() + shown[start + len(body) :]
    wanted = find_placeholders(original)
    plain = _unescape(original)
    if plain is not None and not ("{{" not in plain and "{{" in text and _is_template(text, original)):
        text = _escape(text, _tokens(original))
    edited = original.model_copy(update={"template": text})
    found = find_placeholders(edited)
    if missing := wanted - found:
        raise ConfigError(f"it lost the placeholders {_show(original, missing)}")
    if unknown := found - wanted:
        raise ConfigError(f"it has unknown placeholders {_show(original, unknown)}")
    return edited


def show_placeholders(prompt: PromptTemplate) -> str:
    """The placeholders as they are written in the prompt."""
    return _show(prompt, find_placeholders(prompt)) or "none"


def _show(prompt: PromptTemplate, names: frozenset[str]) -> str:
    left, right = ("{", "}") if prompt.engine == "f-string" else ("{{ ", " }}")
    return ", ".join(f"{left}{name}{right}" for name in sorted(names))


def _unescape(prompt: PromptTemplate) -> str | None:
    """An f-string with single braces; None for another engine, or if it could not be read back."""
    if prompt.engine != "f-string":
        return None
    parts = _parts(prompt.template)
    plain = "".join(part.text if isinstance(part, _Field) else part for part in parts)
    return plain if _parts(_escape(plain, _tokens(prompt))) == parts else None


def _is_template(text: str, original: PromptTemplate) -> bool:
    """Whether a text is an f-string with the placeholders of the original."""
    try:
        fields = _fields(text)
    except ConfigError:
        return False
    tokens = _tokens(original)
    return {each.name for each in fields} == find_placeholders(original) and all(each.text in tokens for each in fields)


class _Field(NamedTuple):
    """A placeholder of an f-string."""

    name: str
    text: str
    """How it is written, with its format."""


def _fields(template: str) -> list[_Field]:
    return [part for part in _parts(template) if isinstance(part, _Field)]


def _parts(template: str) -> list[str | _Field]:
    """The literal texts and the placeholders of an f-string, in order."""
    parts: list[str | _Field] = [""]
    try:
        for literal, name, spec, conversion in string.Formatter().parse(template):
            last = parts[-1]
            if isinstance(last, str):
                parts[-1] = last + literal
            if name is not None:
                form = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
                parts += [_Field(name, f"{{{name}{form}}}"), ""]
    except ValueError as error:
        raise ConfigError(f"not a template: {error}; write {{{{ for a literal brace") from error
    for part in parts:
        if isinstance(part, _Field) and not part.name.isidentifier():
            raise ConfigError(f"not a template: {{{part.name}}} is not a plain name; write {{{{ for a literal brace")
    return parts


def _tokens(prompt: PromptTemplate) -> set[str]:
    """How the placeholders of an f-string may be written: as in the prompt, or without their format."""
    return {text for field in _fields(prompt.template) for text in (field.text, f"{{{field.name}}}")}


def _escape(text: str, tokens: Collection[str]) -> str:
    """Doubles every brace except in placeholders."""
    pattern = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
    return re.sub(rf"({pattern or '(?!)'})|[{{}}]", lambda match: match[1] or match[0] * 2, text)
