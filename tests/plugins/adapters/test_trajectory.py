from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning import semconv
from agentlightning.adapter import TraceToTrajectories, TraceToTransitions, build_trajectories, triplets_to_transitions
from agentlightning.adapter.call import find_states
from agentlightning.frozen import FrozenDict
from agentlightning.plugin.registry import get_manager
from agentlightning.types import Triplet
from tests.core.trace_recorder import Recorder

SYSTEM = {"role": "system", "content": "be right"}


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def call(
    prompt: Sequence[int],
    response: Sequence[int],
    messages: Sequence[dict[str, Any]] = (),
    answer: str = "",
    *,
    id: str = "r",
    reward: float | None = None,
    agent_name: str | None = None,
) -> Triplet:
    return Triplet(
        prompt={"token_ids": list(prompt), "raw_content": list(messages), "image_urls": []},
        response={
            "token_ids": list(response),
            "raw_content": [said("assistant", answer)] if answer else [],
            "logprobs": [-float(token) for token in response],
        },
        reward=reward,
        metadata={"response_id": id, "agent_name": agent_name},
    )


def test_calls_whose_tokens_continue_each_other_become_one_trajectory_with_a_mask() -> None:
    first = call([1, 2], [3, 4], id="a", reward=0.5)
    second = call([1, 2, 3, 4, 5], [6], id="b", reward=1.0)
    result = build_trajectories([first, second])
    (trajectory,) = result.trajectories
    assert trajectory.ids == [1, 2, 3, 4, 5, 6]
    assert trajectory.mask == [0, 0, 1, 1, 0, 1]
    assert trajectory.logprobs == [0.0, 0.0, -3.0, -4.0, 0.0, -6.0]
    assert trajectory.prompt_length == 2
    assert [(turn.triplet.metadata["response_id"], turn.start, turn.end) for turn in trajectory.turns] == [
        ("a", 2, 4),
        ("b", 5, 6),
    ]
    assert [turn.triplet.reward for turn in trajectory.turns] == [0.5, 1.0]
    assert result.mismatches == []
    assert result.counts == {"template": 0, "retokenisation": 0, "other": 0}


def test_interleaved_conversations_become_separate_trajectories() -> None:
    calls = []
    for turn in range(4):
        for agent in range(3):
            prompt = [9, agent] + [token for t in range(turn) for token in (100 + agent, 50 + t)]
            calls.append(call(prompt, [100 + agent, 50 + turn]))
    result = build_trajectories(calls)
    assert len(result.trajectories) == 3
    for agent, trajectory in enumerate(result.trajectories):
        assert len(trajectory.turns) == 4
        assert trajectory.ids[:2] == [9, agent]
        assert sum(trajectory.mask) == 8


def test_a_call_continues_the_trajectory_with_the_longest_matching_prefix() -> None:
    short = call([1], [2])
    long = call([1, 2, 3], [4])
    other = call([1], [9])
    last = call([1, 2, 3, 4, 5], [6])
    result = build_trajectories([short, other, long, last])
    assert [trajectory.ids for trajectory in result.trajectories] == [[1, 2, 3, 4, 5, 6], [1, 9]]


def test_of_identical_calls_only_the_continued_one_is_trained_on() -> None:
    first, again, child = call([1], [2, 3], id="a"), call([1], [2, 3], id="b"), call([1, 2, 3, 4], [5])
    result = build_trajectories([first, again, child])
    (trajectory,) = result.trajectories
    assert (trajectory.ids, trajectory.mask) == ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])
    assert result.left_out == {"repeated": 1}
    other_split = call([1, 2], [3])
    assert len(build_trajectories([other_split, again, child]).trajectories) == 2, "the prompts differ"
    assert len(build_trajectories([first, again]).trajectories) == 2, "two samples of one prompt"


def test_an_attempt_with_a_broken_off_call_or_several_roots_is_reported_and_masked() -> None:
    def record(trace: Recorder, name: str, prompt: list[int], **settings: Any) -> None:
        trace.gateway(name, **settings)
        attributes = {**trace.spans[-1].attributes, "prompt_token_ids": prompt}
        trace.spans[-1] = trace.spans[-1].model_copy(update={"attributes": FrozenDict(attributes)})

    broken, rooted, regular = Recorder(), Recorder(), Recorder()
    record(broken, "a", [1])
    record(broken, "b", [1, 7, 8, 2], complete=False)
    record(rooted, "a", [1])
    record(rooted, "b", [5])
    record(regular, "a", [1])
    record(regular, "b", [1, 7, 8, 2])
    for trace, expected in ((broken, {"broke_off": 1}), (rooted, {"several_roots": 1}), (regular, {})):
        masked = TraceToTrajectories().adapt(trace.spans)
        assert masked.irregularities == expected
        assert any(any(trajectory.mask) for trajectory in masked.trajectories) is (not expected)


