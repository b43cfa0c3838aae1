"""Trajectories in ATIF 1.0 to 1.8 (rfcs/0001-trajectory-format.md of Harbor 0.26), and Harbor's results of trials.

A ``result.json`` of a trial rates the ``agent/trajectory.json`` in its folder. ``agl rollouts export --format atif``
is the way back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from agentlightning import semconv
from agentlightning.frozen import to_number
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_plugins.shared.importing import Imported, ImportedRollout, digest

_METRICS: Final = {
    semconv.GEN_AI_INPUT_TOKENS: "prompt_tokens",
    semconv.GEN_AI_OUTPUT_TOKENS: "completion_tokens",
    semconv.PROMPT_TOKEN_IDS: "prompt_token_ids",
    semconv.RESPONSE_TOKEN_IDS: "completion_token_ids",
    semconv.LOGPROBS: "logprobs",
}


@hookimpl
def components() -> list[Component]:
    return [Component("importer", "atif", f"{__name__}:read", summary="trajectories of Harbor, in its format ATIF")]


def read(items: list[tuple[str, dict[str, Any]]], imported: Imported) -> None:
    of_trial: dict[Path, ImportedRollout] = {}
    for place, value in items:
        if str(value.get("schema_version", "")).startswith("ATIF-v1."):
            with imported.reading(place):
                own = value.get("trajectory_id") or digest(json.dumps(value, sort_keys=True), 8)
                rollout = ImportedRollout(own, metadata={"agent": value["agent"]["name"]})
                _read_trajectory(value, rollout, imported)
                of_trial[Path(place).absolute().parent.parent] = rollout
                if rollout.spans:
                    imported.rollouts.append(rollout)
                else:
                    imported.leave_out("a trajectory without a model call", own)
        elif "verifier_result" not in value:
            imported.leave_out(f"no trajectory in ATIF 1, but {value.get('schema_version', 'unknown')!r}", place)
    for place, value in items:
        if "verifier_result" in value:
            with imported.reading(place):
                _read_result(value, of_trial.get(Path(place).absolute().parent), imported, place)


def _read_result(value: dict[str, Any], rated: ImportedRollout | None, imported: Imported, place: str) -> None:
    rewards = (value["verifier_result"] or {}).get("rewards") or {}
    scores = {name: number for name, each in rewards.items() if (number := to_number(each)) is not None}
    if rated is not None and scores and value.get("reward_valid") is not False:
        for name, score in scores.items():
            rated.rate(name, score)
        return
    imported.leave_out("a result of a trial without its trajectory, or without a valid reward", place)
    if rated is not None and value.get("exception_info"):
        rated.error = str(value["exception_info"]["exception_message"])


def _read_trajectory(value: dict[str, Any], rollout: ImportedRollout, imported: Imported, sub: str = "") -> None:
    """Adds the calls of a trajectory and of its subagents."""
    agent = value["agent"]
    messages: list[dict[str, Any]] = []
    for step in value["steps"]:
        message = {"role": step["source"], "content": _to_content(step["message"])}
        if step["source"] == "agent":
            message |= {"role": "assistant"}
            message |= {"reasoning_content": step["reasoning_content"]} if step.get("reasoning_content") else {}
            message |= {"tool_calls": list(map(_to_call, step["tool_calls"]))} if step.get("tool_calls") else {}
            if step.get("llm_call_count") != 0 and not step.get("is_copied_context"):
                attributes = {name: (step.get("metrics") or {}).get(key) for name, key in _METRICS.items()}
                attributes |= {semconv.GEN_AI_AGENT_NAME: agent["name"] if sub else None}
                model, tools = step.get("model_name") or agent.get("model_name"), agent.get("tool_definitions")
                key, start = f"{sub}/{step['step_id']}", step.get("timestamp")
                rollout.add_call(key, messages, [message], model, tools, attributes, start=start)
        messages.append(message)
        results = (step.get("observation") or {}).get("results", ())
        calls = [call["id"] for call in message.get("tool_calls", ())]
        calls = calls if len(calls) == len(results) else [None] * len(results)  # some agents do not name the call
        for result, call in zip(results, calls, strict=True):
            call_id = result.get("source_call_id") or call
            about = {"role": "tool", "tool_call_id": call_id} if call_id else {"role": "user"}
            messages.append({**about, "content": _to_content(result.get("content") or "")})
            for each in result.get("subagent_trajectory_ref") or ():
                if each.get("trajectory_path"):
                    imported.leave_out("a subagent's trajectory in another file", each["trajectory_path"])
    for each in value.get("subagent_trajectories") or ():
        _read_trajectory(each, rollout, imported, f"{sub}/{each['trajectory_id']}")


def _to_call(call: dict[str, Any]) -> dict[str, Any]:
    return semconv.make_tool_call(call["tool_call_id"], call["function_name"], json.dumps(call["arguments"]))


def _to_content(content: Any) -> Any:
    """Converts content to the form of chat messages; raises ValueError for audio, which they cannot name by a path."""
    if isinstance(content, str):
        return content
    if other := {part["type"] for part in content} - {"text", "image"}:
        raise ValueError(f"{', '.join(other)} in a message")
    return [
        part if part["type"] == "text" else {"type": "image_url", "image_url": {"url": part["source"]["path"]}}
        for part in content
    ]
