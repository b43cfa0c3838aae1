"""Evals of OpenAI (API of 2026, openai-python 2.8 to 3.57): data sets, graders of an eval, and results of its runs.

It reads lines of data sets (``{"item": ...}``), evals of ``GET /v1/evals`` (``eval``), and results of
``GET /v1/evals/{id}/runs/{id}/output_items`` (``eval.run.output_item``), which become rollouts. Data sets of the
repository openai/evals, lines of ``input`` and ``ideal``, are tasks too; Phoenix calls ``input`` ``messages``.
"""

from __future__ import annotations

import re
from typing import Any, Final

from agentlightning import semconv
from agentlightning.frozen import to_number
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_plugins.shared.importing import Imported, ImportedRollout

_PYTHON: Final = '''

def reward(task, output, rollout):
    """The grader above, as a reward of Lightning."""
    return grade({"output_text": output, "output_json": None, "choices": [], "output_tools": []}, task)
'''


@hookimpl
def components() -> list[Component]:
    return [
        Component("importer", "openai-evals", f"{__name__}:read", summary="data sets, graders and results of Evals")
    ]


def read(items: list[tuple[str, dict[str, Any]]], imported: Imported) -> None:
    graders: list[dict[str, Any]] = []
    for place, value in items:
        with imported.reading(str(value.get("id", place))):
            if value.get("object") == "eval":
                graders += [_read_grader(each, imported) for each in value["testing_criteria"]]
            elif value.get("object") == "eval.run.output_item":
                _read_result(value, imported)
            elif isinstance(value.get("item"), dict):
                imported.tasks.append(value["item"])
            elif {"input", "ideal"} & value.keys() and "object" not in value:
                imported.tasks.append(value)
            else:
                imported.leave_out(
                    f"neither an eval, an item nor a result, but {value.get('object', 'unknown')!r}", place
                )
    if graders := [each for each in graders if each]:
        reward: Any = {"name": "graders", "graders": graders}
        if len(graders) == 1 and not {"type", "pass_threshold"} & graders[0].keys():
            reward = graders[0] if len(graders[0]) > 1 else graders[0]["name"]
        imported.configuration = {"reward": reward}


def _read_result(value: dict[str, Any], imported: Imported) -> None:
    sample = value["sample"]
    rollout = ImportedRollout(f"{value['run_id']}/{value['id']}", value["datasource_item"])
    error = (sample.get("error") or {}).get("message")
    rollout.error = error or (None if value.get("status") != "error" else "its status was error")
    messages, answers = (
        [{name: part for name, part in each.items() if part is not None} for each in sample[key]]
        for key in ("input", "output")
    )
    answers = [{"content": "", **each, "role": "assistant"} for each in answers]
    attributes = {semconv.GEN_AI_FINISH_REASONS: [sample.get("finish_reason") or ""]}
    about = {"start": value.get("created_at"), "error": error}
    rollout.add_call("call", messages, answers, sample.get("model"), None, attributes, **about)
    for each in value.get("results") or ():
        if (number := to_number(each.get("score"))) is not None:
            rollout.rate("score", number)
    imported.rollouts.append(rollout)


def _read_grader(grader: dict[str, Any], imported: Imported) -> dict[str, Any]:
    """Returns the reward for a testing criterion; empty if there is none."""
    kind, name = grader["type"], str(grader.get("name", "grader"))
    limit = {} if grader.get("pass_threshold") is None else {"pass_threshold": grader["pass_threshold"]}
    if kind == "string_check" or grader.get("evaluation_metric") == "fuzzy_match":
        keys = ("type", "input", "operation", "evaluation_metric", "reference")
        made = {key: grader[key] for key in keys if key in grader}
        if unknown := re.findall(r"\{\{\s*((?!item\.|sample\.output_text\b)[\w.]+)", repr(made)):
            imported.leave_out(f"a grader that reads {', '.join(unknown)}", name)
            return {}
        return made | limit
    if kind in ("score_model", "label_model"):
        texts = [_to_text(each["content"]) for each in grader["input"]]
        if None in texts:
            imported.leave_out("a model grader with images or audio", name)
            return {}
        rubric = re.sub(r"\{\{\s*([\w.]+)\s*\}\}", _describe, "\n\n".join(map(str, texts)))
        low, high = grader.get("range") or (0, 1)
        if kind == "label_model":
            good, known, (low, high) = grader["passing_labels"], grader["labels"], (0, 1)
            rubric += f"\n\nThe labels are {', '.join(known)}. Score 1 for {' or '.join(good)}, and 0 for the others."
        elif low or high != 1:
            rubric += f"\n\nThe score is from {low} to {high}."
        if limit and high != low:  # ours are from 0 to 1
            limit = {"pass_threshold": (limit["pass_threshold"] - low) / (high - low)}
        judge = {"name": "judge", "model": grader["model"], "rubric": rubric, "low": float(low), "high": float(high)}
        return judge | limit
    if kind == "python":
        file = f"grader_{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}.py"
        imported.files[file] = grader["source"].rstrip() + "\n" + _PYTHON
        return {"name": f"{file}:reward"} | limit
    imported.leave_out(f"a grader of the type {kind} ({grader.get('evaluation_metric', 'unknown')})", name)
    return {}


def _describe(match: re.Match[str]) -> str:
    """Returns words for a field that the judge sees beside the rubric."""
    return f"[the field {match[1][5:]} of the task]" if match[1].startswith("item.") else "[the answer]"


def _to_text(content: Any) -> str | None:
    if isinstance(content, dict):
        content = content.get("text")
    if isinstance(content, list):
        parts = [_to_text(part) for part in content]
        return None if None in parts else "\n".join(map(str, parts))
    return content if isinstance(content, str) else None
