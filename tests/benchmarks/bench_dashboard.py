"""Response times of the dashboard's pages: ``python tests/benchmarks/bench_dashboard.py [--rollouts 1000000]``.

SQL fills an SQLite file, and then a PostgreSQL database, with rollouts, among them one of 5,000 spans and one of
100,000 trained tokens. ``agl store`` serves them. Each page and its JSON version is requested several times; the time
is measured until the last byte. ``--dashboards 20`` also runs rollouts on that server, alternately without and with
20 open pages, which reload when the server reports a change of their run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agentlightning.resources import PromptTemplate
from agentlightning.store.factory import create_store
from agentlightning.types import Span
from agentlightning_plugins.dashboard.rollouts import SORTS
from agentlightning_plugins.shared.training_records.record import LedgerEntry, TrainedCall, TrainedRow
from agentlightning_plugins.stores.http.client import LightningStoreClient
from tests.benchmarks.bench_store import RUNNERS, run_one
from tests.benchmarks.bench_store_server import Server, serve
from tests.many_rollouts import ROLLOUTS_OF_STEP, fill_postgresql, fill_sqlite
from tests.postgresql import running_server

RUN = "many"
PAGE_MS, LARGE_MS = 200.0, 2000.0
SPANS, TOKENS = 5_000, 100_000
STEPS = 1_000
BATCH = 500


async def add_large(url: str) -> None:
    """Adds the run, its metrics, and the two large rollouts."""
    store = create_store(url)
    await store.create_run("Many rollouts", run_id=RUN, config={"algorithm": {"name": "grpo", "steps": STEPS}})
    run = store.with_run(RUN)
    for step in range(1, STEPS + 1):
        values = {"reward": step / STEPS, "entropy": 0.5, "grad_norm": 1.0, "sample_s": 20.0, "train_s": 14.0}
        values |= {"val_reward": step / STEPS} if step % 100 == 1 else {}
        await run.add_resources({"prompt": PromptTemplate(f"Step {step}. " + "Answer: {question} " * 20)})
        await run.add_metrics(step, values | {"outcome/trained": 400.0, "outcome/flat_group": 112.0})
    for name in ("ro-spans", "ro-tokens"):
        await run.enqueue_rollout({"question": name}, mode="train", metadata={"step": -1}, rollout_id=name)
        claimed = await run.dequeue_rollout("runner")
        assert claimed is not None
        place = (name, claimed.attempt.attempt_id)
        if name == "ro-spans":
            spans = make_spans(*place)
            for start in range(0, len(spans), BATCH):
                await run.add_many_spans(spans[start : start + BATCH])
        else:
            await run.add_many_spans(
                [make_row(*place).to_span(), LedgerEntry(*place, 1, "g", "trained", 1.0).to_span()]
            )
        await run.update_attempt(*place, status="succeeded", reward=1.0)
    await store.close()


def make_spans(rollout_id: str, attempt_id: str) -> list[Span]:
    """Returns a tree of spans; every tenth span is a model call with two messages."""
    begin = time.time() - SPANS
    asked = '[{"role":"user","content":"How long does it take?"}]'
    answered = '[{"role":"assistant","content":"Two hours, I think."}]'
    chat = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": asked, "gen_ai.output.messages": answered}
    return [
        Span.from_attributes(
            name="chat" if number % 10 == 1 else "step",
            attributes=chat if number % 10 == 1 else {"number": number},
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            trace_id="0" * 31 + "1",
            span_id=f"{number + 1:016x}",
            parent_id=f"{number // 10 * 10 + 1:016x}" if number % 10 else None,
            start_time=begin + number,
            end_time=begin + number + 0.5,
        )
        for number in range(SPANS)
    ]


def make_row(rollout_id: str, attempt_id: str) -> TrainedRow:
    return TrainedRow(
        rollout_id,
        attempt_id,
        step=1,
        prompt_ids=list(range(100)),
        response_ids=[number % 30_000 for number in range(TOKENS)],
        mask=[int(number % 1000 < 900) for number in range(TOKENS)],
        logprobs=[-(number % 70) / 10 for number in range(TOKENS)],
        trainer_logprobs=[-(number % 70) / 10 - 0.001 for number in range(TOKENS)],
        calls=[TrainedCall(f"resp-{start}", start, start + 1000, 0.5, 0) for start in range(0, TOKENS, 1000)],
        reward=1.0,
        texts={number: f" word{number}" for number in range(30_000)},
    )


async def list_pages(url: str, rollouts: int) -> dict[str, float]:
    """Returns the paths to request, each with the longest allowed time in milliseconds."""
    store = create_store(url).with_run(RUN)
    some = (await store.query_rollouts(limit=1, offset=rollouts // 2))[0]
    version = (await store.query_resources(limit=1, offset=STEPS // 2))[0].version_id
    await store.close()
    run, step = f"/runs/{RUN}", rollouts // ROLLOUTS_OF_STEP // 2
    pages = ("/", run, f"{run}/rollouts", f"{run}/rollouts?before={rollouts // 2}", f"{run}/rollouts?before=60")
    filters = (
        "status=failed",
        f"step={step}",
        "task_id=7",
        f"task_id=7&before={rollouts // 200}",
        "min=0.5",
        "text=zzz",
    )
    filters += (f"text=zzz&before={rollouts // 2}", "status=failed&min=0.5", "status=succeeded&mode=val")
    filters += tuple(f"sort={order.replace(' ', '+')}" for order in SORTS)
    filters += ("sort=highest+reward&before=1000", "sort=longest&status=failed", f"sort=lowest+reward&step={step}")
    filters += ("sort=highest+reward&text=zzz", "sort=longest&text=zzz&messages=1", "text=zzz&messages=1")
    pages += tuple(f"{run}/rollouts?{one}" for one in filters)
    pages += (f"{run}/rollouts/{some.rollout_id}", f"{run}/ledger", f"{run}/ledger?step={step}")
    pages += (f"{run}/group?name={rollouts // 16}-0", f"{run}/resources", f"{run}/resources?offset=500", "/fleet")
    pages += (f"{run}/resources/{version}", f"/compare?a={RUN}&b=default", f"/compare?a={RUN}&b={RUN}")
    large = {f"{run}/rollouts/ro-spans": LARGE_MS, f"{run}/rollouts/ro-tokens/tokens": LARGE_MS}
    return dict.fromkeys(pages, PAGE_MS) | large | {f"{run}/rollouts/ro-tokens/tokens?by=gap&start=50000": LARGE_MS}


def twin(path: str) -> str:
    """Returns the path of a page's JSON version."""
    name, mark, query = path.partition("?")
    return f"{'/index' if name == '/' else name}.json{mark}{query}"