def test_the_second_of_two_calls_that_continue_the_same_call_starts_a_new_trajectory() -> None:
    start = [SYSTEM, said("user", "go")]
    later = [*start, said("assistant", "A")]
    calls = [
        call([1], [2], start, "A", id="first"),
        call([1, 2, 3], [4], [*later, said("user", "x")], "B", id="second"),
        call([1, 2, 5], [6], [*later, said("user", "y")], "C", id="third"),
    ]
    result = build_trajectories(calls)
    assert [trajectory.ids for trajectory in result.trajectories] == [[1, 2, 3, 4], [1, 2, 5, 6]]
    (mismatch,) = result.mismatches
    assert (mismatch.kind, mismatch.response_id, mismatch.previous_response_id) == ("other", "third", "first")
    assert mismatch.explanation == "an earlier call continued from the same point"


START = [SYSTEM, said("user", "go")]
NEXT = [*START, said("assistant", "answer"), said("user", "on")]
HEAD = list(range(100, 120))
ANSWER = list(range(20, 50))


@pytest.mark.parametrize(
    ("kind", "prompt", "position"),
    [
        ("retokenisation", [*HEAD, *ANSWER[:10], 900, *ANSWER[12:], 7], 30),
        ("retokenisation", [*HEAD, 900, 901, *ANSWER[1:], 7], 20),
        ("template", [*HEAD, *ANSWER[20:], 7, 8, 9, 10, 11, 12, 13], 20),
        ("template", [*HEAD, 900, 901, *ANSWER, 7], 20),
        ("template", [*HEAD[:5], 900, *HEAD[5:], *ANSWER, 7], 5),
        ("template", [*HEAD, *ANSWER[:-1], 900, 7], 49),
        ("other", [*HEAD, *range(500, 560)], 20),
    ],
    ids=["merged", "split", "reasoning dropped", "prefix added", "history changed", "end changed", "all new"],
)
def test_a_mismatch_has_a_kind_and_a_position(kind: str, prompt: list[int], position: int) -> None:
    calls = [call(HEAD, ANSWER, START, "answer", id="a"), call(prompt, [1], NEXT, "b", id="b")]
    result = build_trajectories(calls)
    assert len(result.trajectories) == 2
    (mismatch,) = result.mismatches
    assert (mismatch.kind, mismatch.position) == (kind, position)
    assert (mismatch.previous_response_id, mismatch.response_id) == ("a", "b")
    assert str(position) in mismatch.explanation
    assert result.counts[mismatch.kind] == 1


def test_with_a_tokenizer_the_text_decides_the_kind_of_a_mismatch() -> None:
    texts = {1: "ab", 2: "a", 3: "b", 4: "x"}

    def decode(ids: Sequence[int]) -> str:
        return "".join(texts[token] for token in ids)

    before = call([4], [1], START, "ab")
    same_text = call([4, 2, 3, 4], [4], [*START, said("assistant", "ab"), said("user", "x")], "x")
    other_text = call([4, 4, 4], [4], [*START, said("assistant", "ab"), said("user", "x")], "x")
    assert build_trajectories([before, same_text], decode=decode).counts["retokenisation"] == 1
    assert build_trajectories([before, other_text], decode=decode).counts["template"] == 1


@pytest.mark.parametrize(
    ("answer", "block"),
    [("<think>Hm.</think>4", "<think>"), ("Hm.</think>4", "<think>"), ("[THINK]Hm.[/THINK]4", "[THINK]")],
    ids=["whole", "begun by the prompt", "mistral"],
)
def test_a_thought_that_the_template_drops_from_the_history_is_named(answer: str, block: str) -> None:
    history = [*START, said("assistant", answer), said("user", "on")]
    calls = [call(HEAD, [20, 21, 22, 4], START, answer), call([*HEAD, 4, *range(500, 530)], [1], history, "b")]
    for decode in (None, lambda ids: "".join({20: "<think>Hm.", 21: "</think>"}.get(token, "4") for token in ids)):
        (mismatch,) = build_trajectories(calls, decode=decode).mismatches
        assert mismatch.kind == "template"
        assert f"the chat template drops the {block} block of the answer" in mismatch.explanation
    (mismatch,) = build_trajectories(calls, decode=lambda ids: "Hm. is kept" + str(list(ids))).mismatches
    assert "drops" not in mismatch.explanation


def calling(id: str, arguments: str) -> dict[str, Any]:
    tool_call = {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [tool_call]}


