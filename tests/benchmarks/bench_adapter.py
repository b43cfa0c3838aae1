"""Cost of adapters: ``python tests/benchmarks/bench_adapter.py [--calls 10000] [--rounds 5]``.

The attempt has ``--calls`` calls, each recorded by a client and by the gateway with 300 tokens and followed by a
reward. The baseline is one pass over the same spans that parses the JSON of their messages, as every reader must.
Rounds are interleaved; medians of CPU time are printed.

Target (issue 5): 10,000 calls in a second.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence

import orjson

from agentlightning.adapter import TraceToMessages, TraceToTriplet, build_trajectories, triplets_to_transitions
from agentlightning.types import Span

TURNS = 10
"""Number of calls in a conversation."""


def make_spans(calls: int) -> list[Span]:
    spans: list[Span] = []

    def add(name: str, attributes: dict[str, object], start: float, end: float, parent: str | None = None) -> str:
        spans.append(
            Span.from_attributes(
                attributes=attributes,
                rollout_id="ro-1",
                attempt_id="at-1",
                sequence_id=len(spans) + 1,
                name=name,
                trace_id="0" * 32,
                span_id=f"{len(spans) + 1:016x}",
                parent_id=parent,
                start_time=start,
                end_time=end,
            )
        )
        return spans[-1].span_id

    root = add("agentlightning.rollout", {}, 0.0, 1e9)
    for number in range(calls):
        conversation, turn = divmod(number, TURNS)
        history = [{"role": "user", "parts": [{"type": "text", "content": f"task {conversation} " + "x" * 200}]}]
        answer = {"role": "assistant", "parts": [{"type": "text", "content": f"answer {number}"}]}
        attributes: dict[str, object] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "m",
            "gen_ai.response.id": f"r{number}",
            "gen_ai.input.messages": json.dumps(history),
            "gen_ai.output.messages": json.dumps([{**answer, "finish_reason": "stop"}]),
        }
        start = 10.0 * number
        client = add("openai.chat", attributes, start, start + 8, root)
        tokens = {
            "agentlightning.gateway.complete": True,
            "prompt_token_ids": [conversation, *range(20), *[7] * (28 * turn)],
            "response_token_ids": [7] * 28,
            "logprobs": [-0.5] * 28,
        }
        add("chat.completions", {**attributes, **tokens}, start + 1, start + 7, client)
        add("agentlightning.reward", {"agentlightning.reward.0.value": 1.0}, start + 9, start + 9, root)
    return spans


def parse_messages(spans: Sequence[Span]) -> int:
    parsed = 0
    for span in spans:
        for key in ("gen_ai.input.messages", "gen_ai.output.messages"):
            text = span.attributes.get(key)
            if text is not None:
                orjson.loads(text)
                parsed += 1
    return parsed


def main(calls: int, rounds: int) -> None:
    spans = make_spans(calls)
    triplets = TraceToTriplet().adapt(spans)
    assert len(triplets) == calls
    steps: dict[str, Callable[[], object]] = {
        "parse the messages": lambda: parse_messages(spans),
        "TraceToTriplet": lambda: TraceToTriplet().adapt(spans),
        "with credit 'discounted'": lambda: TraceToTriplet(credit="discounted").adapt(spans),
        "with credit 'intermediate'": lambda: TraceToTriplet(credit="intermediate").adapt(spans),
        "TraceToMessages": lambda: TraceToMessages().adapt(spans),
        "build_trajectories": lambda: build_trajectories(triplets),
        "triplets_to_transitions": lambda: triplets_to_transitions(triplets),
    }
    figures: dict[str, list[float]] = {name: [] for name in steps}
    gc.disable()
    for number in range(rounds + 1):
        for name, step in steps.items():
            began = time.process_time()
            step()
            if number:  # the first round warms up
                figures[name].append(time.process_time() - began)
            gc.collect()
    base = statistics.median(figures["parse the messages"])
    print(f"{f'{calls:,} calls':28} {'seconds':>9} {'ratio':>7} {'calls/s':>9}")
    for name, values in figures.items():
        seconds = statistics.median(values)
        print(f"{name:28} {seconds:9.3f} {seconds / base:7.1f} {calls / seconds:9,.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    main(arguments.calls, arguments.rounds)
