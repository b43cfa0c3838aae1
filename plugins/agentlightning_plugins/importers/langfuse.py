"""Exports of Langfuse 3 and 4: traces, observations, scores and items of data sets.

Read are the files of its blob storage (``observations_v2/``, ``traces/``, ``observations/``, ``scores/``), the tables
of observations and scores that its pages export, and answers of ``GET /api/public/v2/observations``,
``/v3/scores?fields=details,subject``, ``/dataset-items``, and, in Langfuse 3, ``/traces/{id}`` and ``/scores``.
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
    return [Component("importer", "langfuse", f"{__name__}:read", summary="traces, scores and data sets of Langfuse")]


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
        elif record.get("dataset_id") and record.get("status") == "ARCHIVED":
            imported.leave_out("an archived item of a data set", record["id"])
        elif record.get("dataset_id"):
            imported.tasks.append({key: record.get(key) for key in ("input", "expected_output", "metadata")})
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
        roots = [each for each in found if _is_root(each)]
        rollout.error = next(filter(None, map(_read_error, roots)), None)
        roots = [each for each in roots if each["type"] not in ("GENERATION", "EMBEDDING")]
        given = [each["input"] for each in (traces.get(trace, {}), *roots) if each.get("input")]
        rollout.task = _read_task(given[0]) if given else rollout.task
        if n_calls:
            rollouts[trace] = rollout
        else:
            imported.leave_out_trace(trace, rollout.task)
    for name, score in scores.items():
        about = snake_case(score.get("subject") or {})  # of version 3 of the API
        of_trace = score.get("trace_id") or about.get("trace_id") or about.get("id")
        kind, number = score.get("data_type"), to_number(score.get("value"))
        if (rated := rollouts.get(str(of_trace))) is None:
            imported.leave_out("a score without its trace", name)
        elif number is None or kind not in (None, "NUMERIC", "BOOLEAN"):  # the value of a text is 0 in exports
            imported.leave_out(f"a score without a number ({kind})", name)
        else:
            rated.rate(str(score.get("name")), number)
            rated.add_feedback(score.get("comment"))
    imported.rollouts += rollouts.values()


def _read_observation(record: dict[str, Any], rollout: ImportedRollout, imported: Imported) -> int:
    """Adds the span of an observation; returns the number of model calls in it."""
    about = {
        "parent": record.get("parent_observation_id") or None,
        "start": record.get("start_time"),
        "end": record.get("end_time"),
        "error": _read_error(record),
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
    tools = tools or list(map(_read_tool, dict(record.get("tool_definitions") or {}).items()))
    model = record.get("provided_model_name") or record.get("model")
    usage = dict(record.get("usage_details") or {})  # pairs in Parquet, as the tools are
    attributes = {semconv.GEN_AI_INPUT_TOKENS: usage.get("input"), semconv.GEN_AI_OUTPUT_TOKENS: usage.get("output")}
    rollout.add_call(record["id"], messages, to_answers(record.get("output")), model, tools, attributes, **about)
    return 1


def _is_root(record: dict[str, Any]) -> bool:
    return bool(record.get("is_root_observation")) or not record.get("parent_observation_id")


def _read_task(value: Any) -> Any:
    """Reads the input of a trace; that of a function with ``@observe`` is its only argument, or the named ones."""
    task = semconv.parse_json(value, value)
    if isinstance(task, dict) and task.keys() == {"args", "kwargs"}:
        match task["args"], task["kwargs"]:
            case [only], {} as named if not named:
                return only
            case [], dict(named):
                return named
    return task


def _read_error(record: dict[str, Any]) -> str | None:
    return str(record.get("status_message") or "error") if record.get("level") == "ERROR" else None


def _read_tool(tool: tuple[str, str]) -> dict[str, Any]:
    """Reads a tool of the export: its name, and JSON of the rest, whose parameters are JSON again."""
    about = semconv.parse_json(tool[1], {})
    return {**about, "name": tool[0], "parameters": semconv.parse_json(about.get("parameters"), {})}
