"""Spans and annotations of Phoenix (arize-phoenix-client 3.5), whose attributes follow OpenInference.

It reads the JSON of ``GET /v1/projects/{project}/spans`` and ``.../span_annotations``, and the rows of
``get_spans_dataframe()`` and ``get_span_annotations_dataframe()``, saved as Parquet or JSON lines.
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
    return [Component("importer", "phoenix", f"{__name__}:read", summary="spans and annotations of Phoenix")]


def read(items: list[tuple[str, dict[str, Any]]], imported: Imported) -> None:
    rows = [(place, dict(_flatten(value))) for place, value in items]
    rollouts: dict[str, ImportedRollout] = {}
    of_span: dict[str, ImportedRollout] = {}
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
                of_span[own] = rollout
                if parent is None and rollout.task is None:
                    rollout.task = semconv.parse_json(attributes.get("input.value"), attributes.get("input.value"))
    for place, row in rows:
        score, rated = to_number(row.get("result.score")), of_span.get(str(row.get("span_id")))
        if "context.span_id" in row:
            continue
        if rated is None:
            imported.leave_out("an annotation without its span" if "span_id" in row else "no span or annotation", place)
        elif score is None:
            imported.leave_out("an annotation without a score, only with a label", row.get("id", place))
        else:
            rated.scores[str(row.get("annotation_name", row.get("name")))] = score
            rated.add_feedback(row.get("result.explanation"))
    for trace, rollout in rollouts.items():
        calls = [span for span in rollout.spans if semconv.is_llm_call(span)]
        if rollout.task is None and calls:
            rollout.task = {"messages": semconv.read_input_messages(calls[0])}
        if calls:
            imported.rollouts.append(rollout)
            continue
        imported.leave_out("a trace without a model call (its input is a task)", trace)
        imported.tasks += [] if rollout.task is None else [rollout.task]


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted names and values, as OpenInference names attributes: rows of a data frame have nested ones."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, dict) for each in value)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flatten(each, f"{prefix}.{key}" if prefix else str(key))
    elif value is not None:
        yield prefix, value
