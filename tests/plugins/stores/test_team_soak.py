"""A fleet under faults for 20 minutes: runners and a gateway on two servers over PostgreSQL.

Every fault occurs once before one occurs again, for the first half; in the second half, the memory of every process has
to stay flat. As root, PostgreSQL has a small disk of its own, which becomes full too. (``test_ray_strategy.py`` kills
nodes of Ray.)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from agentlightning.errors import StoreError
from agentlightning.resources import ProxyLLM
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig
from agentlightning_plugins.shared.scripted_model.server import ScriptedOpenAI
from agentlightning_plugins.stores.http.client import LightningStoreClient
from tests.plugins.stores.test_fleet_faults import Cable
from tests.port import reserve_port
from tests.postgresql import PostgresServer, running_server
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.soak

SOAK_S = float(os.environ.get("SOAK_S", "1200"))
GROWTH = 1.1
"""The most memory of a process at the end, as a multiple of that in the middle of the half without faults."""
FAULT_EVERY_S = 5.0
PAUSE_S = 3.0
AWAY_S = 55.0
"""How long the database is away: shorter than a lease, but longer than a call waits for it."""
SUSPENDED_S = 80.0
"""How long a runner is suspended: longer than a lease."""
WAVE, WAVE_EVERY_S = 10, 0.5
CONFIG = RolloutConfig(max_attempts=20, retry_condition=["unresponsive"])

AGENT = """
import http.client, json, time, urllib.request
import agentlightning as agl

def agent(task, llm: agl.LLM):
    agl.emit_message(str(task["number"]))
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {llm.api_key}"}
    while True:  # the gateway is killed too
        try:
            call = urllib.request.Request(llm.endpoint + "/chat/completions", body, headers)
            with urllib.request.urlopen(call, timeout=30) as answer:
                assert json.load(answer)["choices"]
            break
        except (OSError, http.client.HTTPException):
            time.sleep(0.2)
    time.sleep(0.05 + task["number"] % 7 / 20)
    return float(task["number"])
"""
SHIFT = "import time\nreal = time.time\ntime.time = lambda: real() + 300.0\n"


class Program:
    """A command of `agl` that is started again after it was killed."""

    def __init__(self, log: Path, *arguments: str, **variables: str) -> None:
        self._arguments, self._log = arguments, log
        self._environment = {**os.environ, **variables}
        self.process: asyncio.subprocess.Process
        self._is_expected_to_end = False
        self.ended_by_itself = 0

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agentlightning", *self._arguments),
                env=self._environment, stdout=log, stderr=log,
            )  # fmt: skip

    def memory(self) -> dict[int, float]:
        """Returns the resident bytes of the command and its children, by process."""
        page = os.sysconf("SC_PAGE_SIZE")
        found = {pid: Path(f"/proc/{pid}/statm") for pid in self.pids()}
        return {pid: int(path.read_text().split()[1]) * page for pid, path in found.items() if path.exists()}

    def pids(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [self.process.pid, *map(int, children.read_text().split())]

    async def restart(self, number: int) -> None:
        """Ends the command by a signal and starts it again; SIGKILL is sent to its children too."""
        self._is_expected_to_end = True
        for pid in self.pids() if number == signal.SIGKILL else [self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        await self.process.wait()
        await self.start()
        self._is_expected_to_end = False

    async def kill_child(self) -> None:
        for child in self.pids()[1:]:
            os.kill(child, signal.SIGKILL)

    async def suspend(self, seconds: float) -> None:
        pids = self.pids()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            await asyncio.sleep(seconds if number == signal.SIGSTOP else 0)

    async def keep_running(self) -> None:
        """Starts the command again whenever it ends by itself, and counts these ends."""
        while True:
            await self.process.wait()
            if not self._is_expected_to_end:
                self.ended_by_itself += 1
                await self.start()
            await asyncio.sleep(0.2)


class Tokens:
    """The file with the token of the store, which is replaced as docs/operations.md says."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        path.write_text("token-0\n")

    async def rotate(self) -> None:
        old, new = f"token-{self._number}", f"token-{self._number + 1}"
        self._number += 1
        for text in (f"{old}\n{new}\n", f"{new}\n{old}\n"):
            self._path.write_text(text)
            await asyncio.sleep(2 * PAUSE_S)  # the old one stays: rollouts that began with it have not ended


async def kill_database(place: PostgresServer, away_s: float = 0.0) -> None:
    place.kill()
    await asyncio.sleep(away_s)
    await asyncio.to_thread(place.start)


async def restart_one_after_the_other(programs: list[Program]) -> None:
    for program in programs:
        await program.restart(signal.SIGTERM)
        await asyncio.sleep(PAUSE_S)


