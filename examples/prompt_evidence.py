"""Shows what prompt searches achieve on two examples, by the number of rollouts: the critics are scripted.

    python -m examples.prompt_evidence run --out runs/prompts/after     # five seeds of each search
    python -m examples.prompt_evidence draw runs/prompts --to docs/results-prompts.svg

``run`` writes the test reward of the published prompt after each of its changes to OUT/EXAMPLE-SEARCH.json. It also
runs in older checkouts (with this file copied there). ``draw`` draws the files of the folders ``before`` and ``after``
and prints a table; searches that have not run in both are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from examples.evidence import HEIGHT, MARGIN, WIDTH, mean_and_interval
from examples.one_agent import agent as tickets_agent
from examples.one_agent import compare, critic, tickets
from examples.room_selector import room_selector, scripted

import agentlightning as agl
from agentlightning_algorithms.shared.prompt_search.search import PromptSearch
from agentlightning_algorithms.shared.trained_model import serve_model
from agentlightning_plugins.shared.scripted_model.server import ScriptedOpenAI

BUDGETS = {"room_selector": 400, "one_agent": 300}
SEARCHES = {"room_selector": ("apo",), "one_agent": ("apo", "gepa")}
COLOURS = {"before": "#868e96", "after": "#2f6fed"}
Curve = list[tuple[int, float]]


def measure_rooms(prompt: agl.PromptTemplate) -> float:
    """The exact reward of a prompt on 200 new requests: the scripted model needs no server to answer."""
    found = []
    for task in room_selector.make_tasks(200, seed=9):
        wish = scripted.REQUEST.search(task["request"])
        assert wish is not None
        rooms = json.loads(room_selector.find_rooms(wish["day"], int(wish["hour"])))
        chosen = json.loads(scripted.choose(rooms, prompt.format(request=task["request"]), wish))
        found.append(float(chosen["room"] == task["room"]))
    return statistics.fmean(found)


def measure_tickets(llm: agl.LLM) -> Callable[[agl.PromptTemplate], float]:
    """Returns a function that runs a prompt on 200 test tickets, greedily."""

    async def run(prompt: agl.PromptTemplate) -> float:
        slots = asyncio.Semaphore(16)

        async def rate(task: tickets.Ticket) -> float:
            async with slots:
                return await tickets_agent.agent(task, prompt, llm)

        return statistics.fmean(await asyncio.gather(*map(rate, tickets.test())))

    def measure(prompt: agl.PromptTemplate) -> float:
        tickets_agent.client.cache_clear()  # its connections belong to the event loop of the search
        return asyncio.run(run(prompt))

    return measure


def search(example: str, name: str, seed: int, llm: agl.LLM) -> Curve:
    """Runs a search and returns the number of rollouts and the test reward at each change of the published prompt."""
    seen: list[tuple[int, agl.PromptTemplate]] = []
    publish = PromptSearch.publish

    async def note(self: PromptSearch) -> None:
        await publish(self)
        prompt = self.get_best_prompt()
        if not seen or seen[-1][1] != prompt:
            seen.append((self.n_rollouts, prompt))

    budget = BUDGETS[example]
    settings: dict[str, Any] = {"max_rollouts": budget, "seed": seed}
    algorithm = agl.APO(**settings) if name == "apo" else agl.GEPA(**settings)
    if example == "room_selector":
        resources: dict[str, Any] = {"prompt": room_selector.FIRST_PROMPT}
        agent: Any = room_selector.select_room
        data: tuple[list[Any], list[Any]] = room_selector.make_tasks(40, seed=1), room_selector.make_tasks(24, seed=2)
        measure: Callable[[agl.PromptTemplate], float] = measure_rooms
    else:
        resources = {"prompt": tickets_agent.FIRST_PROMPT, "llm": llm}
        agent = tickets_agent.agent
        data = list[Any](tickets.train()), list[Any](tickets.val())
        measure = measure_tickets(llm)
        tickets_agent.client.cache_clear()
    with mock.patch.object(PromptSearch, "publish", note):
        trainer = agl.Trainer(algorithm=algorithm, strategy="shm", trackers=[], initial_resources=resources)
        trainer.fit(agent, *data)
    return [*((n, measure(prompt)) for n, prompt in seen), (budget, measure(algorithm.get_best_prompt()))]


def run(out: Path, examples: list[str], seeds: list[int]) -> None:
    """Runs what is missing."""
    out.mkdir(parents=True, exist_ok=True)
    with serve_model(str(compare.FOLDER / "checkpoint")) as served:
        llm = agl.LLM(endpoint=served.endpoint, model=served.model, sampling_parameters=compare.SAMPLING)
        for example in examples:
            answer = scripted.answer if example == "room_selector" else critic.answer
            with ScriptedOpenAI(answer) as server:
                os.environ |= {"OPENAI_BASE_URL": server.endpoint, "OPENAI_API_KEY": "any", "OPENAI_MODEL": "scripted"}
                room_selector.client.cache_clear()
                for name in SEARCHES[example]:
                    file = out / f"{example}-{name}.json"
                    curves = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
                    for seed in seeds:
                        if str(seed) not in curves:
                            curves[str(seed)] = search(example, name, seed, llm)
                            file.write_text(json.dumps(curves), encoding="utf-8")
                            print(example, name, seed, curves[str(seed)], flush=True)


def draw(folder: Path) -> tuple[str, str]:
    """Returns an SVG with a panel for each search, and a table in Markdown."""
    lines = [
        "| example, search, rollouts | before | after | each seed before | each seed after |",
        "|---|---|---|---|---|",
    ]
    wanted = [(example, name) for example, names in SEARCHES.items() for name in names]
    panels = [
        each
        for each in wanted
        if all((folder / part / "-".join(each)).with_suffix(".json").exists() for part in COLOURS)
    ]
    width = WIDTH // len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        'font-size="12" fill="#868e96">'
    ]
    top, bottom = 28, HEIGHT - MARGIN

    def y(value: float) -> float:
        return bottom - (bottom - top) * value

    for place, (example, name) in enumerate(panels):
        left, right, budget = width * place + 32, width * (place + 1) - 8, BUDGETS[example]
        title = f"{example.replace('_', ' ')}, {name}"
        parts.append(f'<text x="{left}" y="16">{title}</text>')
        for tick in (0.0, 0.5, 1.0):
            parts.append(f'<path d="M{left} {y(tick):.1f}H{right}" stroke="#868e96" opacity="0.3"/>')
            parts.append(f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
        parts.append(f'<text x="{right}" y="{bottom + 16}" text-anchor="end">{budget} rollouts</text>')
        cells = []
        for variant, colour in COLOURS.items():
            curves = json.loads((folder / variant / f"{example}-{name}.json").read_text(encoding="utf-8")).values()
            for curve in curves:
                corners, last = [], curve[0][1]
                for n, value in curve:  # a step: the prompt is in use until the next one is published
                    across = left + (right - left) * n / budget
                    corners += [f"{across:.1f},{y(last):.1f}", f"{across:.1f},{y(value):.1f}"]
                    last = value
                line = " ".join(corners)
                parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
                parts.append(f'<circle cx="{right}" cy="{y(last):.1f}" r="3.5" fill="{colour}"/>')
            ends = [curve[-1][1] for curve in curves]
            mean, half = mean_and_interval(ends)
            cells.append((f"{mean:.3f} ± {half:.3f}", ", ".join(f"{end:.3f}" for end in ends)))
        lines.append(f"| {title}, {budget} | {cells[0][0]} | {cells[1][0]} | {cells[0][1]} | {cells[1][1]} |")
    for place, (variant, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{32 + 60 * place}" y="{HEIGHT - 6}" fill="{colour}">{variant}</text>')
    caption = "test reward of the published prompt, one line for each of five seeds"
    parts.append(f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">{caption}</text></svg>')
    return "\n".join(parts) + "\n", "\n".join(lines)


def main() -> None:
    """Runs or draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    runs = commands.add_parser("run")
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--examples", nargs="+", choices=list(SEARCHES), default=list(SEARCHES))
    runs.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    draws = commands.add_parser("draw")
    draws.add_argument("folder", type=Path)
    draws.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "run":
        run(options.out, options.examples, options.seeds)
    else:
        picture, table = draw(options.folder)
        options.to.write_text(picture, encoding="utf-8")
        print(table)


if __name__ == "__main__":
    main()
