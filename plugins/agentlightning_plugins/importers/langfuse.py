"""Exports of Langfuse 3: traces, observations and scores.

It reads the files of its blob storage (``observations_v2/``, ``traces/``, ``observations/``, ``scores/``; field
reference of April 2026), the tables that its pages export, and traces of ``GET /api/public/traces``.
"""

from __future__ import annotations

from typing import Any, Final

from agentlightning import semconv
from agentlightning.frozen import to_number
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_plugins.shared.importing import Imported, ImportedRollout, snake_case, to_answers, to_messages

_OPERATIONS: Final = {"TOOL": "execute_tool", "AGENT": "invoke_agent", "EMBEDDING": "embeddings"}


@hookimpl
def components() -> list[Component]:
    return [
        Component("importer", "langfuse", f"{__name__}:read", summary="traces, observations and scores of Langfuse")
    ]


def read(items: list[tuple[str, dict[str, Any]]], imported: Imported) -> None:
    traces: dict[str, dict[str, Any]] = {}
    observations: dict[str, list[dict[str, Any]]] = {}
    scores: dict[str, dict[str, Any]] = {}
    queue = list(items)
    for place, value in queue:
        record = snake_case(value)
        if "data_type" in record or ("value" in record and "type" not in record):
            scores[str(record.get("id", place))] = record
        elif record.get("trace_id") and "type" in record and "id" in record:
            observations.setdefault(record["trace_id"], []).append(record)
        elif "id" in record and "type" not in record:
            traces[record["id"]] = record
            nested = [*(record.get("observations") or ()), *(record.get("scores") or ())]
            queue += [(place, each) for each in nested if isinstance(each, dict)]  # a page of traces has ids only
        else:
            imported.leave_out("neither a trace, an observation nor a score", place)
    rollouts: dict[str, ImportedRollout] = {}
    for trace in {**traces, **observations}:
        found = sorted(observations.get(trace, ()), key=lambda each: str(each.get("start_time")))
        rollout, n_calls = ImportedRollout(trace), 0
        for each in found:
            with imported.reading(each["id"]):
                n_calls += _read_observation(each, rollout, imported)
        roots = [each for each in found if not each.get("parent_observation_id") and each["type"] != "GENERATION"]
        given = [each["input"] for each in (traces.get(trace, {}), *roots) if each.get("input")]
        rollout.task = semconv.parse_json(given[0], given[0]) if given else rollout.task
        if n_calls:
            rollouts[trace] = rollout
            continue
        imported.leave_out("a trace without a model call (its input is a task)", trace)
        imported.tasks += [] if rollout.task is None else [rollout.task]
    for name, score in scores.items():
        number = None if score.get("data_type") == "CATEGORICAL" else to_number(score.get("value"))
        if (rated := rollouts.get(str(score.get("trace_id")))) is None:
            imported.leave_out("a score without its trace", name)
        elif number is None:
            imported.leave_out(f"a score without a number ({score.get('data_type')})", name)
        else:
            rated.scores[str(score.get("name"))] = number
            rated.add_feedback(score.get("comment"))
    imported.rollouts += rollouts.values()


def _read_observation(record: dict[str, Any], rollout: ImportedRollout, imported: Imported) -> int:
    """Adds the span of an observation; returns the number of model calls in it."""
    about = {
        "parent": record.get("parent_observation_id") or None,
        "start": record.get("start_time"),
        "end": record.get("end_time"),
        "error": str(record.get("status_message") or "error") if record.get("level") == "ERROR" else None,
    }
    if record["type"] != "GENERATION":
        attributes = {name: record.get(name) for name in ("input", "output")}
        attributes[semconv.GEN_AI_OPERATION_NAME] = _OPERATIONS.get(record["type"])
        rollout.add(record["id"], str(record.get("name") or record["type"]), attributes, **about)
        return 0
    messages, given = to_messages(record.get("input")), semconv.parse_json(record.get("input"))
    if messages is None:
        imported.leave_out("a generation whose input is not messages", record["id"])
        return 0
    tools = given.get("tools") if isinstance(given, dict) else None
    model = record.get("provided_model_name") or record.get("model")
    rollout.add_call(record["id"], messages, to_answers(record.get("output")), model, tools, {}, **about)
    return 1