async def show_pages(server: Server, pages: dict[str, float], requests: int) -> None:
    slow = 0
    async with aiohttp.ClientSession(server.url) as session:
        for path, wanted in pages.items():
            times: dict[str, list[float]] = {}
            size, cpu = 0, server.cpu_s()
            for _ in range(requests):
                for kind, target in (("page", path), ("json", twin(path))):
                    begun = time.perf_counter()
                    async with session.get(target) as response:
                        body = await response.read()
                        assert response.status == 200, (target, response.status, body[-300:])
                    times.setdefault(kind, []).append((time.perf_counter() - begun) * 1e3)
                    size = max(size, len(body))
            cpu = (server.cpu_s() - cpu) / requests / 2 * 1e3
            medians = {kind: statistics.median(taken) for kind, taken in times.items()}
            slow += any(taken > wanted for taken in medians.values())
            print(
                f"  {path.replace(f'/runs/{RUN}', '/RUN'):48} {medians['page']:7.0f} ms (at most "
                f"{max(times['page']):5.0f}), JSON {medians['json']:5.0f} ms, CPU {cpu:5.0f} ms, {size / 1e3:7.0f} kB"
                + ("   SLOW" if medians["page"] > wanted else ""),
                flush=True,
            )
    print(f"  {slow} of {len(pages)} pages above the limit ({PAGE_MS:.0f} ms, the last three {LARGE_MS:.0f} ms)")


