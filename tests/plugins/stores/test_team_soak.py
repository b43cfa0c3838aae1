"""A fleet under faults for 20 minutes: runners and a gateway on two servers over PostgreSQL.

A fault every five seconds in the first half; in the second half, the memory of every process has to stay flat. As root,
PostgreSQL has a small disk of its own, which becomes full too. (``test_ray_strategy.py`` kills nodes of Ray.)
"""

from __future__ import annotations

import asyncio
import contextlib
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
from tests.port import reserve_port
from tests.postgresql import PostgresServer, running_server
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.soak

SOAK_S = float(os.environ.get("SOAK_S", "1200"))
GROWTH = 1.1
"""The most memory of a process at the end, as a multiple of that in the middle of the half without faults."""
FAULT_EVERY_S = 5.0
PAUSE_S = 3.0
WAVE, WAVE_EVERY_S = 10, 0.5
CONFIG = RolloutConfig(max_attempts=20, retry_condition=["unresponsive"])

AGENT = """
import json, time, urllib.request
import agentlightning as agl

def agent(task, llm: agl.LLM):
    agl.emit_message(str(task["number"]))
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {llm.api_key}"}
    for left in reversed(range(300)):  # the gateway is killed too
        try:
            call = urllib.request.Request(llm.endpoint + "/chat/completions", body, headers)
            with urllib.request.urlopen(call, timeout=30) as answer:
                assert json.load(answer)["choices"]
            break
        except OSError:
            if not left:
                raise
            time.sleep(0.2)
    time.sleep(0.05 + task["number"] % 7 / 20)
    return float(task["number"])
"""
SHIFT = "import time\nreal = time.time\ntime.time = lambda: real() + 90.0\n"


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

    async def pause(self) -> None:
        pids = self.pids()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            await asyncio.sleep(PAUSE_S if number == signal.SIGSTOP else 0)

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


async def restart_database(place: PostgresServer) -> None:
    place.kill()
    await asyncio.to_thread(place.start)


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
        servers = [
            Program(tmp_path / f"server-{port}", "store", "--backend", place.url(), "--port", str(port), "--wait", "60")
            for port in ports
        ]
        runners = [
            Program(
                tmp_path / f"runner-{number}",
                *("runner", str(tmp_path / "agent.py") + ":agent", "--max-concurrency", "4"),
                *("--store", ",".join(urls if number % 2 else reversed(urls))),
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

            async def load() -> None:
                ends_at = time.monotonic() + SOAK_S
                while time.monotonic() < ends_at:
                    waiting = await client.query_rollouts(status_in=["queuing", "requeuing"], limit=0)
                    if waiting.total > 5 * WAVE:  # a slow machine has a short queue too
                        await asyncio.sleep(WAVE_EVERY_S)
                        continue
                    wave = {f"ro-{len(numbers) + more}": len(numbers) + more for more in range(WAVE)}
                    requests = [
                        EnqueueRolloutRequest(input={"number": number}, rollout_id=rollout_id, config=CONFIG)
                        for rollout_id, number in wave.items()
                    ]
                    try:
                        await client.enqueue_many_rollouts(requests)
                    except StoreError as error:
                        if "the disk is full; this write was not stored" not in str(error):
                            raise
                    else:
                        numbers.update(wave)
                    await asyncio.sleep(WAVE_EVERY_S)

            begun = time.monotonic()
            loading = asyncio.create_task(load())
            while not loading.done() and time.monotonic() < begun + SOAK_S / 2:
                await asyncio.wait({loading}, timeout=FAULT_EVERY_S)
                name, fault = choose_fault(chance, [*servers, gateway], runners, place, tokens)
                done[name] += 1
                await fault()
            await asyncio.wait({loading}, timeout=max(0.0, begun + SOAK_S * 0.75 - time.monotonic()))
            middle = {pid: size for program in programs for pid, size in program.memory().items()}
            await loading
            end = {pid: size for program in programs for pid, size in program.memory().items()}
            growth = {pid: end[pid] / size for pid, size in middle.items() if pid in end}
            print(f"memory: {[f'{end[pid] / 1e6:.0f} MB, {value:.3f}' for pid, value in growth.items()]}")
            assert len(growth) >= len(programs)
            assert max(growth.values()) < GROWTH
            rollouts = []
            for first in range(0, len(numbers), 500):
                some = list(numbers)[first : first + 500]
                rollouts += await client.wait_for_rollouts(some, timeout=300)
            assert len(rollouts) == len(numbers)
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
            print(f"{len(numbers)} rollouts, {retried} repeated attempts; faults: {dict(done)}")
            assert sum(done.values()) >= SOAK_S / (4 * (FAULT_EVERY_S + 4 * PAUSE_S))
            calls = await client.query_spans(None, name_contains="chat", limit=0)
            assert calls.total >= len(numbers)
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


def choose_fault(
    chance: random.Random, servers: list[Program], runners: list[Program], place: PostgresServer, tokens: Tokens
) -> tuple[str, Callable[[], Awaitable[None]]]:
    server, runner = chance.choice(servers), chance.choice(runners)
    disk = [("fill the disk", lambda: fill_disk(place))] if place.folder.parent.is_mount() else []
    return chance.choice(
        [
            *disk,
            ("kill a server or the gateway", lambda: server.restart(signal.SIGKILL)),
            ("stop a server or the gateway", server.pause),
            ("restart a server or the gateway", lambda: server.restart(signal.SIGTERM)),
            ("rotate the token", tokens.rotate),
            ("kill the database", lambda: restart_database(place)),
            ("kill a runner", lambda: runner.restart(signal.SIGKILL)),
            ("kill the process of a runner", runner.kill_child),
            ("stop a runner", runner.pause),
        ]
    )
