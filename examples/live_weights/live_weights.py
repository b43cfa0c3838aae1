"""A service whose model learns from its own traffic, also after the traffic has changed: minutes on two cores.

    python examples/live_weights/live_weights.py --seeds 0 1

The demo's agent answers word problems with a calculator; its tiny model is served here. Halfway, users begin to ask
mostly for products and quotients instead of sums and differences. The learner is in a process of its own: it trains a
LoRA adapter on the good answers of the last users, half of the users try it, and it is promoted if their rewards are
better. Each seed runs a second time without a learner. OUT gets the curves, `curve.svg`, and the learner's notes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import agentlightning as agl
from agentlightning_algorithms.shared.live_resources import read_live_history
from agentlightning_algorithms.shared.trained_model import serve_model
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import Problem, problem_stream
from agentlightning_plugins.demo.training import CHECKPOINT

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads slow a tiny model down
USERS = 8
SUMS = ("more", "another", "altogether", "left", "remain", "keep")
"""Words of the questions about sums and differences."""
SFT_SETTINGS = {
    "name": "sft", "model": str(CHECKPOINT), "min_reward": 1.0, "lora": {"rank": 8}, "lr": 2e-3, "epochs": 4,
    "train_threads": 1,
}  # fmt: skip
COLOURS = {"learning": "#4263eb", "no learning": "#868e96"}
WIDTH, HEIGHT, MARGIN = 720, 260, 40


def traffic(seed: int, rollouts: int) -> Iterator[Problem]:
    """Yields the users' questions: at first, 4 of 5 are about sums and differences, later 1 of 5."""
    problems = problem_stream("train", seed)
    for number in range(rollouts):
        is_sum = (number % 5 != 0) == (number < rollouts // 2)
        yield next(each for each in problems if any(word in each["question"] for word in SUMS) == is_sum)


async def serve(url: str, endpoint: str, questions: Iterator[Problem]) -> list[tuple[str, float]]:
    """Answers all questions; returns the version and the reward of each answer, in order."""
    store = agl.create_store(url)
    llm = agl.LLM(endpoint=endpoint, model="policy", sampling_parameters={"temperature": 1.0, "max_tokens": 32})
    if await store.get_latest_resources() is None:
        await store.update_resources("agent", {"llm": llm})
    runner: agl.LitAgentRunner[Problem] = agl.LitAgentRunner(agl.OtelTracer())
    served: list[tuple[str, float]] = []

    async def user(live: agl.LiveResources) -> None:
        for question in questions:
            choice = live.pick()
            rollout = await runner.step(question, resources_id=choice.resources_id, metadata=choice.metadata)
            reward = agl.find_final_reward((await store.query_spans(rollout.rollout_id)).items)
            served.append((str(choice.resources_id), reward or 0.0))

    with runner.run_context(agent=agl.rollout(calculator_agent), store=store):
        async with agl.LiveResources(store, refresh_s=0.5) as live:
            await asyncio.gather(*(user(live) for _ in range(USERS)))
    await store.close()
    return served


def learn(url: str, adapters: str, seed: int) -> None:
    """Learns until it is stopped; its runner answers recorded questions with each candidate before users get it."""
    logging.getLogger("agentlightning").setLevel(logging.WARNING)
    sft = {**SFT_SETTINGS, "adapters": adapters, "seed": seed}
    learner = agl.LiveLearning(sft, evidence=300, share=0.5, max_treated=400, check_tasks=8, refresh_s=0.5)
    agl.Trainer(algorithm=learner, store=agl.create_store(url), strategy="shm", trackers=[]).fit(calculator_agent)


def run(out: Path, seed: int, rollouts: int, *, learns: bool) -> list[float]:
    """Serves one seed's traffic, and returns the rewards in order."""
    out.mkdir(parents=True)
    url, adapters = f"sqlite:///{out}/service.db", str(out / "adapters")
    command = [sys.executable, __file__, "--learn", url, adapters, "--seeds", str(seed)]
    with serve_model(str(CHECKPOINT), adapters=adapters) as model:
        learner = subprocess.Popen(command) if learns else None
        try:
            served = asyncio.run(serve(url, model.endpoint, traffic(seed, rollouts)))
        finally:
            if learner is not None:
                learner.terminate()
                learner.wait()
    notes = asyncio.run(read_notes(url))
    (out / "notes.txt").write_text("\n".join(notes) + "\n", encoding="utf-8")
    (out / "served.json").write_text(json.dumps(served), encoding="utf-8")
    return [reward for _, reward in served]


async def read_notes(url: str) -> list[str]:
    store = agl.create_store(url)
    notes = [state.note for state in await read_live_history(store)]
    await store.close()
    return notes


def smooth(rewards: Sequence[float], size: int = 200) -> list[float]:
    return [statistics.fmean(rewards[max(0, end - size) : end]) for end in range(1, len(rewards) + 1)]


def draw(curves: dict[str, list[list[float]]]) -> str:
    """Returns the mean rewards of the last 200 answers as SVG; the dotted line is the change of the traffic."""
    total = max(len(curve) for found in curves.values() for curve in found)

    def x(number: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * number / total

    def y(value: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        'font-size="12" fill="#868e96">'
    ]
    for tick in (0.0, 0.5, 1.0):
        parts.append(f'<path d="M{MARGIN} {y(tick):.1f}H{WIDTH - MARGIN}" stroke="#868e96" opacity="0.3"/>')
        parts.append(f'<text x="{MARGIN - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    parts.append(f'<path d="M{x(total / 2):.1f} {y(0)}V{y(1)}" stroke="#868e96" stroke-dasharray="2 4"/>')
    for place, (name, found) in enumerate(curves.items()):
        for curve in found:
            points = " ".join(f"{x(n):.1f},{y(value):.1f}" for n, value in enumerate(curve) if n % 20 == 0 and n >= 100)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.5"/>')
        parts.append(f'<text x="{MARGIN + 90 * place}" y="{HEIGHT - 6}" fill="{COLOURS[name]}">{name}</text>')
    caption = f"mean reward of the last 200 of {total} answers; dotted: other questions"
    return "\n".join(
        [*parts, f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 6}" text-anchor="end">{caption}</text></svg>\n']
    )


def compare(out: Path, seeds: Sequence[int], rollouts: int) -> None:
    curves: dict[str, list[list[float]]] = {name: [] for name in COLOURS}
    for seed, name in itertools.product(seeds, COLOURS):
        rewards = run(out / f"{name.replace(' ', '-')}-{seed}", seed, rollouts, learns=name == "learning")
        quarter = len(rewards) // 4
        shown = [
            f"{statistics.fmean(rewards[start : start + quarter]):.3f}" for start in range(0, 4 * quarter, quarter)
        ]
        print(f"seed {seed}, {name}: mean reward by quarter of the traffic {', '.join(shown)}", flush=True)
        curves[name].append(smooth(rewards))
    (out / "curve.svg").write_text(draw(curves), encoding="utf-8")
    print(f"{out}/curve.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/live-weights"), help="a new folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rollouts", type=int, default=4000, help="number of questions")
    parser.add_argument("--learn", nargs=2, metavar=("STORE", "ADAPTERS"), help="be the learner of a service")
    given = parser.parse_args()
    if given.learn:
        store, adapters = given.learn
        learn(store, adapters, given.seeds[0])
    else:
        compare(given.out.resolve(), given.seeds, given.rollouts)


if __name__ == "__main__":
    main()
