"""The strategy `ray`, on real clusters of this machine: results, environments, lost nodes, stopping."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray
from ray.cluster_utils import Cluster

import agentlightning as agl
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig
from agentlightning_plugins.shared.processes.ray_start import start_patiently
from tests.process import wait_for
from tests.waiting import LIMIT_S, until

TASKS = [{"number": number} for number in range(8)]


@contextlib.contextmanager
def ray_cluster(*cpus_of_nodes: int, **resources: float) -> Iterator[Cluster]:
    # Ray notices a lost node after a second rather than after its usual 15.
    fast = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
    head = {"num_cpus": cpus_of_nodes[0], "resources": resources, "include_dashboard": False, "_system_config": fast}
    cluster = start_patiently(lambda: Cluster(initialize_head=True, head_node_args=dict(head)))
    try:
        for num_cpus in cpus_of_nodes[1:]:
            start_patiently(functools.partial(cluster.add_node, num_cpus=num_cpus))
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster(4, place=1) as cluster:
        yield cluster


def squaring_agent(task: dict[str, int]) -> float:
    agl.emit_message(f"squaring {task['number']}")
    return float(task["number"] ** 2)


def reading_agent(task: Any) -> float:
    import ray_helper  # in the folder that is sent

    return float(ray_helper.read())


def fit(agent: Any, strategy: Any, algorithm: Any = "baseline", tasks: Any = TASKS) -> agl.LightningStore:
    store = agl.create_store("memory://")
    trainer = agl.Trainer(algorithm=algorithm, store=store, strategy=strategy, n_runners=2, trackers=[])
    assert trainer.fit(agent, tasks).status == "succeeded"
    return store


def results(store: agl.LightningStore) -> list[tuple[Any, ...]]:
    async def read() -> list[tuple[Any, ...]]:
        rollouts = (await store.query_rollouts()).items
        spans = [(await store.query_spans(rollout.rollout_id, "latest")).items for rollout in rollouts]
        return sorted(
            (str(rollout.input), rollout.mode, rollout.status, agl.find_final_reward(own), [span.name for span in own])
            for rollout, own in zip(rollouts, spans, strict=True)
        )

    return asyncio.run(read())


@pytest.mark.slow
def test_the_same_program_gives_the_same_results_with_ray_as_in_one_process(cluster: Cluster) -> None:
    found = results(fit(squaring_agent, {"name": "ray", "address": cluster.address}))
    assert found == results(fit(squaring_agent, "shm"))
    assert sorted(result[3] for result in found) == [float(number**2) for number in range(8)]


@pytest.mark.slow
def test_a_local_folder_and_environment_variables_are_sent_to_the_actors(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "answer.txt").write_text("40")
    (tmp_path / "ray_helper.py").write_text(
        "import os, pathlib\ndef read():\n"
        "    return float(pathlib.Path('answer.txt').read_text()) + float(os.environ['PLUS'])\n"
    )
    sent = {"working_dir": str(tmp_path), "env_vars": {"PLUS": "2"}}
    store = fit(reading_agent, {"name": "ray", "address": cluster.address, "runtime_env": sent}, tasks=[1])
    assert {result[3] for result in results(store)} == {42.0}


@pytest.mark.slow
def test_an_agent_that_no_actor_can_load_fails_the_run_immediately_with_one_error(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "vanishing_ray_agent.py"
    module.write_text("def agent(task):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import vanishing_ray_agent  # written above

    module.unlink()
    with pytest.raises(agl.ConfigError, match="cannot be loaded in a runner process: ModuleNotFoundError.*vanishing"):
        fit(vanishing_ray_agent.agent, {"name": "ray", "address": cluster.address})


def slow_agent(task: dict[str, Any]) -> float:
    node_id = ray.get_runtime_context().get_node_id()
    folder = Path(task["folder"])
    (folder / f"{task['number']}-{node_id}-{os.getpid()}").touch()
    while [path.stem for path in folder.glob("*.lost")] in ([], [node_id]):  # no rollout ends before a node is lost
        time.sleep(0.05)
    return float(task["number"])


@pytest.mark.soak
def test_killing_a_node_during_a_run_loses_no_rollout(cluster: Cluster, tmp_path: Path) -> None:
    tasks = [{"number": number, "folder": str(tmp_path)} for number in range(12)]
    add = functools.partial(cluster.add_node, num_cpus=1, resources={"place": 1})
    nodes = [start_patiently(add) for _ in range(2)]

    def begun() -> list[str]:
        return [path.name for path in tmp_path.iterdir() if path.suffix != ".lost"]

    @agl.algo
    async def algorithm(store: agl.LightningStore) -> None:
        config = RolloutConfig(max_attempts=3, retry_condition=["unresponsive"])
        queued = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=task, config=config) for task in tasks])
        await until(lambda: len({name.split("-")[1] for name in begun()}) == 2)
        victim = next(node for node in nodes if any(node.node_id in name for name in begun()))
        await asyncio.to_thread(cluster.remove_node, victim, allow_graceful=False)
        (tmp_path / f"{victim.node_id}.lost").touch()
        await store.wait_for_rollouts([rollout.rollout_id for rollout in queued])

    store = agl.InMemoryLightningStore(lease_s=100_000.0)  # so that only Ray reports the loss
    strategy = {"name": "ray", "address": cluster.address, "resources_per_runner": {"resources": {"place": 1}}}
    settings: dict[str, Any] = {"n_runners": 2, "max_concurrency": 2, "tracer": "dummy", "trackers": []}
    trainer = agl.Trainer(algorithm=algorithm, store=store, strategy=strategy, **settings)
    assert trainer.fit(slow_agent).status == "succeeded"
    found = results(store)
    assert sorted(result[3] for result in found) == [float(number) for number in range(12)]
    assert {result[2] for result in found} == {"succeeded"}
    starts = [name.split("-")[0] for name in begun()]
    assert len(starts) > len(set(starts)) == 12  # rollouts of the lost node ran again


def napping_agent(task: dict[str, Any]) -> float:
    node_id = ray.get_runtime_context().get_node_id()
    (Path(task["folder"]) / f"{task['number']}-{node_id}-{os.getpid()}").touch()
    time.sleep(0.2)
    return float(task["number"])


@pytest.mark.soak
def test_each_rollout_succeeds_while_both_nodes_are_killed_and_replaced_in_turn(tmp_path: Path) -> None:
    size, losses = 100, 6
    lost: list[str] = []

    def begun() -> list[tuple[int, str]]:
        names = [path.name.split("-") for path in tmp_path.iterdir()]
        return [(int(number), node_id) for number, node_id, _ in names]

    with ray_cluster(0, 2, 2) as cluster:
        nodes = list(cluster.worker_nodes)

        @agl.algo
        async def algorithm(store: agl.LightningStore) -> None:
            config = RolloutConfig(max_attempts=9, retry_condition=["unresponsive"])
            first, deadline = 0, time.monotonic() + 600
            while len(lost) < losses and time.monotonic() < deadline:
                tasks = [{"number": number, "folder": str(tmp_path)} for number in range(first, first + size)]
                requests = [EnqueueRolloutRequest(input=task, config=config) for task in tasks]
                queued = await store.enqueue_many_rollouts(requests)
                ids = [rollout.rollout_id for rollout in queued]
                waiting = asyncio.create_task(store.wait_for_rollouts(ids, timeout=120))
                victim = nodes[0]
                while not waiting.done():
                    await asyncio.sleep(0.05)
                    if any(number >= first and node_id == victim.node_id for number, node_id in begun()):
                        await asyncio.to_thread(cluster.remove_node, victim, allow_graceful=False)
                        lost.append(victim.node_id)
                        # Ray's nodes register a signal handler, so only the main thread can add one.
                        nodes[:] = [nodes[1], start_patiently(functools.partial(cluster.add_node, num_cpus=2))]
                        break
                assert len(await waiting) == size
                first += size

        trainer_store = agl.InMemoryLightningStore(lease_s=600.0)  # so long that only Ray reports the loss in time
        trainer = agl.Trainer(
            algorithm=algorithm,
            store=trainer_store,
            tracer="dummy",
            strategy={"name": "ray", "address": cluster.address},
            n_runners=3,
            max_concurrency=4,
            trackers=[],
        )
        assert trainer.fit(napping_agent).status == "succeeded"
    found = results(trainer_store)
    starts = begun()
    assert len(set(lost)) == losses
    assert {node_id for _, node_id in starts} >= set(lost)
    assert {result[2] for result in found} == {"succeeded"}
    assert sorted(result[3] for result in found) == [float(number) for number in range(len(found))]
    assert len(starts) > len({number for number, _ in starts}) == len(found)  # rollouts of lost nodes ran again


_STOPPED_PROGRAM = """
import asyncio, pathlib, time, agentlightning as agl
folder = pathlib.Path(FOLDER)
def agent(task):
    (folder / "begun").touch()
    while not (folder / "told").exists():
        time.sleep(0.01)
    return 1.0
