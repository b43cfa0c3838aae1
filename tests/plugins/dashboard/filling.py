"""Fills a store with what a dashboard has to show: a run with metrics, rollouts of all kinds, hostile content."""

from __future__ import annotations

import json
import math
import random
import time
from typing import Any

from agentlightning.resources import LLM, PromptTemplate
from agentlightning.store.protocol import LightningStore
from agentlightning.types import (
    AttemptedRollout,
    AttemptFailure,
    EnqueueRolloutRequest,
    RolloutConfig,
    RolloutMode,
    Span,
    TraceStatus,
)
from agentlightning_algorithms.shared.prompt_search.candidate import Candidate
from agentlightning_plugins.shared.training_records.record import LedgerEntry, Outcome, TrainedCall, TrainedRow

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=alert(1)> \x1b[31mred\x1b[0m \u202egnp.exe\u202c "
    "a\u200bb {{ 7*7 }} %s %n {0.__class__} \"'><svg onload=alert(2)> ]]> --> &lt;b&gt;"
)
"""A text that does harm where it is not escaped."""
HUGE = "0123456789" * 100_000
RUN = "math-grpo"
_QUESTIONS = (
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
    "What is 17 % of 250?",
    "Two numbers add up to 31 and differ by 5. What is the larger one?",
    "How many days are there from 3 March to 20 May?",
)


async def fill(store: LightningStore, *, steps: int = 40) -> dict[str, str]:
    """Fills the store; returns the ids of the rollouts that tests look at."""
    chance = random.Random(7)
    await store.create_run(
        "Word problems with tools",
        run_id=RUN,
        config={"algorithm": {"name": "grpo", "steps": 60, "lr": 1e-5, "rollouts_per_task": 4}, "seed": 7},
    )
    run = store.with_run(RUN)
    await _publish_prompts(run)
    await store.create_run(
        "Word problems, baseline", run_id="math-baseline", config={"algorithm": {"name": "baseline"}}
    )
    await store.with_run("math-baseline").add_metrics(1, {"reward": 0.41, "val_reward": 0.4, "progress": 1.0})
    await store.update_run("math-baseline", "succeeded")
    await search_prompts(run.with_run("math-baseline"))
    for place, question in enumerate(_QUESTIONS):
        await run_rollout(run, f"ro-val-{place}", question, float(place != 2), {"step": steps}, mode="val")
        await run_rollout(run.with_run("math-baseline"), f"ro-baseline-{place}", question, float(place > 1), mode="val")
    for step in range(1, steps + 1):
        await run.add_metrics(step, _metrics(step, chance))
    ids: dict[str, str] = {}
    for step in (steps - 2, steps - 1, steps):
        for place in range(4):
            for repetition in range(4):
                is_right = chance.random() < 0.35 + 0.15 * place or place == 3
                name = f"ro-step{step}-{place}-{repetition}"
                metadata = {"step": step, "task_id": place, "group": f"{step}-0-{place}", "repetition": repetition}
                await run_rollout(run, name, _QUESTIONS[place], float(is_right), metadata)
    await _record_training(run, steps - 1)
    ids["plain"] = f"ro-step{steps}-0-0"
    ids["failed"] = await _fail(run, steps)
    ids["hostile"] = await _be_hostile(run)
    ids["huge"] = "ro-huge"
    await run_rollout(run, "ro-huge", "Summarize the file.", 0.0, {"step": steps}, answer=HUGE)
    running = await run.start_rollout(
        {"question": _QUESTIONS[1]}, mode="train", metadata={"step": steps + 1}, worker_id="runner-node1-7-0"
    )
    await run.update_attempt(running.rollout_id, running.attempt.attempt_id, status="running")
    ids["running"] = running.rollout_id
    await run.enqueue_many_rollouts(
        [
            EnqueueRolloutRequest(input={"question": text}, mode="train", metadata={"step": steps + 1})
            for text in _QUESTIONS
        ]
    )
    ids["queued"] = (await run.query_rollouts(sort_order="desc", limit=1))[0].rollout_id
    for name in ("runner-node1-7-0", "runner-node1-7-1", "runner-node2-3-0"):
        await run.update_worker(name, {"running": int(name.endswith("7-0")), "cpu_percent": 41.5, "memory_mb": 512})
    await run.end_worker("runner-node2-3-0")
    return ids


async def _record_training(run: LightningStore, step: int) -> None:
    """Records the training of a step on two calls of each rollout; the rewards of the last group do not differ."""
    pieces = ["The", " answer", " is", " ", "42", ".", "\n", "<|end|>", " <tool>", " 17", "*", "250"]
    counts = {"trained": 12.0, "flat_group": 4.0}
    for place in range(4):
        for repetition in range(4):
            rollout = await run.get_rollout_by_id(f"ro-step{step}-{place}-{repetition}")
            assert isinstance(rollout, AttemptedRollout)
            ids = (rollout.rollout_id, rollout.attempt.attempt_id)
            outcome: Outcome = "flat_group" if place == 3 else "trained"
            calls = {f"resp-{ids[0]}-{number}": outcome for number in (1, 2)}
            group = str((rollout.metadata or {})["group"])
            length = 30 + 9 * place + 4 * repetition
            entry = LedgerEntry(*ids, step, group, outcome, rollout.attempt.reward, calls, length)
            row = TrainedRow(
                *ids,
                step=step,
                prompt_ids=list(range(8)),
                response_ids=[8, 9, 10, 11, 7, 5, 6, 0, 1, 2, 3, 4, 5, 7],
                mask=[1] * 5 + [0] * 2 + [1] * 7,
                logprobs=[-0.02, -1.4, -0.3, -2.9, -0.1, 0, 0, -0.4, -0.01, -0.2, -3.4, -0.9, -0.1, -0.03],
                trainer_logprobs=[
                    -0.02,
                    -1.39,
                    -0.3,
                    -2.7,
                    -0.1,
                    0.0,
                    0.0,
                    -0.4,
                    -0.01,
                    -0.21,
                    -3.4,
                    -0.8,
                    -0.1,
                    -0.03,
                ],
                calls=[
                    TrainedCall(name, *ends, 0.8, step - 1) for name, ends in zip(calls, ((0, 5), (7, 14)), strict=True)
                ],
                reward=rollout.attempt.reward,
                texts=dict(enumerate(pieces)),
            )
            await run.add_many_spans([entry.to_span(), *([row.to_span()] if outcome == "trained" else [])])
    await run.add_metrics(step, {f"outcome/{name}": count for name, count in counts.items()})


def _metrics(step: int, chance: random.Random) -> dict[str, float]:
    reward = 0.35 + 0.5 * (1 - math.exp(-step / 14)) + chance.uniform(-0.04, 0.04)
    values = {
        "reward": reward,
        "reward_std": 0.4,
        "rollouts": 64.0,
        "success_rate": reward,
        "entropy": 0.4 + 0.8 * math.exp(-step / 20),
        "approx_kl": 0.01 + chance.uniform(0, 0.01),
        "clip_fraction": 0.03,
        "grad_norm": 0.8 + chance.uniform(0, 0.3),
        "logprob_gap_max": 0.0004,
        "staleness": 0.0,
        "groups_without_spread": 0.3 + 0.009 * step,
        "responses_cut_off": 0.02,
        "failure_rate": 0.01,
        "sampler/tool_calls_unparsed": 3.0,
        "response_length": 180 - step,
        "tokens_per_s": 5200 + chance.uniform(-300, 300),
        "sample_s": 22.0,
        "train_s": 14.0,
        "publish_s": 1.5,
        "wait_s": 22.6,
    }
    if step % 5 == 0:
        value = 0.36 + 0.42 * (1 - math.exp(-step / 15))
        values |= {"val_reward": value, "val_reward_low": value - 0.06, "val_reward_high": value + 0.06, "val_s": 9.0}
    return values


async def run_rollout(
    run: LightningStore,
    rollout_id: str,
    question: Any,
    reward: float,
    metadata: dict[str, Any] | None = None,
    *,
    answer: str = "",
    mode: RolloutMode = "train",
    error: AttemptFailure | None = None,
) -> str:
    """Runs a rollout with two model calls, a tool and a reward of three parts."""
    await run.enqueue_rollout({"question": question}, mode=mode, metadata=metadata, rollout_id=rollout_id)
    claimed = await run.dequeue_rollout("runner-node1-7-1")
    assert claimed is not None
    assert claimed.rollout_id == rollout_id
    text = question if isinstance(question, str) else json.dumps(question)
    await run.add_many_spans(_spans(rollout_id, claimed.attempt.attempt_id, text, reward, answer))
    await run.update_attempt(
        rollout_id,
        claimed.attempt.attempt_id,
        status="failed" if error else "succeeded",
        error=error,
        **({} if error else {"reward": reward}),
    )
    return rollout_id


def _spans(rollout_id: str, attempt_id: str, question: str, reward: float, answer: str) -> list[Span]:
    start = time.time() - 6
    trace, root = "0" * 31 + "1", "a" * 16
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "calculator", "arguments": '{"expression": "17*250/100"}'},
    }
    asked = [
        {"role": "system", "content": "Solve the problem. Use the calculator for arithmetic."},
        {"role": "user", "content": question},
    ]
    first = {"role": "assistant", "content": None, "tool_calls": [call]}
    seen = [*asked, first, {"role": "tool", "tool_call_id": "call_1", "content": "42.5"}]
    last = {"role": "assistant", "content": answer or f"The answer is {'42.5' if reward else '45'}."}
    common = {"rollout_id": rollout_id, "attempt_id": attempt_id, "trace_id": trace}

    def model_call(number: int, messages: list[Any], reply: Any, begin: float, end: float) -> Span:
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "qwen3-4b",
            "gen_ai.response.id": f"resp-{rollout_id}-{number}",
            "gen_ai.usage.input_tokens": 120 + 40 * number,
            "gen_ai.usage.output_tokens": 24,
            "gen_ai.input.messages": json.dumps(messages),
            "gen_ai.output.messages": json.dumps([reply]),
            "prompt_token_ids": list(range(12)),
            "response_token_ids": list(range(8)),
            "logprobs": [-0.1] * 8,
            "agentlightning.gateway.complete": True,
            "agentlightning.gateway.backend": f"http://gpu-{number}:8000/v1",
            "agentlightning.gateway.cost": 0.0002,
            "agentlightning.gateway.tool_calls_unparsed": number - 1,
        }
        return Span.from_attributes(
            **common,
            name="chat qwen3-4b",
            attributes=attributes,
            span_id=f"b{number:015x}",
            parent_id=root,
            start_time=begin,
            end_time=end,
        )

    parts = {"primary": reward, "format": 1.0, "brevity": 0.8}
    rewards = {f"agentlightning.reward.{i}.name": name for i, name in enumerate(parts)}
    rewards |= {f"agentlightning.reward.{i}.value": value for i, value in enumerate(parts.values())}
    return [
        Span.from_attributes(
            **common, name="agentlightning.rollout", attributes={}, span_id=root, start_time=start, end_time=start + 5
        ),
        model_call(1, asked, first, start + 0.1, start + 1.9),
        Span.from_attributes(
            **common,
            name="calculator",
            attributes={
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": "calculator",
                "input": "17*250/100",
            },
            span_id="c" * 16,
            parent_id=root,
            start_time=start + 2,
            end_time=start + 2.4,
        ),
        model_call(2, seen, last, start + 2.5, start + 4.6),
        Span.from_attributes(
            **common,
            name="agentlightning.reward",
            attributes=rewards,
            span_id="d" * 16,
            parent_id=root,
            start_time=start + 4.8,
            end_time=start + 4.81,
        ),
        Span.from_attributes(
            **common,
            name="agentlightning.feedback",
            attributes={
                "agentlightning.feedback.text": f"expected 42, not {answer}",
                "agentlightning.feedback.prompt": "solver",
            },
            span_id="e" * 16,
            parent_id=root,
            start_time=start + 4.9,
            end_time=start + 4.9,
        ),
    ]