@pytest.mark.parametrize("kind", ["text", "tool call", "no tokens"])
def test_a_call_of_a_conversation_that_does_not_continue_it_is_always_counted(kind: str) -> None:
    def system(number: int) -> dict[str, Any]:
        return {"role": "system", "content": "cch=1" if kind == "no tokens" else f"cch={number}"}

    answer = calling("c", '{"a": 1}') if kind == "tool call" else said("assistant", "answer")
    back = calling("c", '{"b":2}') if kind == "tool call" else answer
    first, second = (
        call([number, 5], [6], [system(number), said("user", "go"), *more], id=name)
        for number, name, more in ((1, "a", []), (2, "b", [back, said("user", "on")]))
    )
    first.response["raw_content"] = [answer]
    if kind == "no tokens":
        first.response["token_ids"] = []
    result = build_trajectories([first, second])
    assert result.counts == {"template": 0, "retokenisation": 0, "other": 1}
    (mismatch,) = result.mismatches
    assert (mismatch.response_id, mismatch.previous_response_id) == ("b", "a")
    assert not result.trajectories[-1].is_root
    text = "the call that it continues has no tokens"
    if kind != "no tokens":
        text = "the agent changed the history of the conversation, from message 0 on"
    assert mismatch.explanation == text


def test_examples_in_a_prompt_are_no_conversation_that_was_left() -> None:
    shown = [SYSTEM, said("user", "1 + 1?"), said("assistant", "2")]
    calls = [call([n], [9], [*shown[n:], said("user", str(n))], "so", id=str(n), agent_name=str(n)) for n in range(2)]
    assert build_trajectories(calls).mismatches == []


def test_an_edited_history_is_counted_and_explained() -> None:
    edited = [*START, said("assistant", "what I wish it had said"), said("user", "on")]
    calls = [call(HEAD, ANSWER, START, "answer", id="a"), call([*HEAD, 1, 2, 3], [4], edited, "b", id="b")]
    (mismatch,) = build_trajectories(calls).mismatches
    assert mismatch.kind == "other"
    assert mismatch.explanation == "the agent changed the history of the conversation, from message 2 on"


def test_conversations_that_share_a_system_prompt_are_not_a_mismatch() -> None:
    calls = [
        call([1, 2], [3], [SYSTEM, said("user", "one")], "1"),
        call([1, 4], [5], [SYSTEM, said("user", "two")], "2"),
        call([1, 2], [6], [SYSTEM, said("user", "one")], "again"),
    ]
    result = build_trajectories(calls)
    assert len(result.trajectories) == 3
    assert result.mismatches == []


def test_calls_without_tokens_or_logprobs_are_left_out_and_counted() -> None:
    bare = call([1], [2])
    no_logprobs = bare.model_copy(update={"response": {"token_ids": [2], "raw_content": []}})
    no_tokens = bare.model_copy(update={"prompt": {"token_ids": [], "raw_content": []}})
    result = build_trajectories([bare, no_logprobs, no_tokens, no_tokens])
    assert len(result.trajectories) == 1
    assert result.left_out == {"no_logprobs": 1, "no_tokens": 2}


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)
steps = st.lists(st.tuples(st.booleans(), st.integers(0, 20), tokens, tokens), max_size=12)


@given(steps)
@settings(max_examples=150, deadline=None)
def test_ids_mask_and_logprobs_are_consistent(steps: list[tuple[bool, int, list[int], list[int]]]) -> None:
    calls: list[Triplet] = []
    for goes_on, which, added, response in steps:
        before: list[int] = []
        if goes_on and calls:
            chosen = calls[which % len(calls)]
            before = chosen.prompt["token_ids"] + chosen.response["token_ids"]
        calls.append(call(before + added, response, id=str(len(calls))))
    result = build_trajectories(calls)
    seen = []
    for trajectory in result.trajectories:
        assert len(trajectory.ids) == len(trajectory.mask) == len(trajectory.logprobs)
        sampled = [False] * len(trajectory.ids)
        for turn in trajectory.turns:
            triplet = turn.triplet
            seen.append(triplet.metadata["response_id"])
            assert trajectory.ids[: turn.start] == triplet.prompt["token_ids"]
            assert trajectory.ids[turn.start : turn.end] == triplet.response["token_ids"]
            assert trajectory.logprobs[turn.start : turn.end] == triplet.response["logprobs"]
            sampled[turn.start : turn.end] = [True] * (turn.end - turn.start)
        assert [bool(flag) for flag in trajectory.mask] == sampled
        assert all(value == 0.0 for value, flag in zip(trajectory.logprobs, sampled, strict=True) if not flag)
    assert len(set(seen)) == len(seen) == len(calls) - result.left_out.get("repeated", 0), "each call is used once"


