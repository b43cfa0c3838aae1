"""How a training session is opened and resumed, and the rows and steps of ``TrainingSession``."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import agentlightning as agl
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.plugin.registry import get_manager
from agentlightning.types import Attempt, AttemptedRollout, Rollout, Span, Triplet
from agentlightning_algorithms.grpo import training_session
from agentlightning_algorithms.grpo.collector import RolloutCollector, model_entries
from agentlightning_algorithms.grpo.episode import Episode
from agentlightning_algorithms.grpo.settings import ExperienceSettings, GRPOSettings, PolicySettings, TeacherSettings
from agentlightning_algorithms.grpo.trained_policy import PolicySet
from agentlightning_algorithms.grpo.training_session import TrainingSession
from agentlightning_algorithms.shared.policy.settings import LoraSettings, UpdateSettings
from agentlightning_algorithms.shared.policy.training_row import Distribution, TrainingRow
from agentlightning_plugins.shared.training_records.record import LEDGER_SPAN, ROW_SPAN, LedgerEntry, TrainedRow
from tests.algorithms.vllm_server import FakeVLLM


def make_session(model: Path, val: Any = None, train: Any = None, **settings: Any) -> TrainingSession:
    own = GRPOSettings(model=str(model), **settings)
    assert own.update is not None
    unused: Any = None
    policies = PolicySet.load(own, own.update)
    context = agl.RunContext()
    return TrainingSession(RolloutCollector(own, context, unused, unused, unused, unused, policies, model), train, val)


def test_a_checkpoint_stores_the_rollouts_that_are_still_to_be_deleted(tiny_model: Path, tmp_path: Path) -> None:
    session = make_session(tiny_model)
    session.collector.rollout_ids = {0: ["ro-a", "ro-b"], 1: ["ro-c"]}
    session.policies.write(tmp_path / "checkpoint", session.state())
    resumed = make_session(tiny_model).collector
    resumed.restore(resumed.policies.read(tmp_path / "checkpoint"))
    assert resumed.rollout_ids == session.collector.rollout_ids


@pytest.mark.usefixtures("silent_backend")
async def test_reading_a_checkpoint_does_not_block_the_event_loop(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(tiny_model)
    session.policies.write(tmp_path / "checkpoint", session.state())
    threads: list[threading.Thread] = []
    read = PolicySet.read
    monkeypatch.setattr(PolicySet, "read", lambda *given: threads.append(threading.current_thread()) or read(*given))
    async with open_session(tiny_model, tmp_path):
        pass
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def open_session(model: Path, directory: Path) -> Any:
    """Opens a session in a run's directory, with a gateway of its own and a policy backend that serves nothing."""
    store = agl.InMemoryLightningStore()
    context = agl.RunContext(
        store=store,
        llm_proxy=agl.LLMProxy(model_list=[], store=store),
        directory=directory,
        adapter=agl.TraceToTriplet(),
    )
    return TrainingSession.open(context, GRPOSettings(model=str(model), train_threads=1))


@pytest.fixture
def silent_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: Any) -> None: ...

    backend = SimpleNamespace(
        start=nothing, stop=nothing, model_entry={"model": "policy", "endpoint": "http://host/v1"}
    )
    monkeypatch.setattr(training_session, "get_manager", lambda: SimpleNamespace(create=lambda *_: backend))


@pytest.mark.usefixtures("silent_backend")
async def test_a_loop_has_its_own_state_again_after_a_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    async with open_session(tiny_model, tmp_path) as session:
        session.own_state |= {"queue": [3, 1], "mean": torch.ones(2)}
        await session.checkpoint()
        session.own_state["queue"].append(7)  # after the checkpoint
    async with open_session(tiny_model, tmp_path) as resumed:
        assert resumed.own_state["queue"] == [3, 1]
        assert torch.equal(resumed.own_state["mean"], torch.ones(2))
        resumed.own_state["lock"] = threading.Lock()
        with pytest.raises(agl.ConfigError, match=r"own_state\['lock'\] is a lock, which a checkpoint cannot hold"):
            await resumed.checkpoint()
        resumed.own_state["lock"] = Path("here")  # can be pickled, but not be read again without running code
        with pytest.raises(agl.ConfigError, match=r"own_state\['lock'\] is a PosixPath, which"):
            await resumed.checkpoint()


