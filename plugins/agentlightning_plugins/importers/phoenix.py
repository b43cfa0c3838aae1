"""Traces, annotations and data sets of Phoenix 20 (arize-phoenix-client 3.5), with the attributes of OpenInference.

Read are JSON of ``GET /v1/projects/{project}/spans``, ``.../span_annotations`` and ``.../trace_annotations``, the rows
of the client's data frames, saved as Parquet or JSON lines, and ``GET /v1/datasets/{id}/jsonl``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentlightning import semconv
from agentlightning.frozen import to_number
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_plugins.shared.importing import Imported, ImportedRollout


@hookimpl
def components() -> list[Component]:
    return [
        Component("importer", "phoenix", f"{__name__}:read", summary="traces, annotations and data sets of Phoenix")
    ]


def read(items: list[tuple[str, dict[str, Any]]], imported: Imported) -> None:
    rows: list[tuple[str, dict[str, Any]]] = []
    for place, value in items:
        if value.keys() >= {"node_id", "input", "output"}:
            imported.tasks.append({key: value.get(key) for key in ("input", "output", "metadata")})
        else:
            rows.append((place, dict(_flatten(value))))
    rollouts: dict[str, ImportedRollout] = {}
    rated: dict[str, ImportedRollout] = {}
    for place, row in sorted(rows, key=lambda each: str(each[1].get("start_time"))):
        if "context.span_id" in row:
            with imported.reading(place):
                rollout = rollouts.setdefault(row["context.trace_id"], ImportedRollout(row["context.trace_id"]))
                attributes = {key[11:]: value for key, value in row.items() if key.startswith("attributes.")}
                attributes |= {"openinference.span.kind": row["span_kind"]} if "span_kind" in row else {}
                error = str(row.get("status_message") or "error") if row.get("status_code") == "ERROR" else None
                times = row.get("start_time"), row.get("end_time")
                own, parent = row["context.span_id"], row.get("parent_id") or None
                rollout.add(own, str(row["name"]), attributes, parent, *times, error)
                rated |= {own: rollout, rollout.source_id: rollout}
                if parent is None:
                    rollout.error = rollout.error or error
                    if rollout.task is None and row.get("span_kind") not in ("LLM", "EMBEDDING"):
                        rollout.task = semconv.parse_json(attributes.get("input.value"), attributes.get("input.value"))
    annotations = {str(row.get("id", place)): row for place, row in rows if "context.span_id" not in row}
    for name, row in annotations.items():
        score, about = to_number(row.get("result.score")), str(row.get("span_id", row.get("trace_id")))
        if not any(key.startswith("result.") for key in row):
            imported.leave_out("no span, annotation or example of a data set", name)
        elif about not in rated:
            imported.leave_out("an annotation without its span or trace", name)
        else:
            rated[about].add_feedback(row.get("result.explanation"))
            if score is not None:
                rated[about].rate(str(row.get("annotation_name", row.get("name"))), score)
            elif "result.label" in row:
                imported.leave_out("an annotation without a score, only with a label", name)
    for trace, rollout in rollouts.items():
        calls = [span for span in rollout.spans if semconv.is_llm_call(span)]
        if rollout.task is None and calls:
            rollout.task = {"messages": semconv.read_input_messages(calls[0])}
        if calls:
            imported.rollouts.append(rollout)
            continue
        imported.leave_out_trace(trace, rollout.task)


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted names and values, as OpenInference names attributes: rows of a data frame have nested ones."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, dict) for each in value)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flatten(each, f"{prefix}.{key}" if prefix else str(key))
    elif value is not None:
        yield prefix, value