@given(steps)
@settings(max_examples=100, deadline=None)
def test_the_prefix_index_agrees_with_a_comparison_of_all_pairs(
    steps: list[tuple[bool, int, list[int], list[int]]],
) -> None:
    calls: list[Triplet] = []
    for goes_on, which, added, response in steps:
        before: list[int] = []
        if goes_on and calls:
            chosen = calls[which % len(calls)]
            before = chosen.prompt["token_ids"] + chosen.response["token_ids"]
        calls.append(call(before + added, response))
    expected: list[tuple[list[int], list[int]]] = []
    for triplet in calls:
        prompt, response = triplet.prompt["token_ids"], triplet.response["token_ids"]
        mask: list[int] = []
        fitting = [one for one in expected if prompt[: len(one[0])] == one[0]]
        if fitting:
            length = max(len(ids) for ids, _ in fitting)
            taken = next(one for one in reversed(fitting) if len(one[0]) == length)
            mask = taken[1]
            expected = [one for one in expected if one != taken]
        given = len(prompt) - len(mask)
        expected.append((prompt + response, mask + [0] * given + [1] * len(response)))
    built = [(trajectory.ids, trajectory.mask) for trajectory in build_trajectories(calls).trajectories]
    assert sorted(built) == sorted(expected)


@pytest.mark.serial
@pytest.mark.parametrize("shape", ["apart", "short", "joined"])
def test_the_time_to_build_trajectories_is_linear_in_the_calls(shape: str) -> None:
    def seconds(n: int) -> float:
        if shape == "apart":
            calls = [call([*HEAD, *HEAD, i], [*ANSWER, i]) for i in range(n)]
        elif shape == "short":
            calls = [call([1], [i % 7, i]) for i in range(n)]
        else:
            calls = [call([i // 10, *([2] * 30 * (i % 10)), 1, 1], [2]) for i in range(n)]
        gc.disable()
        try:
            began = time.process_time()
            build_trajectories(calls)
            return time.process_time() - began
        finally:
            gc.enable()

    assert seconds(4000) < 25 * min(seconds(500) for _ in range(3))


# Transitions.


def test_a_transition_has_the_messages_that_follow_an_answer() -> None:
    question = [SYSTEM, said("user", "1+2?")]
    asked = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    result = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    first = call([1], [2], question)
    first = first.model_copy(update={"response": {**first.response, "raw_content": [asked]}})
    resent = {**asked, "content": "", "tool_calls": [{**asked["tool_calls"][0], "id": "another id"}]}
    second = call([1, 2, 3], [4], [*question, resent, result], "3", reward=1.0)
    elsewhere = call([7], [8], [said("user", "hi")], "hi")
    one, two, three = triplets_to_transitions([first, second, elsewhere])
    assert (one.state, one.observation, one.action) == ({}, first.prompt, first.response)
    assert (one.next_index, one.is_terminal, one.reward) == (1, False, None)
    assert (two.observation, two.is_terminal, two.reward) == (second.prompt, True, 1.0)
    assert three.is_terminal


def test_the_state_of_a_transition_has_the_variables_that_were_known_when_its_call_began() -> None:
    trace = Recorder()

    def remember(at: float, **variables: Any) -> None:
        trace.add(semconv.SPAN_STATE, {semconv.STATE: json.dumps(variables)}, at=(at, at))

    remember(0, question="where?")
    trace.client("first", at=(1, 2))
    trace.gateway("first", at=(1, 2))
    trace.add(semconv.SPAN_STATE, {semconv.STATE: "{broken"}, at=(2.2, 2.2))
    trace.add(semconv.SPAN_STATE, {semconv.STATE: '{"late": 1}', semconv.LATE: True}, at=(2.3, 2.3))
    remember(2.5, documents=["a map"], question="where?")
    trace.client("second", at=(3, 5))
    trace.gateway("second", at=(3, 5))
    remember(4, draft="here")
    first, second = TraceToTransitions().adapt(trace.spans)
    assert first.state == {"question": "where?"}
    assert second.state == {"question": "where?", "documents": ["a map"]}
    assert [state.changed for state in find_states(trace.spans)] == [
        {"question": "where?"},
        {"documents": ["a map"]},
        {"draft": "here"},
    ]


def test_adapters_accept_settings_for_their_source_adapter() -> None:
    trace = Recorder()
    for name in ("boss", "writer"):
        agent = trace.add("agent", {"agent.name": name}, at=(trace.now, trace.now + 5))
        trace.client(name, parent=agent, at=(trace.now - 4, trace.now - 2))
        trace.gateway(name, at=(trace.now - 4, trace.now - 2))
    trajectories = get_manager().create("adapter", {"name": "trajectory", "source": {"agent_match": "writer"}})
    assert isinstance(trajectories, TraceToTrajectories)
    (trajectory,) = trajectories.adapt(trace.spans).trajectories
    assert trajectory.turns[0].triplet.metadata["agent_name"] == "writer"
    transitions = get_manager().create("adapter", "transition")
    assert isinstance(transitions, TraceToTransitions)
    assert [t.metadata["agent_name"] for t in transitions.adapt(trace.spans)] == ["boss", "writer"]
