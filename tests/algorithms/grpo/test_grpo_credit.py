"""Advantages of calls where a credit rule gives each call a reward of its own."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.adapter import CreditRule, Step
from agentlightning.plugin.registry import get_manager
from agentlightning_algorithms.grpo.algorithm import GRPO
from agentlightning_algorithms.grpo.episode import Episode
from agentlightning_algorithms.grpo.experience import Experience, build_experience
from agentlightning_algorithms.grpo.settings import ExperienceSettings
from agentlightning_algorithms.shared.advantage import Scored, compute_advantages, flat_groups
from agentlightning_plugins.credit import DiscountedCredit, IdenticalCredit, IntermediateCredit, NearestCredit
from agentlightning_plugins.demo.training import CHECKPOINT

RULES = [IdenticalCredit(), NearestCredit(), DiscountedCredit(0.9), IntermediateCredit()]


def call(agent: str = "", prompt: str = "?", finish_reason: str = "stop") -> agl.Triplet:
    return agl.Triplet(
        prompt={"token_ids": [0, 1, 2], "raw_content": [{"role": "user", "content": prompt}]},
        response={
            "token_ids": [3, 4],
            "logprobs": [-1.0, -1.0],
            "raw_content": [{"role": "assistant", "content": "!"}],
        },
        metadata={"response_id": "chatcmpl", "agent_name": agent, "finish_reason": finish_reason},
    )


def assign(
    rule: CreditRule, index: int, rewards: Sequence[float | None], calls: Sequence[agl.Triplet] = (), final: Any = ...
) -> Episode:
    """Returns a rollout of group ``g`` whose calls got ``rewards``, with the credit that a rule assigns to them."""
    calls = calls or [call(prompt=str(turn)) for turn in range(len(rewards))]
    steps = [Step([triplet], reward, ()) for triplet, reward in zip(calls, rewards, strict=True)]
    final = next((r for r in reversed(rewards) if r is not None), None) if final is ... else final
    credit = zip(rule.assign(steps, final), rule.compared_turns(steps), strict=True)
    triplets = [
        triplet.model_copy(update={"reward": value, "metadata": {**triplet.metadata, "credit": "x", "turn": turn}})
        for triplet, (value, turn) in zip(calls, credit, strict=True)
    ]
    rollout = agl.Rollout(
        rollout_id=f"ro-{index}", input="task", start_time=0.0, status="succeeded", metadata={"group": "g"}
    )
    return Episode(rollout, final, triplets)


def outcome(rule: CreditRule, rewards: Sequence[float], turns: Sequence[int]) -> list[Episode]:
    """Returns rollouts that got a reward only after their last call."""
    return [
        assign(rule, i, [*[None] * (n - 1), reward]) for i, (reward, n) in enumerate(zip(rewards, turns, strict=True))
    ]


def build(episodes: list[Episode], **settings: Any) -> Experience:
    return build_experience(episodes, ExperienceSettings(**settings), max_length=100)


def advantages(episodes: list[Episode], **settings: Any) -> list[list[float]]:
    experience = build(episodes, keep_flat_groups=True, **settings)
    found: dict[str, list[float]] = {episode.rollout.rollout_id: [] for episode in episodes}
    for row, (episode, _) in zip(experience.rows, experience.sources, strict=True):
        found[episode.rollout.rollout_id].append(float(row.advantages[0]))
    return list(found.values())


def test_with_nearest_credit_only_the_calls_that_differ_in_reward_get_an_advantage() -> None:
    won, lost, also_lost = advantages(outcome(NearestCredit(), [1.0, 0.0, 0.0], [4, 4, 4]))
    assert won[:3] == lost[:3] == also_lost[:3] == [0.0, 0.0, 0.0]
    assert won[3] > 0 > lost[3]
    assert won[3] == pytest.approx(-2 * lost[3])


@pytest.mark.parametrize("turns", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("rule", RULES[:3], ids=lambda rule: type(rule).__name__)
def test_advantages_do_not_grow_with_the_number_of_calls(rule: CreditRule, turns: int) -> None:
    """With nearest credit, all calls but the last have equal values, which must not make its advantage large."""
    found = advantages(outcome(rule, [1.0, 0.0] * 4, [turns] * 8))
    assert 0.93 < max(value for own in found for value in own) < 1.3


def test_discounted_credit_is_compared_with_the_return_to_go_of_the_same_turn() -> None:
    """A reward that both rollouts get at the first turn does not lower the advantages of later turns."""
    rule = DiscountedCredit(1.0)
    better, worse = advantages([assign(rule, 0, [5.0, 1.0]), assign(rule, 1, [5.0, 0.0])])
    assert better == pytest.approx([-value for value in worse])
    assert better[0] == pytest.approx(better[1])
    assert better[0] == pytest.approx(1 / math.sqrt(2), rel=1e-4)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("difference", [0.0, 1e-12, 1e-6, 1e-4])
def test_a_flat_or_nearly_flat_group_gives_flat_advantages(rule: CreditRule, difference: float) -> None:
    episodes = outcome(rule, [1.0, 1.0, 1.0 + difference, 1.0], [3, 3, 3, 3])
    found = [value for own in advantages(episodes) for value in own]
    assert max(map(abs, found)) <= difference / 0.01
    assert (len(build(episodes).rows) == 0) == (difference < 1e-9)


def test_intermediate_credit_stays_small_if_all_rollouts_succeed() -> None:
    rule = IntermediateCredit(invalid_output=-0.1)
    cut_off = [call(), call(prompt="b", finish_reason="length"), call(prompt="c")]
    episodes = [*outcome(rule, [1.0] * 7, [3] * 7), assign(rule, 7, [None, None, 1.0], cut_off)]
    found = advantages(episodes)
    assert min(found[7]) == found[7][1] < 0
    assert max(abs(value) for own in found for value in own) < math.sqrt(24), "as far as a z-score of 24 calls can go"
    assert sum(sum(own) for own in found) == pytest.approx(0, abs=1e-9)


def test_identical_credit_gives_the_advantages_of_whole_rollouts_whatever_their_number_of_calls() -> None:
    rewards, turns = [1.0, 0.0, 0.3, 1.0], [1, 5, 2, 9]
    for estimator in ("grpo", "dr_grpo", "rloo"):
        credited = advantages(outcome(IdenticalCredit(), rewards, turns), estimator=estimator)
        plain = [
            Episode(e.rollout, e.reward, [t.model_copy(update={"metadata": {}}) for t in e.triplets])
            for e in outcome(IdenticalCredit(), rewards, turns)
        ]
        assert credited == [pytest.approx(own) for own in advantages(plain, estimator=estimator)]


def test_a_turn_that_only_one_rollout_reached_is_compared_with_its_group() -> None:
    long, short = advantages(outcome(DiscountedCredit(1.0), [1.0, 0.0], [3, 1]))
    assert all(value > 0 for value in long)
    assert short[0] < 0
    assert max(map(abs, long + short)) < 2


def test_the_turns_of_each_agent_of_a_rollout_are_compared_separately() -> None:
    rule = NearestCredit()
    first = [call("writer"), call("critic"), call("writer")]
    second = [call("critic"), call("writer"), call("writer")]
    one, two = advantages([assign(rule, 0, [1.0, 5.0, 1.0], first), assign(rule, 1, [5.0, 0.0, 1.0], second)])
    assert one[1] == two[0] == 0, "the critics' calls are worth the same"
    assert one[0] == pytest.approx(-two[1])
    assert one[2] == two[2] == 0


def test_every_call_of_a_failed_rollout_gets_the_failed_reward() -> None:
    rule = NearestCredit()
    failed = assign(rule, 1, [0.7, None], final=None)
    won, lost = advantages([assign(rule, 0, [1.0, 1.0]), failed], failed_reward=-1.0, estimator="dr_grpo")
    assert (won, lost) == ([1.0, 1.0], [-1.0, -1.0])
    nothing = Episode(failed.rollout.model_copy(update={"rollout_id": "ro-2"}), None, [])
    assert advantages([assign(rule, 0, [1.0, 1.0]), failed, nothing], failed_reward=-1.0) == [
        pytest.approx(own) for own in [*advantages([assign(rule, 0, [1.0, 1.0]), failed], failed_reward=-1.0), []]
    ]


def test_a_group_is_flat_if_no_turn_differs() -> None:
    items = [Scored(value, "g", rollout, turn) for rollout in "ab" for turn, value in enumerate([1.0, 2.0])]
    assert flat_groups(items) == {"g"}
    assert compute_advantages(items) == [0.0] * 4
    assert flat_groups([*items, Scored(3.0, "g", "c", 0)]) == set()


class _Game:
    """A game of several turns; the answer to each turn is one token, of which one in eight is right."""

    turns, choices, rollouts = 6, 8, 16

    def __init__(self, policy: Any, seed: int) -> None:
        self.policy = policy
        self.right = [random.Random(f"{seed}/{turn}").randrange(self.choices) for turn in range(self.turns)]

    def prompt(self, turn: int) -> list[int]:
        return [200, 100 + turn]

    def play(self, generator: Any) -> list[tuple[list[int], list[float]]]:
        """Samples a group of rollouts; returns the tokens and log-probabilities of each."""
        import torch

        with torch.inference_mode():
            logits = self.policy.logits(torch.tensor([self.prompt(turn) for turn in range(self.turns)]))
            logprobs = logits.view(self.turns, 2, -1)[:, -1].log_softmax(-1)
        tokens = torch.multinomial(logprobs.exp(), self.rollouts, replacement=True, generator=generator)
        found = logprobs.gather(1, tokens).T.tolist()
        return list(zip(tokens.T.tolist(), found, strict=True))


def _learn(model: Path, rule: CreditRule, seed: int, steps: int) -> list[float]:
    """Trains on the game and returns the share of right answers at each step."""
    import torch

    from agentlightning_algorithms.shared.policy.model import load_policy
    from agentlightning_algorithms.shared.policy.settings import UpdateSettings
    from agentlightning_algorithms.shared.policy.updater import Updater

    torch.manual_seed(seed)
    policy = load_policy(model)
    game = _Game(policy, seed)
    updater = Updater(policy, UpdateSettings(lr=3e-3, betas=(0.9, 0.99), seed=seed))
    generator = torch.Generator().manual_seed(seed)
    curve = []
    for _ in range(steps):
        episodes = []
        shares = []
        for index, (tokens, logprobs) in enumerate(game.play(generator)):
            rewards = [float(token % game.choices == right) for token, right in zip(tokens, game.right, strict=True)]
            shares.append(statistics.fmean(rewards))
            calls = [
                call(prompt=str(turn)).model_copy(
                    update={
                        "prompt": {"token_ids": game.prompt(turn), "raw_content": []},
                        "response": {"token_ids": [token], "logprobs": [logprob], "raw_content": []},
                    }
                )
                for turn, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
            ]
            episodes.append(assign(rule, index, rewards, calls, final=sum(rewards)))
        updater.update(build(episodes).rows)
        curve.append(statistics.fmean(shares))
    return curve


@pytest.mark.soak
def test_credit_per_call_learns_a_game_of_several_turns_at_least_as_fast_as_identical_credit(tiny_model: Path) -> None:
    """Mean share of right answers over training, for five seeds; docs/benchmarks.md has the figures."""
    import torch

    torch.set_num_threads(1)
    areas = {
        type(rule).__name__: [statistics.fmean(_learn(tiny_model, rule, seed, steps=60)) for seed in range(5)]
        for rule in RULES[:3]
    }
    print({name: [round(area, 3) for area in values] for name, values in areas.items()})
    identical = areas["IdenticalCredit"]
    for name in ("NearestCredit", "DiscountedCredit"):
        assert statistics.fmean(areas[name]) >= statistics.fmean(identical), areas


async def test_reward_shaping_that_a_credit_rule_would_ignore_is_refused() -> None:
    algorithm = GRPO(
        model=str(CHECKPOINT),
        experience=ExperienceSettings(reward_shaping="soft_overlong"),
        sampling={"max_tokens": 20},
    )
    adapter = get_manager().create("adapter", {"name": "triplet", "credit": "identical"})
    algorithm.context = agl.RunContext(store=agl.InMemoryLightningStore(), adapter=adapter)
    with pytest.raises(agl.ConfigError, match=r"reward_shaping = 'soft_overlong' .* leave one of them out"):
        await algorithm.run(["task"])