@pytest.mark.usefixtures("silent_backend")
async def test_a_checkpoint_is_written_beside_the_loop_and_no_weight_changes_before_its_end(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, write = threading.Event(), PolicySet.write
    monkeypatch.setattr(PolicySet, "write", lambda *given: may_write.wait() and write(*given))
    row = TrainingRow([1, 2], [3, 4], [-0.1, -0.1], 1.0)
    async with open_session(tiny_model, tmp_path) as session:
        try:
            await session.checkpoint()
            assert not (tmp_path / "checkpoint").exists()
            training = asyncio.create_task(session.forward_backward([row]))
            done, _ = await asyncio.wait([training], timeout=0.1)
            assert not done, "the reference would take the place of the weights"
        finally:
            may_write.set()
        await training
        assert (tmp_path / "checkpoint").is_dir()
        await session.optim_step()


@pytest.mark.parametrize(
    ("kind", "part", "message"),
    [
        ("advantage", lambda items, *, std_floor: [1.0], r"the advantage 'mine' returned \[1.0\] for 2 items"),
        ("advantage", lambda items, *, std_floor: items[0].reward, "the advantage 'mine' failed: AttributeError"),
        ("task_sampler", lambda count, history: [5] * count, r"the task_sampler 'mine' returned \[5, 5.* 0 to 4 are"),
        ("task_sampler", lambda count, history: history.data["a"], "the task_sampler 'mine' failed: TypeError"),
    ],
)
def test_the_error_of_a_part_names_it_before_the_first_rollout(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, part: Any, message: str
) -> None:
    manager = get_manager()
    monkeypatch.setattr(sys.modules[__name__], "planted_part", part, raising=False)
    offer = Component(kind, "mine", f"{__name__}:planted_part", summary="x")
    plugin = SimpleNamespace(components=hookimpl(lambda: [offer]))
    manager.register(plugin, "test-part")
    try:
        named: Any = {"experience": ExperienceSettings(estimator="mine")} if kind == "advantage" else {kind: "mine"}
        session = make_session(tiny_model, train=range(5), **named)
        with pytest.raises(agl.ConfigError, match=message):
            session.try_parts()
    finally:
        manager._pluggy.unregister(plugin)
        del manager.plugins["test-part"], manager._offers[kind, "mine"]


@pytest.mark.parametrize(("force", "expected"), [(False, Distribution(0.3)), (True, None)])
def test_rows_have_the_sampling_distribution_of_their_calls_unless_the_run_forces_one(
    tiny_model: Path, force: bool, expected: Distribution | None
) -> None:
    session = make_session(tiny_model, sampling={"force": force})
    response = {"token_ids": [3, 4], "logprobs": [-0.1, -0.1]}
    call = Triplet(prompt={"token_ids": [1, 2]}, response=response, metadata={"response_id": "r1"})
    rollout = Rollout(rollout_id="ro-1", input={}, start_time=0.0, status="succeeded")
    episode = Episode(rollout, 1.0, [call], distributions={"r1": Distribution(0.3)})
    assert session.rows([episode]) == [
        TrainingRow([1, 2], [3, 4], [-0.1, -0.1], 1.0, rollout="ro-1", distribution=expected)
    ]


async def test_the_ledger_has_filtered_rollouts_and_the_shaped_rewards(tiny_model: Path) -> None:
    sampling = {"max_tokens": 4}
    experience = ExperienceSettings(rollout_filter="finished", reward_shaping="soft_overlong")
    session = make_session(tiny_model, sampling=sampling, experience=experience)
    spans: list[Span] = []

    async def keep(found: list[Span]) -> None:
        spans.extend(found)

    store: Any = SimpleNamespace(add_many_spans=keep, capabilities={"durable": True})
    session.collector.store = store
    lengths, ends = [2, 4, 2], ["stop", "stop", "length"]
    episodes = [make_episode(i, length, end) for i, (length, end) in enumerate(zip(lengths, ends, strict=True))]
    await session.learn([episodes])
    metrics = session._metrics
    entries = [LedgerEntry.from_span(span) for span in spans if span.name == LEDGER_SPAN]
    assert [(entry.outcome, entry.reward) for entry in entries] == [
        ("trained", 1.0),
        ("trained", 0.0),
        ("filtered", 1.0),
    ]
    rows = [TrainedRow.from_span(span) for span in spans if span.name == ROW_SPAN]
    assert [row.reward for row in rows] == [1.0, 0.0]
    assert (metrics["outcome/filtered"], metrics["rollouts_left_out"]) == (1, 0)


async def test_the_profile_of_a_step_says_where_its_time_went(tiny_model: Path, tmp_path: Path) -> None:
    async def keep(found: list[Span]) -> None: ...

    session = make_session(tiny_model, steps=2, profile_step=1)
    store: Any = SimpleNamespace(add_many_spans=keep, capabilities={"durable": True})
    session.collector.store, session.collector.context.directory = store, tmp_path
    episodes = [make_episode(0, 2, "stop"), dataclasses.replace(make_episode(1, 4, "stop"), reward=0.0)]
    await session.learn([episodes])
    assert not (tmp_path / "profile.txt").exists(), "only the step that the setting names"
    await session.learn([episodes])
    table = (tmp_path / "profile.txt").read_text(encoding="utf-8")
    assert "Self CPU" in table
    assert "Optimizer.step#AdamW.step" in table
    assert json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))["traceEvents"]
    with pytest.raises(agl.ConfigError, match="profile_step = 2: the last step is 1, counted from 0"):
        GRPOSettings(model=str(tiny_model), steps=2, profile_step=2)