async def _fail(run: LightningStore, step: int) -> str:
    """Stores a rollout whose first attempt timed out and whose second raised an error."""
    name = "ro-failed"
    config = RolloutConfig(max_attempts=2, retry_condition=["timeout"])
    await run.enqueue_rollout(
        {"question": _QUESTIONS[2]}, mode="train", metadata={"step": step}, rollout_id=name, config=config
    )
    first = await run.dequeue_rollout("runner-node1-7-0")
    assert first is not None
    await run.update_attempt(name, first.attempt.attempt_id, status="timeout")
    second = await run.dequeue_rollout("runner-node1-7-1")
    assert second is not None
    await run.add_many_spans(_spans(name, second.attempt.attempt_id, _QUESTIONS[2], 0.0, "")[:3])
    error = AttemptFailure(
        type="ZeroDivisionError",
        message="division by zero",
        traceback='Traceback (most recent call last):\n  File "agent.py", line 41, in solve\n'
        "    share = total / count\nZeroDivisionError: division by zero\n",
    )
    await run.update_attempt(name, second.attempt.attempt_id, status="failed", error=error)
    return name


async def _be_hostile(run: LightningStore) -> str:
    """Stores a rollout that is full of hostile texts, and a separate run that is full of them too."""
    metadata = {
        "note": HOSTILE,
        HOSTILE: "x",
        "step": HOSTILE,
        "group": HOSTILE,
        "label": HOSTILE,
        "label_note": HOSTILE,
    }
    error = AttemptFailure(type=HOSTILE, message=HOSTILE, traceback=HOSTILE)
    name = await run_rollout(run, "ro-hostile", HOSTILE, 0.0, metadata, answer=HOSTILE, error=error)
    rollout = await run.get_rollout_by_id(name)
    assert isinstance(rollout, AttemptedRollout)
    place = (name, rollout.attempt.attempt_id)
    call = TrainedCall(HOSTILE, 0, 2, 1.0, 3)
    row = TrainedRow(*place, 1, [1], [2, 3], [1, 1], [-0.5, -1.0], [-0.5, -1.1], [call], 0.0, texts={2: HOSTILE})
    await run.add_many_spans(
        [row.to_span(), LedgerEntry(*place, 1, HOSTILE, "trained", 0.0, {HOSTILE: "stale"}).to_span()]
    )
    failed_call = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": HOSTILE, "agentlightning.gateway.complete": False,
        "agentlightning.gateway.backend": HOSTILE,
    }  # fmt: skip
    hostile = run.with_run("hostile")
    await hostile.create_run(HOSTILE, run_id="hostile", config={"algorithm": HOSTILE, HOSTILE: HOSTILE})
    await hostile.add_metrics(1, {HOSTILE: 1.0, "reward": 0.5, f"outcome/{HOSTILE}": 1.0})
    await hostile.enqueue_rollout(HOSTILE, mode="train", metadata={"step": 0, "group": HOSTILE})
    await hostile.add_resources({HOSTILE: PromptTemplate(HOSTILE.replace("{", "{{").replace("}", "}}"))})
    await hostile.update_worker(f"worker {HOSTILE}", {HOSTILE: HOSTILE})
    waiting = (await hostile.query_rollouts())[0].rollout_id
    attempt = (await hostile.start_attempt(waiting)).attempt
    await hostile.add_span(
        Span.from_attributes(
            rollout_id=waiting, attempt_id=attempt.attempt_id, name="chat", attributes=failed_call, start_time=1.0,
            end_time=2.0, status=TraceStatus(status_code="ERROR", description=HOSTILE),
        )
    )  # fmt: skip
    return name