async def watch(url: str, run_id: str, dashboards: int) -> None:
    """Keeps pages open, as browsers do: each reloads when the server reports a change of its run."""
    paths = (f"/runs/{run_id}", f"/runs/{run_id}/rollouts", "/", "/fleet")
    reloads = 0

    async def show(session: aiohttp.ClientSession, path: str) -> None:
        nonlocal reloads
        async with session.get(f"/live/{run_id}") as stream:
            async for line in stream.content:
                if line.startswith(b"event: changed"):
                    async with session.get(path) as response:
                        await response.read()
                    reloads += 1

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        shown = [asyncio.create_task(show(session, paths[number % len(paths)])) for number in range(dashboards)]
        print(flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        for task in shown:
            task.cancel()
        await asyncio.wait(shown)
    print(reloads, flush=True)


@contextlib.contextmanager
def watching(server: Server, dashboards: int, counts: list[int]) -> Iterator[None]:
    if not dashboards:
        yield
        return
    command = [sys.executable, __file__, "--watch", server.url, "--dashboards", str(dashboards)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        counts.append(int(process.communicate("\n")[0]))


async def measure_load(server: Server, seconds: float) -> tuple[float, float]:
    """Returns rollouts per second, and the server's CPU milliseconds per rollout."""
    store = LightningStoreClient(server.url).with_run(RUN)
    begun, cpu, done = time.monotonic(), server.cpu_s(), 0

    async def work() -> None:
        nonlocal done
        while time.monotonic() - begun < seconds:
            await run_one(store, done)
            done += 1

    await asyncio.gather(*(work() for _ in range(RUNNERS)))
    await store.close()
    return done / (time.monotonic() - begun), (server.cpu_s() - cpu) / done * 1e3


async def show_load(server: Server, dashboards: int, seconds: float, rounds: int) -> None:
    speeds: dict[int, list[float]] = {0: [], dashboards: []}
    costs: dict[int, list[float]] = {0: [], dashboards: []}
    counts: list[int] = []
    for number in range(rounds * 2 + 1):
        open_pages = dashboards if number % 2 else 0
        with watching(server, open_pages, counts):
            speed, cost = await measure_load(server, seconds)
        if number:  # the first round warms up
            speeds[open_pages].append(speed)
            costs[open_pages].append(cost)
    speed, watched = statistics.median(speeds[0]), statistics.median(speeds[dashboards])
    print(
        f"  {speed:,.0f} rollouts/s, with {dashboards} open dashboards {watched:,.0f}: {watched / speed:.3f} times "
        f"(rounds {[round(one / two, 2) for one, two in zip(speeds[dashboards], speeds[0], strict=True)]}); the "
        f"server's CPU {statistics.median(costs[0]):.2f} and {statistics.median(costs[dashboards]):.2f} ms a rollout; "
        f"{sum(counts) / len(counts) / seconds:.1f} reloads/s"
    )


@contextlib.asynccontextmanager
async def filled(name: str, folder: Path, rollouts: int, spans: int) -> AsyncIterator[str]:
    """Yields the URL of a database with ``rollouts`` rollouts, and deletes the database afterwards."""
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        if name == "sqlite":
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder))) / "store.db"
            url = f"sqlite:///{place}"
            await add_large(url)
            fill_sqlite(place, rollouts, spans=spans, run_id=RUN)
        else:
            server = stack.enter_context(running_server(folder))
            url = server.url(server.lend_database())
            await add_large(url)
            await fill_postgresql(url, rollouts, spans=spans, run_id=RUN)
        print(
            f"{name}, {rollouts:,} rollouts of {spans} spans, written in {time.monotonic() - begun:.0f} s", flush=True
        )
        yield url


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--spans", type=int, default=1, help="spans of each rollout")
    parser.add_argument("--only", choices=["sqlite", "postgresql"])
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--dashboards", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=12.0, help="seconds of a round with open dashboards")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder of the databases")
    parser.add_argument("--watch", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watch:
        await watch(arguments.watch, RUN, arguments.dashboards)
        return
    for name in [arguments.only] if arguments.only else ["sqlite", "postgresql"]:
        async with filled(name, arguments.folder, arguments.rollouts, arguments.spans) as url:
            pages = await list_pages(url, arguments.rollouts)
            with serve("-m", "agentlightning", "store", "--port", "0", "--backend", url) as server:
                await show_pages(server, pages, arguments.requests)
                if arguments.dashboards:
                    await show_load(server, arguments.dashboards, arguments.seconds, arguments.rounds)


if __name__ == "__main__":
    asyncio.run(main())
