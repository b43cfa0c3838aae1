"""`agl import`: files of other tools become rollouts and tasks, once, and what has no equivalent is named."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai.types as openai_types
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionStoreMessage
from openai.types.evals.runs import OutputItemListResponse
from pydantic import BaseModel

import agentlightning as agl
from agentlightning import semconv
from agentlightning.plugin.registry import get_manager
from agentlightning.reward import find_feedback
from agentlightning.types import Span
from agentlightning_plugins.rewards.graders import Graders
from agentlightning_plugins.shared.chat_history import PreferencePair, select_examples, select_pairs
from agentlightning_plugins.shared.configuration.sources import load_dataset
from agentlightning_plugins.shared.importing import to_answers, to_messages
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest
from tests.algorithms.prompt_lab import Server, client, is_critic
from tests.plugins.commands.agl_here import Said, run_here

SAMPLES = Path(__file__).parent / "samples"
"""Files as the tools write them.

``phoenix/`` was written by Phoenix 20.26.1 on 27 November 2026, for calls of the openai client to our scripted server
that openinference-instrumentation-openai 0.1.66 recorded; only some traces and the stacks of exceptions were taken out.
Those of Langfuse and OpenAI are written by hand and have the fields and types of langfuse 3.15 (``trace.json``) and
5.0.4 (``observations_api.json``, ``scores_v3.json``, ``dataset_items.json``), of the reference of Langfuse's exports,
and of openai 3.57. The models of Harbor 0.26 wrote ``trial/result.json``, and accept the trajectories of ATIF 1.
"""
OF_STORED_COMPLETIONS = {
    "frequency_penalty", "input_user", "metadata", "presence_penalty", "request_id", "response_format", "seed",
    "temperature", "tool_choice", "tools", "top_p",
}  # fmt: skip
"""Fields of stored completions, in the API's own example, that the type of all completions lacks."""
ROLLOUT = agl.Rollout(rollout_id="ro-1", input={}, start_time=0.0)


def run_import(folder: Path, form: str, *files: str, code: int = 0, options: tuple[str, ...] = ()) -> Said:
    paths = [str(SAMPLES / file) for file in files]
    said = run_here(folder, "import", form, *paths, "--store", "runs/it", *options)
    assert said.code == code, said
    return said


def import_json(folder: Path, form: str, *files: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run_import(folder, form, *files, options=("--json", *options)).stdout)
    return result


def named(result: dict[str, Any]) -> dict[str, int]:
    """Returns the number of items left out by reason."""
    for each in result["left_out"]:
        assert each["count"] == len(each["items"])
    return {each["reason"]: each["count"] for each in result["left_out"]}


def read_all(folder: Path) -> list[tuple[Any, list[Span]]]:
    """Returns each rollout with its spans, in the order of their tasks."""

    async def read() -> list[tuple[Any, list[Span]]]:
        store = agl.create_store(str(folder / "runs" / "it"))
        found = [(each, list(await store.query_spans(each.rollout_id))) for each in await store.query_rollouts()]
        await store.close()
        return sorted(found, key=lambda each: each[0].metadata["source_id"])

    return asyncio.run(read())


def examples(folder: Path) -> list[Any]:
    async def read() -> list[Any]:
        store = agl.create_store(str(folder / "runs" / "it"))
        found = [each.model_dump() async for each in select_examples(store)]
        await store.close()
        return found

    return asyncio.run(read())


def pairs(folder: Path) -> list[PreferencePair]:
    async def read() -> list[PreferencePair]:
        store = agl.create_store(str(folder / "runs" / "it"))
        found = [each async for each in select_pairs(store)]
        await store.close()
        return found

    return asyncio.run(read())


@pytest.mark.parametrize(
    ("form", "files", "options"),
    [
        ("openai-stored-completions", ("completions.json", "messages.json"), ("--reward", "quality")),
        ("langfuse", ("observations_v2.jsonl", "observations_v2.jsonl", "scores.jsonl"), ()),
        ("phoenix", ("phoenix/spans.json", "phoenix/spans.json", "phoenix/span_annotations.json"), ()),
        ("openai-evals", ("output_items.json",), ()),
        ("atif", ("trial/agent/trajectory.json", "trial/result.json"), ()),
    ],
    ids=["openai-stored-completions", "langfuse", "phoenix", "openai-evals", "atif"],
)
def test_what_was_imported_once_is_not_imported_again(
    tmp_path: Path, form: str, files: tuple[str, ...], options: tuple[str, ...]
) -> None:
    first = import_json(tmp_path, form, *files, options=options)
    before = read_all(tmp_path)
    again = import_json(tmp_path, form, *files, options=options)
    assert first["rollouts"] == again["known"] > 0
    assert first["known"] == again["rollouts"] == 0
    assert read_all(tmp_path) == before
    assert any(rollout.attempt.reward is not None for rollout, _ in before)
    assert all(any(map(semconv.is_llm_call, spans)) for _, spans in before)
    assert all(len({span.span_id for span in spans}) == len(spans) for _, spans in before), "also from two equal files"