async def search_prompts(run: LightningStore) -> None:
    """Stores the candidates of a prompt search: a seed, two edits of the seed and an edit of one of these."""
    seed = Candidate.of(
        {"prompt": PromptTemplate("Answer: {question}")}, full_score=0.4, task_scores=(0.0, 1.0, 0.0, 1.0, 0.0)
    )
    brief = Candidate.of(
        {"prompt": PromptTemplate("Answer with a number: {question}")},
        seed,
        round=1,
        full_score=0.6,
        critique="The answers contain words.",
    )
    long = Candidate.of({"prompt": PromptTemplate("Think, then answer: {question}")}, seed, round=1, batch_score=0.5)
    best = Candidate.of(
        {"prompt": PromptTemplate("Answer with a number only: {question}")},
        brief,
        round=2,
        full_score=0.9,
        task_scores=(1.0, 1.0, 0.5, 1.0, 1.0),
        critique=f"Units are still there. {HOSTILE}",
    )
    for candidate in (seed, brief, long, best):
        name = f"rs-{candidate.candidate_id}"
        unscored = {"parent_id": None, "full_score": None, "batch_score": None, "critique": None, "task_scores": ()}
        for each in (candidate.model_copy(update=unscored), candidate):  # as a search does
            await run.update_resources(name, {"prompt": candidate.prompts["prompt"], "prompt_candidate": each})


async def _publish_prompts(run: LightningStore) -> None:
    """Publishes three versions of a prompt with a model."""
    texts = (
        "Solve the problem.",
        "Solve the problem. Use the calculator for arithmetic.",
        "Solve the problem step by step. Use the calculator for all arithmetic.\nEnd with: The answer is <number>.",
    )
    more = {"extra_body": {"tools": [{"auth_token": "sk-not-to-be-shown"}]}}
    url = "http://127.0.0.1:8000/v1"
    model = LLM(endpoint=url, model="qwen3-4b", api_key="sk-not-to-be-shown", sampling_parameters=more)
    for text in texts:
        await run.update_resources("rs-prompts", {"system": PromptTemplate(text), "model": model})