async def fill_disk(place: PostgresServer) -> None:
    """Leaves the database no space for a while. PostgreSQL ends if it finds none for its log of writes."""
    ballast = place.folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 20)):
            pass
    await asyncio.sleep(2 * PAUSE_S)
    ballast.unlink()
    while True:
        try:
            return await asyncio.to_thread(place.start)
        except RuntimeError:  # it ended meanwhile
            await asyncio.sleep(1.0)


def deal_faults(
    chance: random.Random,
    servers: list[Program],
    gateway: Program,
    runners: list[Program],
    place: PostgresServer,
    tokens: Tokens,
    cables: list[Cable],
) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    """Returns every fault once, shuffled, for one of the servers and one of the runners."""
    server, runner = chance.choice(servers), chance.choice(runners)
    faults: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("restart the servers one after the other", lambda: restart_one_after_the_other(servers)),
        ("rotate the token", tokens.rotate),
        ("kill the database", lambda: kill_database(place)),
        ("take the database away", lambda: kill_database(place, AWAY_S)),
        ("kill a runner", lambda: runner.restart(signal.SIGKILL)),
        ("kill the process of a runner", runner.kill_child),
        ("restart a runner", lambda: runner.restart(signal.SIGTERM)),
        ("suspend a runner until it loses its leases", lambda: runner.suspend(SUSPENDED_S)),
        ("leave connections half open", lambda: cut(cables)),
    ]
    for name, program in (("a server", server), ("the gateway", gateway)):
        faults += [
            (f"kill {name}", functools.partial(program.restart, signal.SIGKILL)),
            (f"suspend {name}", functools.partial(program.suspend, PAUSE_S)),
            (f"restart {name}", functools.partial(program.restart, signal.SIGTERM)),
        ]
    if place.folder.parent.is_mount():
        faults.append(("fill the disk", lambda: fill_disk(place)))
    chance.shuffle(faults)
    return faults