def unknown_fields(value: object) -> Iterator[str]:
    """Yields the names of the fields in a parsed answer that the package of the API does not know."""
    if isinstance(value, BaseModel):
        yield from value.__pydantic_extra__ or {}
        for name in type(value).model_fields:
            yield from unknown_fields(getattr(value, name))
    for each in value if isinstance(value, list) else ():
        yield from unknown_fields(each)


def test_the_samples_of_openai_have_the_fields_and_types_of_its_package() -> None:
    def read(name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads((SAMPLES / name).read_text())["data"]
        return rows

    completions = [ChatCompletion.model_validate(row, strict=True) for row in read("completions.json")]
    assert set(unknown_fields(completions)) <= OF_STORED_COMPLETIONS
    rows = [{**row, "role": "assistant"} for row in read("messages.json")]  # the type knows no other role
    messages = [ChatCompletionStoreMessage.model_validate(row, strict=True) for row in rows]
    assert set(unknown_fields(messages)) == {"name"}, "also in the API's own example"
    rows = read("output_items.json")
    for row in rows:
        assert row["sample"]["error"] is None, "as in the API's own example; the type wants an object"
        row["sample"]["error"] = {"code": "", "message": ""}
    found = set(unknown_fields([OutputItemListResponse.model_validate(row, strict=True) for row in rows]))
    assert found <= {"tool_call_id", "tool_calls", "function_call", "type"}, "also in the API's own example"
    made = openai_types.EvalRetrieveResponse.model_validate(json.loads((SAMPLES / "eval.json").read_text()))
    assert not set(unknown_fields(made))


def test_stored_completions_become_pairs_for_dpo_and_examples_for_sft(tmp_path: Path) -> None:
    result = import_json(
        tmp_path, "openai-stored-completions", "completions.json", "messages.json", options=("--reward", "quality")
    )
    assert named(result) == {
        "a completion without its messages (GET .../ID/messages has them)": 1,
        "messages without their completion": 1,
    }
    assert result["left_out"][0]["items"] == ["chatcmpl-3"]
    (pair,) = pairs(tmp_path)
    assert [each[0].messages[-1]["content"] for each in (pair.chosen, pair.rejected)] == ["moo", "quack"]
    assert examples(tmp_path)[0] == {
        "messages": [{"role": "user", "content": "What do you say?"}, {"role": "assistant", "content": "moo"}]
    }
    said = run_import(tmp_path, "openai-stored-completions", "completions.json", "messages.json")
    assert "none has a reward" in said.stdout
    run_import(tmp_path, "openai-stored-completions", "completions.json", "messages.json", options=("--reward", "0.5"))
    assert [rollout.attempt.reward for rollout, _ in read_all(tmp_path)] == [0.5, 0.5], "the later choice counts"


def test_traces_of_langfuse_keep_their_tree_scores_and_comments(tmp_path: Path) -> None:
    result = import_json(tmp_path, "langfuse", "observations_v2.jsonl", "scores.jsonl", "trace.json")
    assert named(result) == {
        "a generation whose input is not messages": 1,
        "a trace without a model call (its input is a task)": 1,
        "a score without a number (CATEGORICAL)": 1,
        "a score without a number (TEXT)": 1,
        "a score without its trace": 1,
    }
    assert result["tasks"] == 3, "cow, pig and dog"
    (cow, spans), (_, others), (dog, _) = read_all(tmp_path)
    assert (cow.input, cow.attempt.reward) == ({"animal": "cow"}, 1.0)
    assert (dog.input, dog.attempt.reward) == ({"animal": "dog"}, 0.5)
    agent, first, tool, second, feedback, _ = spans
    assert first.parent_id == tool.parent_id == second.parent_id == agent.span_id
    assert semconv.is_tool_call(tool)
    assert [semconv.read_tools(each)[0]["function"]["name"] for each in (first, second)] == ["look", "look"]
    assert semconv.read_tools(second)[0]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert semconv.read_attribute(second, semconv.GEN_AI_OUTPUT_TOKENS) == 2
    assert semconv.read_output_messages(second) == [{"role": "assistant", "content": "moo"}]
    assert first.start_time == pytest.approx(1780062381.963), "the time in UTC"
    assert [each.text for each in find_feedback([feedback])] == ["a cow says moo"]
    assert [each.status.description for each in others if each.status.status_code == "ERROR"] == ["no such tool"]
    (pair,) = pairs(tmp_path)
    assert [message["role"] for message in pair.chosen[0].messages] == ["user", "assistant", "tool", "assistant"]
    assert pair.rejected[0].messages[-1]["content"] == "quack"


def test_parquet_of_langfuse_has_its_maps_as_pairs(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [json.loads(line) for line in (SAMPLES / "observations_v2.jsonl").read_text().splitlines()]
    table = pyarrow.Table.from_pylist([{**row, "metadata": None, "cost_details": None} for row in rows])
    maps = {"usage_details": pyarrow.int64(), "tool_definitions": pyarrow.string()}
    for name, kind in maps.items():
        column = pyarrow.array([list(row[name].items()) for row in rows], pyarrow.map_(pyarrow.string(), kind))
        table = table.set_column(table.schema.get_field_index(name), name, column)
    parquet.write_table(table, tmp_path / "observations.parquet")
    import_json(tmp_path, "langfuse", "observations_v2.jsonl")
    other = tmp_path / "other"
    other.mkdir()
    import_json(other, "langfuse", str(tmp_path / "observations.parquet"))
    one, two = (
        [[(span.name, span.attributes) for span in spans] for _, spans in read_all(folder)]
        for folder in (tmp_path, other)
    )
    assert one == two


def test_answers_of_langfuses_api_become_rollouts_and_items_of_data_sets_tasks(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    files = ("observations_api.json", "scores_v3.json", "dataset_items.json")
    result = import_json(tmp_path, "langfuse", *files, options=("--tasks", str(tasks)))
    assert named(result) == {
        "an archived item of a data set": 1,
        "a score without a number (CORRECTION)": 1,
        "a score without its trace": 2,
    }
    ((hen, spans),) = read_all(tmp_path)
    assert (hen.status, hen.attempt.error.message) == ("failed", "ValueError: no voice")
    assert (hen.input, hen.attempt.reward) == ({"animal": "hen"}, 0.75), "the mean of its two scores"
    assert [semconv.read_attribute(span, semconv.GEN_AI_REQUEST_MODEL) for span in spans[:2]] == [None, "gpt-4o"]
    assert [json.loads(line) for line in tasks.read_text().splitlines()] == [
        {"animal": "hen"},
        {"input": {"animal": "cow"}, "expected_output": "moo", "metadata": None},
    ]


CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
CALLED = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
SAID = {"id": "m", "type": "message", "content": [{"type": "output_text", "text": "moo", "annotations": []}]}


@pytest.mark.parametrize(
    ("given", "messages", "answer"),
    [
        ("5", [("user", "5", None)], "42"),
        ({"messages": [{"role": "user", "content": "Hi"}], "tools": []}, [("user", "Hi", None)], '{"animal": "cow"}'),
        (
            {"input": [{"role": "user", "content": "Hi"}, SAID | {"role": "assistant"}, CALL]},
            [("user", "Hi", None), ("assistant", "moo", [CALLED])],
            "moo",
        ),
        (
            [
                {"type": "reasoning", "summary": []},
                CALL,
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            [("assistant", None, [CALLED]), ("tool", "x", None)],
            "moo",
        ),
        ({"prompt": 7}, None, ""),
    ],
    ids=["number", "chat", "responses", "tool", "others"],
)
def test_inputs_and_outputs_that_langfuses_sdk_records_are_read(
    given: Any, messages: list[tuple[str, str | None, Any]] | None, answer: str
) -> None:
    for form in (given, given if isinstance(given, str) else json.dumps(given)):
        found = to_messages(form)
        read = found and [(each["role"], each["content"], each.get("tool_calls")) for each in found]
        assert read == messages
    assert to_answers(answer) == ([{"role": "assistant", "content": answer}] if answer else [])
    assert [each["content"] for each in to_answers(json.dumps(SAID))] == ["moo"]
    assert to_answers([CALL]) == [{"role": "assistant", "content": None, "tool_calls": [CALLED]}]


def test_what_phoenix_recorded_becomes_rollouts_with_tools_scores_and_comments(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    names = ("spans.json", "span_annotations.json", "trace_annotations.json", "dataset.jsonl")
    files = [f"phoenix/{name}" for name in names]
    result = import_json(tmp_path, "phoenix", *files, options=("--reward", "correctness", "--tasks", str(tasks)))
    assert named(result) == {
        "an annotation without its span or trace": 1,
        "an annotation without a score, only with a label": 1,
        "a trace without a model call (its input is a task)": 1,
        "a trace without a model call": 1,
    }
    (failed, _), (cow, spans), (turns, (streamed,)), (duck, others) = read_all(tmp_path)
    assert (failed.status, failed.attempt.error.message) == (
        "failed",
        "BadRequestError: Error code: 400 - the model refuses",
    )
    assert (cow.input, cow.attempt.reward, duck.input, duck.attempt.reward) == ("cow", 1.0, "cow", 0.0)
    agent, first, tool, second, *_ = spans
    assert first.parent_id == tool.parent_id == second.parent_id == agent.span_id
    assert semconv.is_tool_call(tool)
    assert semconv.read_output_messages(first)[0]["tool_calls"][0]["function"]["arguments"] == '{"at": "picture"}'
    assert {each.text for each in find_feedback(spans)} == {"a cow says moo", "short"}
    assert [each.text for each in find_feedback(others)] == ["look again"], "a note"
    (pair,) = pairs(tmp_path)
    roles = [message["role"] for message in pair.chosen[0].messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert examples(tmp_path)[0]["tools"][0]["function"]["name"] == "look"
    said = ["Hello!", "Hello.", "And what do you say?"]
    assert [message["content"] for message in semconv.read_input_messages(streamed)] == said
    assert semconv.read_output_messages(streamed) == [{"role": "assistant", "content": "moo"}]
    assert [message["role"] for message in turns.input["messages"]] == ["user", "assistant", "user"]
    written = [json.loads(line) for line in tasks.read_text().splitlines()]
    assert written[2] == {"input": {"animal": "cow"}, "output": {"says": "moo"}, "metadata": {"legs": 4}}
    assert written[-1] == "hello"
    assert import_json(tmp_path, "openai-evals", "phoenix/dataset_openai_evals.jsonl")["tasks"] == 2


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_data_frames_of_phoenixs_client_have_the_conversations_of_its_api(tmp_path: Path, form: str) -> None:
    import_json(tmp_path, "phoenix", f"phoenix/spans.{form}")
    other = tmp_path / "other"
    other.mkdir()
    import_json(other, "phoenix", "phoenix/spans.json")
    api = {rollout.metadata["source_id"]: (rollout, spans) for rollout, spans in read_all(other)}
    frames = read_all(tmp_path)
    assert len(frames) == 2
    for rollout, spans in frames:
        same, others = api[rollout.metadata["source_id"]]
        assert rollout.input == same.input
        assert [each.name for each in spans] == [each.name for each in others]
        for own, given in zip(spans, others, strict=True):
            assert own.start_time == pytest.approx(given.start_time, abs=0.001)
            for read in (semconv.read_input_messages, semconv.read_output_messages, semconv.read_tools):
                assert read(own) == read(given)


def test_trajectories_are_imported_with_subagents_tokens_and_the_reward_of_their_trial(tmp_path: Path) -> None:
    files = ("trial/agent/trajectory.json", "trial/result.json", "trajectories.jsonl", "trajectories.jsonl")
    result = import_json(tmp_path, "atif", *files)
    assert named(result) == {
        "a subagent's trajectory in another file": 2,
        "not of the known form (ValueError: audio in a message)": 2,
        "no trajectory in ATIF 1, but 'ATIF-v2.0'": 2,
        "more than once in these files": 1,
    }
    (fixed, spans), (planned, calls) = read_all(tmp_path)
    assert (fixed.attempt.reward, planned.attempt.reward) == (1.0, None)
    (example,) = examples(tmp_path)
    roles = [message["role"] for message in example["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert example["messages"][3]["tool_call_id"] == "call_1", "the only result belongs to the only call"
    assert example["messages"][2]["reasoning_content"] == "I look at the file."
    assert len([span for span in spans if semconv.is_llm_call(span)]) == 2
    first, last, sub = calls
    assert semconv.read_token_data(first) == ([1, 2, 3], [4, 5], [-0.1, -0.2])
    assert [message["content"] for message in semconv.read_input_messages(last)] == ["What is 2 + 3?", "", "5", "noop"]
    assert (semconv.read_agent_name(sub), semconv.read_output_messages(sub)[0]["content"]) == ("adder", "5")


def test_a_trial_that_harbor_calls_invalid_is_a_failed_rollout_without_a_reward(tmp_path: Path) -> None:
    trial = shutil.copytree(SAMPLES / "trial", tmp_path / "trial")
    result = json.loads((trial / "result.json").read_text())
    problem = {"exception_type": "AgentSetupError", "exception_message": "no shell"}
    (trial / "result.json").write_text(json.dumps({**result, "exception_info": problem, "reward_valid": False}))
    said = import_json(tmp_path, "atif", str(trial / "agent" / "trajectory.json"), str(trial / "result.json"))
    assert named(said) == {"a result of a trial without its trajectory, or without a valid reward": 1}
    ((rollout, _),) = read_all(tmp_path)
    assert (rollout.status, rollout.attempt.error.message, rollout.attempt.reward) == ("failed", "no shell", None)


def test_exported_trajectories_can_be_imported_again(tmp_path: Path) -> None:
    import_json(tmp_path, "atif", "trial/agent/trajectory.json", "trial/result.json")
    file = tmp_path / "out.jsonl"
    said = run_here(tmp_path, "rollouts", "export", str(file), "--format", "atif", "--store", "runs/it")
    assert said.code == 0, said
    (line,) = map(json.loads, file.read_text().splitlines())
    known = json.loads((SAMPLES / "trial" / "agent" / "trajectory.json").read_text())
    assert [step["source"] for step in line["steps"]] == [step["source"] for step in known["steps"]]
    assert [step.get("tool_calls") for step in line["steps"]] == [step.get("tool_calls") for step in known["steps"]]
    assert line["extra"]["reward"] == 1.0
    before = examples(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    run_import(other, "atif", str(file), options=("--reward", "1"))
    assert examples(other) == before


def test_an_eval_becomes_tasks_and_a_reward_and_says_which_graders_are_missing(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    result = import_json(tmp_path, "openai-evals", "items.jsonl", "eval.json", options=("--tasks", str(tasks)))
    assert [json.loads(line)["answer"] for line in tasks.read_text().splitlines()] == ["5", "2"], "each once"
    assert named(result) == {
        "a grader of the type text_similarity (cosine)": 1,
        "a grader that reads sample.output_json.a": 1,
    }
    reward = result["configuration"]["reward"]
    exact, near, polite, language, python = reward["graders"]
    assert near["pass_threshold"] == 0.8
    assert polite == {
        "name": "judge", "model": "gpt-4o", "low": 1.0, "high": 5.0, "pass_threshold": 0.5,
        "rubric": "Rate the politeness of [the answer] to [the field question of the task].\n\n"
        "The score is from 1 to 5.",
    }  # fmt: skip
    assert language["rubric"].endswith("Score 1 for en, and 0 for the others.")
    assert python == {"name": "grader_is_short.py:reward", "pass_threshold": 0.5}
    graders = Graders([exact, near, {**python, "name": f"{tmp_path}/{python['name']}"}])
    task = json.loads(tasks.read_text().splitlines()[0])
    assert asyncio.run(graders(task, "5", ROLLOUT)) == (1.0, "")
    assert asyncio.run(graders(task, "five and more", ROLLOUT)) == (0.0, "")
    assert get_manager().create("reward", reward | {"graders": [exact, polite]})
    printed = run_import(tmp_path, "openai-evals", "eval.json").stdout
    assert "reward:\n  name: graders\n  graders:\n  - type: string_check\n" in printed


def test_apo_improves_a_prompt_on_imported_tasks(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    import_json(tmp_path, "openai-evals", "items.jsonl", options=("--tasks", str(tasks)))

    def agent(task: dict[str, Any], prompt: agl.PromptTemplate) -> float:
        return float(prompt.format(**task) == f"Add: {task['question']}")

    def propose(request: RecordedRequest) -> Answer:
        return Answer("It does not say what to do." if is_critic(request) else "<prompt>Add: {question}</prompt>")

    with Server(propose) as server:
        apo = agl.APO(client(server), gradient_model="critic", apply_edit_model="editor", beam_rounds=1)
        first = {"prompt": agl.PromptTemplate(template="{question}")}
        trainer = agl.Trainer(algorithm=apo, strategy="shm", trackers=[], initial_resources=first)
        trainer.fit(agl.rollout(agent), load_dataset(str(tasks)), load_dataset(str(tasks)))
    assert apo.get_best_prompt().template == "Add: {question}"


def test_results_of_an_eval_become_rated_rollouts(tmp_path: Path) -> None:
    assert import_json(tmp_path, "openai-evals", "output_items.json")["rollouts"] == 3
    *_, (_, (called, _)) = found = read_all(tmp_path)
    assert [rollout.attempt.reward for rollout, _ in found] == [0.75, 0.0, 1.0]
    assert semconv.read_output_messages(called)[0]["tool_calls"][0]["function"]["name"] == "clock"
    (pair,) = pairs(tmp_path)
    assert [each[0].messages[-1]["content"] for each in (pair.chosen, pair.rejected)] == ["5", "6"]


@pytest.mark.parametrize(
    ("operation", "answer", "score"),
    [("eq", "Moo", 1), ("ne", "Moo", 0), ("like", "a Moo!", 1), ("like", "a moo!", 0), ("ilike", "a moo!", 1)],
)
def test_string_checks_compare_as_openai_describes(operation: str, answer: str, score: float) -> None:
    check = {"type": "string_check", "input": "{{sample.output_text}}", "reference": "{{item.says.it}}"}
    graders = Graders([{**check, "operation": operation}])
    assert asyncio.run(graders({"says": {"it": "Moo"}}, answer, ROLLOUT))[0] == score


def test_the_similarity_of_texts_is_the_ratio_of_their_common_subsequence() -> None:
    grader = {"type": "text_similarity", "input": "{{sample.output_text}}", "reference": "{{item.a}}"}
    graders = Graders([{**grader, "evaluation_metric": "fuzzy_match"}])
    assert asyncio.run(graders({"a": "this is a test"}, "this is a test!", ROLLOUT))[0] == pytest.approx(28 / 29)
    with pytest.raises(agl.ConfigError, match=r"\{\{item.a\}\} .* there is no 'a' in"):
        asyncio.run(graders({"b": 1}, "x", ROLLOUT))
    with pytest.raises(agl.ConfigError, match=r"'meteor'.*needs input, reference, and one of eq, ne"):
        Graders([{**grader, "evaluation_metric": "meteor"}])


def test_bad_files_and_choices_are_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.json").write_text("{")
    (tmp_path / "c.jsonl").write_text('[1]\n{"id": 1\n{"object": "x"}\n')
    scores = [{"id": name, "trace_id": "t9", "name": name, "value": 1, "data_type": "NUMERIC"} for name in "xy"]
    (tmp_path / "d.json").write_text(json.dumps(scores))

    def refuse(*arguments: str, options: tuple[str, ...] = ()) -> str:
        return run_import(tmp_path, *arguments, code=2, options=options).stderr

    assert "ends in .json, .jsonl or .parquet" in refuse("atif", str(tmp_path / "a.txt"))
    assert "b.json cannot be read" in refuse("atif", str(tmp_path / "b.json"))
    assert "Did you mean 'langfuse'" in refuse("langfuze", "trace.json")
    both = ("langfuse", "trace.json", str(tmp_path / "d.json"))
    assert "several scores: x, y, correct; choose the reward with --reward NAME" in refuse(*both)
    assert "--reward z: no rollout has such a score; there are: correct" in refuse(*both[:2], options=("--reward", "z"))
    options = ("--tasks", "tasks.csv")
    assert "must end in .jsonl" in refuse("openai-evals", "items.jsonl", options=options)
    assert sum(named(import_json(tmp_path, "phoenix", str(tmp_path / "c.jsonl"))).values()) == 3


def test_an_import_that_was_stopped_is_finished_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentlightning.store.engine import BackendStore

    with monkeypatch.context() as patch:

        async def fail(*arguments: Any, **options: Any) -> None:
            raise agl.StoreError("the disk is full")

        patch.setattr(BackendStore, "update_attempt", fail)
        run_import(tmp_path, "phoenix", "phoenix/spans.json", code=2)
    files = ("phoenix/spans.json", "phoenix/span_annotations.json")
    assert import_json(tmp_path, "phoenix", *files)["known"] == 1
    found = read_all(tmp_path)
    assert [rollout.status for rollout, _ in found] == ["failed", "succeeded", "succeeded", "succeeded"]
    assert len(found[1][1]) == 6, "four spans, feedback and reward, each once"
