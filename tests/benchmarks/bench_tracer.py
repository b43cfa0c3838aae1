"""Cost of tracing to the agent: ``python tests/benchmarks/bench_tracer.py [--spans 2000] [--rounds 7]``.

Times a library's span with 15 attributes on the agent's thread, inside an attempt whose spans go to a memory store, and
with a bare OpenTelemetry provider that keeps nothing. Rounds are interleaved and medians are printed; the difference
is our part. CPU time of the agent's thread is the added work; wall time also includes waiting for the interpreter
lock, which the writer's thread holds while it stores.

Target (issue 5): our part <= 100 microseconds per span on the agent's path.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

import openai
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from agentlightning.emitter import emit_reward
from agentlightning.store.factory import create_store
from agentlightning.tracer import OtelTracer
from agentlightning_plugins.tracers.shared.pipeline import pipeline

ATTRIBUTES = {f"gen_ai.attribute.{i}": "v" * 60 for i in range(15)}


def record(library: otel.Tracer) -> None:
    with library.start_as_current_span("openai.chat") as span:
        span.set_attributes(ATTRIBUTES)


def measure(step: Callable[[], object], spans: int) -> tuple[float, float]:
    """Returns CPU time of this thread and wall time, in microseconds per span."""
    cpu, wall = time.thread_time(), time.perf_counter()
    for _ in range(spans):
        step()
    return (time.thread_time() - cpu) / spans * 1e6, (time.perf_counter() - wall) / spans * 1e6


def time_client() -> float:
    """Returns milliseconds of CPU of one more client, as agents make in each rollout."""
    openai.OpenAI(api_key="any").close()
    started = time.thread_time()
    for _ in range(10):
        openai.OpenAI(api_key="any").close()
    return (time.thread_time() - started) / 10 * 1e3


async def main(spans: int, rounds: int) -> None:
    store = create_store("memory://")
    clients = [time_client()]
    tracer = OtelTracer()
    tracer.init()
    tracer.init_worker("bench", store)
    clients.append(time_client())
    bare = TracerProvider(sampler=ALWAYS_ON).get_tracer("library")
    ours = pipeline.provider.get_tracer("library")
    steps: dict[str, Callable[[], object]] = {
        "bare OpenTelemetry span": lambda: record(bare),
        "the same span, traced": lambda: record(ours),
        "emit_reward": lambda: emit_reward(1.0),
    }
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            rollout = await store.start_rollout(number)
            ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
            async with tracer.trace_context(**ids) as trace:
                figure = measure(step, spans)
            assert trace.dropped == 0
            if number:  # the first round warms up
                figures[name].append(figure)
            await store.update_attempt(**ids, status="succeeded")
            await store.delete_rollouts([rollout.rollout_id])
    base = [statistics.median(figure[i] for figure in figures["bare OpenTelemetry span"]) for i in (0, 1)]
    print(f"{'microseconds a span':28} {'cpu':>7} {'wall':>7} {'our part, cpu':>14} {'wall':>7}")
    for name, values in figures.items():
        cpu, wall = (statistics.median(figure[i] for figure in values) for i in (0, 1))
        print(f"{name:28} {cpu:7.1f} {wall:7.1f} {cpu - base[0]:14.1f} {wall - base[1]:7.1f}")
    print("milliseconds of CPU to make an openai client: {:.2f}, traced {:.2f}".format(*clients))
    tracer.teardown_worker("bench")
    tracer.teardown()
    await store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spans", type=int, default=2000, help="spans in each round")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.spans, arguments.rounds))
