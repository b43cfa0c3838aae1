"""Uses the components of all packages as their users would, in an environment that has them installed."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.plugin import get_manager
from agentlightning.testing.agent import Answer, ScriptedOpenAI
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.demo.training import CHECKPOINT


def fit(folder: Path, agent: Any, algorithm: Any, tasks: list[Any], **more: Any) -> agl.LightningStore:
    store = agl.create_store(f"sqlite:///{folder}/store.db")
    more = {"strategy": "shm", "trackers": [], **more}
    agl.Trainer(algorithm=algorithm, store=store, run_dir=folder, **more).fit(agent, tasks, tasks)
    return store


def store_and_trackers(folder: Path) -> None:
    """A run in an LMDB store, with both trackers and the exporter."""
    assert get_manager().create("adapter", "calls").adapt([]) == []
    posted: list[dict[str, Any]] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    get_manager().configure({"acme_export": {"file": str(folder / "spans.jsonl")}})
    store = agl.create_store(f"lmdb://{folder}/lmdb")
    trackers = ["csv", {"name": "webhook", "url": f"http://127.0.0.1:{server.server_port}/"}]
    trainer = agl.Trainer(
        algorithm="baseline",
        store=store,
        run_dir=folder,
        strategy="shm",
        trackers=trackers,
        tracer={"name": "prefixed", "prefix": "my."},
    )
    trainer.fit(lambda task: float(task), [0, 1])
    rollouts = asyncio.run(store.query_rollouts()).items
    assert [rollout.status for rollout in rollouts] == ["succeeded"] * len(rollouts)
    assert len(rollouts) >= 2
    asyncio.run(store.close())
    server.shutdown()
    assert "reward" in (folder / "metrics.csv").read_text()
    assert {"run", "metrics", "samples"} <= {key for body in posted for key in body}
    exported = [json.loads(line) for line in (folder / "spans.jsonl").read_text().splitlines()]
    assert {line["rollout"] for line in exported} == {rollout.rollout_id for rollout in rollouts}
    assert any(line["span"].startswith("my.") for line in exported), exported


def climb(folder: Path) -> None:
    """The optimiser, killed after its first trials, resumed, and what it publishes."""
    if len(sys.argv) > 2:
        killed = climbing(folder, kill_at=5)
        raise AssertionError(killed)
    done = subprocess.run([sys.executable, __file__, str(folder), "climb"], check=False)
    assert done.returncode == -signal.SIGKILL
    store = climbing(folder, kill_at=None)
    latest = asyncio.run(store.get_latest_resources())
    assert latest is not None
    assert latest.resources["prompt"].template == "Say {task} loudly"
    rollouts = asyncio.run(store.query_rollouts()).items
    assert len(rollouts) == 6  # three prompts on two tasks, none twice


def climbing(folder: Path, kill_at: int | None) -> agl.LightningStore:
    @agl.prompt_rollout
    def agent(task: str, prompt_template: agl.PromptTemplate) -> float:
        counter = folder / "calls"
        counter.write_text(str(int(counter.read_text()) + 1 if counter.exists() else 1))
        if int(counter.read_text()) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return float("loudly" in prompt_template.template)

    algorithm = {"name": "climb", "endings": [" loudly", " softly"]}
    more = {"initial_resources": {"prompt": "Say {task}"}, "n_runners": 1, "max_concurrency": 1}
    return fit(folder, agent, algorithm, ["a", "b"], resume=(folder / "run.json").is_file(), **more)


def losses(folder: Path) -> None:
    """A training whose every part comes from a package."""
    algorithm = {
        "name": "grpo",
        "model": str(CHECKPOINT),
        "steps": 1,
        "tasks_per_step": 2,
        "rollouts_per_task": 2,
        "eval_every": 0,
        "sampling": {"temperature": 1.0, "max_tokens": 24},
        "task_sampler": "hardest",
        "extra_metrics": ["spread"],
        "experience": {
            "estimator": {"name": "maxrl", "temperature": 2},
            "reward_shaping": {"name": "brief", "weight": 0.2},
            "rollout_filter": "rewarded",
            "keep_flat_groups": True,
        },
        "update": {
            "objective": {"name": "soft_gate", "temperature": 2.0},
            "aggregation": "square_root",
            "schedule": {"name": "warmup", "share": 0.0},
        },
        "train_threads": 1,
    }
    store = fit(folder, calculator_agent, algorithm, make_problems("train", 4))
    (step,) = [entry.values for entry in asyncio.run(store.query_metrics()).items if "rows" in entry.values]
    assert {"reward_spread", "loss"} <= set(step), sorted(step)
    manager = get_manager()
    assert manager.create("advantage", "ranks") is not None
    assert manager.create("policy_loss", {"name": "reinforce", "scale": 0.5}) is not None


def rewards(folder: Path) -> None:
    """Rewards of both forms, and credit."""

    def agent(task: dict[str, str]) -> str:
        return task["answer"]

    for reward in ({"name": "exact", "key": "answer"}, {"name": "pattern", "pattern": "^4"}):
        run = folder / str(reward["name"])
        wrapped = agl.wrap(agent, reward=reward)
        store = fit(run, wrapped, "baseline", [{"answer": "42"}], adapter={"name": "triplet", "credit": "last"})
        rollouts = asyncio.run(store.query_rollouts()).items
        assert {rollout.attempt.reward for rollout in rollouts} == {1.0}
    with pytest.raises(agl.ConfigError, match=r"pattern = '\('"):
        get_manager().create("reward", {"name": "pattern", "pattern": "("})


def parrot(folder: Path) -> None:
    """An object of the framework, its callbacks, and a run that a configuration describes."""
    import acme_parrot

    said: list[str] = []

    def note(task: str, output: str, rollout: agl.Rollout) -> float:
        said.append(output)
        return 1.0

    wrapped = agl.wrap(acme_parrot.Parrot("Hi"), reward=note, prompts=["greeting"])
    fit(folder, wrapped, "baseline", ["you"], initial_resources={"greeting": "Hello"})
    assert set(said) == {"Hello you"}
    assert not acme_parrot.instrumented  # the tracer has gone
    (folder / "tasks.seeds").write_text("one\ntwo\nthree\n")
    config = {
        "agent": {"name": "parrot", "greeting": "Ahoy", "reward": {"name": "pattern", "pattern": "^Ahoy"}},
        "data": {"train": {"source": str(folder / "tasks.seeds"), "reader": {"name": "seeds", "limit": 2}}},
        "algorithm": "baseline",
        "strategy": "shm",
        "run_dir": str(folder / "configured"),
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    subprocess.run([sys.executable, "-m", "agentlightning", "train", str(folder / "config.yaml")], check=True)
    store = agl.create_store(f"sqlite:///{folder}/configured/store.db")
    rollouts = asyncio.run(store.query_rollouts()).items
    assert {(r.input, r.attempt.reward) for r in rollouts} == {("one", 1.0), ("two", 1.0)}
    tracer = agl.OtelTracer()

    async def call_back() -> list[str]:
        own = agl.create_store("memory://")
        rollout = await own.start_rollout("x")
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        async with tracer.trace_context("agent", store=own, **ids):
            acme_parrot.Parrot("Hi").say("you", [tracer.get_handler("parrot")])
        return [span.name for span in (await own.query_spans(rollout.rollout_id)).items]

    tracer.init()
    assert "parrot.say" in asyncio.run(call_back())
    tracer.teardown()


def voice(folder: Path) -> None:
    """The own kind, the commands and the report."""

    def agl_says(*arguments: str) -> str:
        command = [sys.executable, "-m", "agentlightning", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert agl_says("speak", "loud", "hi") == "HI!"
    assert get_manager().create("voice", {"name": "loud", "marks": 3}).speak("a") == "A!!!"
    fit(folder, lambda task: 1.0, "baseline", [1])
    assert json.loads(agl_says("tally", "--json", "--store", f"sqlite:///{folder}/store.db"))
    assert (folder / "names.txt").read_text()


async def gateway(folder: Path) -> None:
    """A call in an own dialect to an own kind of server, whose key has an own header; templates and resources."""
    import aiohttp

    async with ScriptedOpenAI([Answer("four")]) as server:
        models = [{"model": "m", "endpoint": f"{server.endpoint}", "provider": "acme", "api_key": "key-of-acme-123"}]
        store = agl.create_store("memory://")
        proxy = agl.LLMProxy(model_list=models, store=store)
        await proxy.start()
        rollout = await store.start_rollout("x")
        resource = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id)
        async with aiohttp.ClientSession() as session:
            url = f"{resource.endpoint.removesuffix('/v1')}/v1/ask"
            key = {"Authorization": f"Bearer {resource.api_key}"}
            async with session.post(url, json={"model": "m", "question": "2+2?"}, headers=key) as answer:
                assert (answer.status, await answer.json()) == (200, {"answer": "four"}), await answer.text()
        await proxy.stop()
        (span,) = (await store.query_spans(rollout.rollout_id)).items
        assert (span.name, span.attributes["gen_ai.provider.name"]) == ("ask", "acme")
        assert server.requests[0].headers["X-Acme-Key"] == "key-of-acme-123"
    assert agl.PromptTemplate(template="Q: $q", engine="dollar").format(q="why") == "Q: why"
    store = agl.create_store(f"sqlite:///{folder}/store.db")
    voice = get_manager().get("resource", "acme_voice")(pitch=2.0)
    await store.add_resources({"voice": voice})
    latest = await store.get_latest_resources()
    assert latest is not None
    assert latest.resources["voice"] == voice
    await store.close()


def main(folder: Path) -> None:
    if len(sys.argv) > 2:
        climb(folder)
    for part in (store_and_trackers, climb, losses, rewards, parrot, voice):
        (folder / part.__name__).mkdir()
        part(folder / part.__name__)
    asyncio.run(gateway(folder))
    print("used all")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