store = agl.create_store("memory://")
try:
    strategy = {"name": "ray", "address": ADDRESS}
    agl.Trainer(algorithm="baseline", store=store, trackers=[], tracer="dummy", strategy=strategy).fit(agent, [1])
finally:
    rollout = asyncio.run(store.query_rollouts()).items[0]
    (folder / "ended").write_text(f"{asyncio.run(store.query_runs()).items[0].status} {rollout.status}")
"""


@pytest.mark.slow
def test_sigterm_lets_rollouts_of_actors_finish(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(_STOPPED_PROGRAM.replace("ADDRESS", repr(cluster.address)).replace("FOLDER", repr(str(tmp_path))))
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, str(script)], stdout=output, stderr=output)
    wait_for((tmp_path / "begun").exists, process, log)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: "stopping after" in log.read_text(), process, log)
    (tmp_path / "told").touch()
    assert process.wait(LIMIT_S) == 143, log.read_text()
    assert (tmp_path / "ended").read_text() == "interrupted succeeded"


@pytest.mark.soak
def test_agl_train_starts_its_own_cluster_when_no_address_is_given(tmp_path: Path) -> None:
    (tmp_path / "ray_agents.py").write_text("def agent(task):\n    print('hello from', task)\n    return task['n']\n")
    (tmp_path / "tasks.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    (tmp_path / "config.yaml").write_text(
        "agent: ray_agents:agent\ndata: {train: tasks.jsonl}\nalgorithm: {name: baseline, train_split: 1.0}\n"
        "strategy: {name: ray, resources_per_runner: {num_cpus: 0.5}}\nn_runners: 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "agentlightning", "train", "config.yaml", "--run-dir", "run"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        timeout=3 * LIMIT_S,  # Ray may need several starts
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "hello from {'n': 2}" in done.stdout, "the output of actors appears here"
    assert "ERROR" not in done.stderr
    assert "usage stat" not in done.stderr.lower()


def test_invalid_settings_of_ray_are_refused() -> None:
    make = agl.Trainer
    with pytest.raises(agl.ConfigError, match="has gpus; it can have num_cpus, num_gpus"):
        make(strategy={"name": "ray", "resources_per_runner": {"gpus": 1}})
    with pytest.raises(agl.ConfigError, match="set server_host"):
        make(strategy={"name": "ray", "address": "ray://head:10001"})


@pytest.mark.slow
def test_a_local_folder_is_refused_in_a_program_that_has_joined_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    ray.init(address=cluster.address)
    try:
        with pytest.raises(agl.ConfigError, match="give them to ray.init.*working_dir.*in this program"):
            fit(squaring_agent, {"name": "ray", "runtime_env": {"working_dir": str(tmp_path)}})
    finally:
        ray.shutdown()


def test_an_unreachable_cluster_is_named_before_ray_tries_for_minutes_to_join_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "init", Mock(side_effect=AssertionError))
    with pytest.raises(agl.ConfigError, match="'127.0.0.1:1': no Ray cluster was reached there: .*refused"):
        fit(squaring_agent, {"name": "ray", "address": "127.0.0.1:1"})