async def cut(cables: list[Cable]) -> None:
    for cable in cables:
        cable.cut()


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """Yields a folder that is a disk of its own if the test may mount one."""
    folder = Path(tempfile.mkdtemp(prefix="agl-", dir="/tmp"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=2g,mode=755", "tmpfs", str(folder)]
    is_mounted = os.geteuid() == 0 and subprocess.run(mount, check=False).returncode == 0
    try:
        yield folder
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


async def test_every_rollout_succeeds_exactly_once_while_each_part_of_the_fleet_fails_and_memory_stays_flat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "wrong_clock").mkdir()
    (tmp_path / "wrong_clock" / "sitecustomize.py").write_text(SHIFT)
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "wrong_clock"), os.environ.get("PYTHONPATH", "")])}
    tokens = Tokens(tmp_path / "tokens")
    monkeypatch.setenv("AGL_TOKEN_FILE", str(tmp_path / "tokens"))
    stack = contextlib.AsyncExitStack()
    model = await stack.enter_async_context(ScriptedOpenAI())
    chance = random.Random(int(os.environ.get("SOAK_SEED", "18")))
    with small_disk() as disk, running_server(disk) as place:
        ports = [reserve_port(), reserve_port()]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        cables = [Cable(port) for port in ports]
        through = [await stack.enter_async_context(cable.plugged()) for cable in cables]
        servers = [
            Program(tmp_path / f"server-{port}", "store", "--backend", place.url(), "--port", str(port), "--wait", "60")
            for port in ports
        ]
        runners = [
            Program(
                tmp_path / f"runner-{number}",
                *("runner", str(tmp_path / "agent.py") + ":agent", "--max-concurrency", "4"),
                *("--store", ",".join(through if number == 0 else urls)),
                **(paths if number == 3 else {}),
            )
            for number in range(4)
        ]
        gateway_port = reserve_port()
        config = tmp_path / "gateway.yaml"
        models = [{"model": "m", "endpoint": model.endpoint}]
        config.write_text(json.dumps({"model_list": models, "port": gateway_port, "require_keys": True}))
        arguments = ("--config", str(config), "--store", ",".join(urls))
        gateway = Program(tmp_path / "gateway-1", "gateway", *arguments)
        programs = [*servers, gateway, *runners]
        client = LightningStoreClient(",".join(urls), retry_s=10 * LIMIT_S)
        keeping: list[asyncio.Task[None]] = []
        done: Counter[str] = Counter()
        try:
            for server in servers:
                await server.start()
            await client.statistics()
            endpoint = f"http://127.0.0.1:{gateway_port}/v1"
            await client.add_resources({"llm": ProxyLLM(endpoint=endpoint, model="m", api_key="agentlightning")})
            for program in (gateway, *runners):
                await program.start()
            keeping += [asyncio.create_task(program.keep_running()) for program in programs]
            numbers: dict[str, int] = {}
            refused: Counter[str] = Counter()
            is_over = asyncio.Event()
            name = "none"

            async def load() -> None:
                while not is_over.is_set():
                    requests = [
                        EnqueueRolloutRequest(input={"number": number}, rollout_id=f"ro-{number}", config=CONFIG)
                        for number in range(len(numbers), len(numbers) + WAVE)
                    ]
                    try:
                        waiting = await client.query_rollouts(status_in=["queuing", "requeuing"], limit=0)
                        if waiting.total <= 5 * WAVE:  # a slow machine has a short queue too
                            await enqueue(requests)
                    except StoreError:
                        refused[name] += 1
                    await asyncio.sleep(WAVE_EVERY_S)

            async def enqueue(requests: list[EnqueueRolloutRequest]) -> None:
                """Sends them until they are stored: an error may come after that, and repeating them is harmless."""
                while True:
                    try:
                        await client.enqueue_many_rollouts(requests)
                        numbers.update({str(request.rollout_id): request.input["number"] for request in requests})
                        return
                    except StoreError:
                        refused[name] += 1
                        await asyncio.sleep(WAVE_EVERY_S)

            async def go_on(seconds: float) -> None:
                await asyncio.wait({loading}, timeout=seconds)
                assert not loading.done(), loading.exception()

            begun = time.monotonic()
            loading = asyncio.create_task(load())
            is_dealt = False
            while not is_dealt or time.monotonic() < begun + SOAK_S / 2:
                for name, fault in deal_faults(chance, servers, gateway, runners, place, tokens, cables):
                    await go_on(FAULT_EVERY_S)
                    if is_dealt and time.monotonic() > begun + SOAK_S / 2:
                        break
                    print(f"{time.monotonic() - begun:.0f} s: {name}; {len(numbers)} rollouts", flush=True)
                    await fault()
                    done[name] += 1
                is_dealt = True
            await go_on(SOAK_S / 4)
            middle = {pid: size for program in programs for pid, size in program.memory().items()}
            await go_on(SOAK_S / 4)
            end = {pid: size for program in programs for pid, size in program.memory().items()}
            growth = {pid: end[pid] / size for pid, size in middle.items() if pid in end}
            print(f"memory: {[f'{end[pid] / 1e6:.0f} MB, {value:.3f}' for pid, value in growth.items()]}")
            is_over.set()
            await loading
            rollouts = []
            for first in range(0, len(numbers), 500):
                some = list(numbers)[first : first + 500]
                rollouts += await client.wait_for_rollouts(some, timeout=300)
            assert len(rollouts) == len(numbers)
            for rollout in rollouts:
                if rollout.status != "succeeded":
                    print(rollout, list(await client.query_attempts(rollout.rollout_id)))
            assert Counter(rollout.status for rollout in rollouts) == {"succeeded": len(numbers)}
            stored = await client.query_rollouts(limit=0)
            assert (stored.total, (await client.statistics())["rollouts"]) == (len(numbers), len(numbers))
            counted = await client.query_rollouts(status_in=["succeeded"], limit=0)
            assert counted.total == len(numbers)
            retried = 0
            for rollout in rollouts:
                attempts = await client.query_attempts(rollout.rollout_id)
                statuses = Counter(attempt.status for attempt in attempts)
                assert statuses["succeeded"] == 1, attempts
                assert set(statuses) <= {"succeeded", "unresponsive"}, attempts
                (succeeded,) = [attempt for attempt in attempts if attempt.status == "succeeded"]
                assert succeeded.reward == float(numbers[rollout.rollout_id])
                retried += len(attempts) - 1
            print(f"{len(numbers)} rollouts, {retried} repeated attempts; faults: {done}; calls refused: {refused}")
            assert set(refused) <= {"fill the disk", "kill the database", "take the database away"}
            calls = await client.query_spans(None, name_contains="chat", limit=0)
            assert calls.total >= len(numbers)
            assert len(growth) >= len(programs)
            assert max(growth.values()) < GROWTH
            assert {
                name: program.ended_by_itself for name, program in zip("abg1234", programs, strict=True)
            } == dict.fromkeys("abg1234", 0), "programs that ended by themselves"
        finally:
            for task in keeping:
                task.cancel()
            for program in programs:
                if hasattr(program, "process"):
                    for pid in [] if program.process.returncode is not None else program.pids():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    await program.process.wait()
            for log in tmp_path.glob("*-*"):  # noqa: ASYNC240 # at the end
                print(f"--- {log.name}\n{log.read_text()[-3000:]}")
            await client.close()
            await stack.aclose()