def make_episode(index: int, length: int, end: str) -> Episode:
    """Returns a rollout with reward 1 and one call of ``length`` tokens."""
    response = {"token_ids": [3] * length, "logprobs": [-0.1] * length}
    metadata = {"response_id": f"r{index}", "finish_reason": end, "requested_model": "policy"}
    call = Triplet(prompt={"token_ids": [1, 2]}, response=response, metadata=metadata)
    attempt = Attempt(rollout_id=f"ro-{index}", attempt_id=f"at-{index}", sequence_id=1, start_time=0.0)
    rollout = AttemptedRollout(
        rollout_id=f"ro-{index}", input={}, start_time=0.0, status="succeeded", metadata={"group": "0"}, attempt=attempt
    )
    return Episode(rollout, 1.0, [call])


async def test_a_sample_is_drawn_from_the_recorded_distribution(tiny_model: Path) -> None:
    session = make_session(tiny_model)
    async with FakeVLLM() as server:
        unused: Any = SimpleNamespace(model_entry={"model": "policy", "endpoint": server.endpoint})
        session.collector.backend = unused
        (sample,) = await session.sample([{"role": "user", "content": "hello"}])
        ((_, body),) = server.asked
    assert sample.distribution is None
    own = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: body.get(name) for name in own} == own, "the server has other defaults than neutral ones"


@pytest.mark.parametrize(("reward", "steps"), [(0.6, []), (0.4, [2])])
async def test_steps_of_a_resumed_session_end_immediately_if_the_target_reward_is_reached(
    tiny_model: Path, reward: float, steps: list[int]
) -> None:
    async def publish() -> None: ...

    async def evaluate() -> dict[str, float]:
        return {"val_reward": reward}

    session: Any = make_session(tiny_model, target_reward=0.5)
    session.collector.step = 2
    session.publish, session.evaluate = publish, evaluate
    found = []
    async for step in session.steps():
        found.append(step)
        break
    assert found == steps


@pytest.mark.parametrize("force", [True, False])
def test_penalties_are_off_even_if_agents_choose_their_sampling_parameters(tiny_model: Path, force: bool) -> None:
    session = make_session(tiny_model, sampling={"force": force, "temperature": 0.8})
    train, _ = model_entries({"endpoint": "http://host/v1"}, session.settings, session.policies)
    own = {"temperature": 0.8, "top_p": 1.0, "top_k": -1}
    off = {"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    assert train["sampling_parameters"] == {**off, "logit_bias": None, **(own if force else {})}
    assert train["sampling_defaults"] == ({} if force else {**off, "logit_bias": None, **own})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("teacher", TeacherSettings(model="big", endpoint="http://host/v1")),
        ("policies", {"writer": PolicySettings(lora=LoraSettings())}),
        ("experience.rows", "trajectories"),
        ("experience.estimator", "rloo"),
        ("experience.std_floor", 0.1),
        ("experience.keep_flat_groups", True),
        ("experience.drop_cut_off", True),
        ("experience.reward_shaping", "soft_overlong"),
        ("experience.rollout_filter", "finished"),
        ("update.minibatches", 2),
        ("update.epochs", 2),
    ],
)
async def test_a_setting_that_only_learn_uses_is_refused_by_other_steps(
    tiny_model: Path, name: str, value: Any
) -> None:
    group, _, key = name.rpartition(".")
    groups = {"experience": ExperienceSettings, "update": UpdateSettings}
    session = make_session(tiny_model, **({group: groups[group](**{key: value})} if group else {key: value}))
    with pytest.raises(agl.ConfigError, match=f"only TrainingSession.learn uses {name}; leave it out"):
        session.rows([])
    with pytest.raises(agl.ConfigError, match=f"only TrainingSession.learn uses {name}; leave it out"):
        await session.forward_backward([])
