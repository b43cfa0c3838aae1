"""Duration of a round of APO, compared with the duration of its rollouts.

    python tests/benchmarks/bench_apo.py [--rounds 3]

One runner runs 8 rollouts concurrently, the agent sleeps 50 ms, critic and editor answer immediately. The ideal time
is the round's rollouts / 8 x 50 ms; the rest is queueing, reading spans, model calls and publishing candidates. The
target is 1.3x. The models are a scripted server in a separate process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Mapping
from typing import Any

import agentlightning as agl
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI

CONCURRENCY = 8
AGENT_S = 0.05


async def sleeping(task: Mapping[str, Any], prompt: agl.PromptTemplate) -> float:
    await asyncio.sleep(AGENT_S)
    return len(prompt.format(**task)) % 7 / 7


def critic_and_editor(request: RecordedRequest) -> Answer:
    """Answers every request for an edit with a new prompt."""
    number = hash(request.raw)
    return Answer(f"say {number}" if request.body["model"] == "critic" else f"{{question}} {number}")


def serve(port: Any) -> None:
    async def main() -> None:
        async with ScriptedOpenAI(critic_and_editor) as server:
            port.send(server.endpoint)
            await asyncio.Event().wait()

    asyncio.run(main())


def measure(endpoint: str, strategy: str, rounds: int) -> list[tuple[int, float]]:
    """Returns rollouts and seconds of each round except the seed's."""
    from openai import AsyncOpenAI

    ends: list[tuple[int, float]] = []

    class Timed(agl.APO):
        async def _finish_round(self, *args: Any, **settings: Any) -> None:
            await super()._finish_round(*args, **settings)
            ends.append((int((await self.get_store().statistics())["rollouts"]), time.monotonic()))

    apo = Timed(
        AsyncOpenAI(base_url=endpoint, api_key="any"),
        gradient_model="critic",
        apply_edit_model="editor",
        beam_width=4,
        branch_factor=4,
        beam_rounds=rounds,
    )
    agl.Trainer(
        algorithm=apo,
        strategy=strategy,
        trackers=[],
        max_concurrency=CONCURRENCY,
        initial_resources={"prompt": "{question}"},
    ).fit(sleeping, tasks("train"), tasks("val"))
    return [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(ends)]


def tasks(name: str) -> list[dict[str, str]]:
    return [{"question": f"{name} {number}"} for number in range(64)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    receiver, sender = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(sender,), daemon=True)
    server.start()
    endpoint = receiver.recv()
    try:
        for strategy in ("shm", "cs"):
            ratios = []
            for number, (rollouts, seconds) in enumerate(measure(endpoint, strategy, rounds), 1):
                ideal = rollouts / CONCURRENCY * AGENT_S
                ratios.append(seconds / ideal)
                print(f"{strategy} round {number}: {rollouts} rollouts, {seconds:.2f} s, ideal {ideal:.2f} s")
            print(f"{strategy}: {statistics.median(ratios):.2f}x of ideal (target 1.3x)")
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
