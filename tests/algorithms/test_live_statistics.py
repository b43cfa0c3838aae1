"""The error rates of the sequential test of live learning, measured by simulation with fixed seeds.

Each test states the promised level and asserts that the measured rate exceeds it by at most three standard errors.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentlightning.types import Rollout
from agentlightning_algorithms.live.algorithm import LiveLearning
from agentlightning_algorithms.live.trial import _BETS, _MAX_LOSS, _MIN_BLOCK, SequentialTest, Trial, Watch
from agentlightning_algorithms.shared.live_resources import LiveState, Result

RISK = 0.05
Rewards = Callable[[Any, int], Any]
"""Returns the control's mean reward of each request, given the request numbers and their count."""


def limit(trials: int, risk: float = RISK) -> float:
    """Returns the promised level plus three standard errors of a rate that is measured in ``trials`` trials."""
    return risk + 3 * math.sqrt(risk * (1 - risk) / trials)


def decide(treated: Any, rewards: Any, share: float, margin: float) -> dict[str, Any]:
    """Runs many trials in one computation.

    It makes the same bets as ``SequentialTest``, in NumPy; a test below compares both.

    Args:
        treated: whether each request is treated, indexed by trial and request.
        rewards: the reward of each request, from 0 to 1.
        share: the share of requests that are treated.
        margin: the margin of the test.

    Returns:
        For each verdict, the number of treated rewards at which each trial would reach it, infinite if it does not.
    """
    size = max(_MIN_BLOCK, round(1 / min(share, 1 - share)))
    n_blocks = treated.shape[1] // size
    shape = (len(treated), n_blocks, size)
    treated = treated[:, : n_blocks * size].reshape(shape)
    rewards = rewards[:, : n_blocks * size].reshape(shape)
    n_treated = treated.sum(2)
    information = n_treated * (size - n_treated) / size
    means = [(side * rewards).sum(2) / np.maximum(side.sum(2), 1) for side in (treated, ~treated)]
    difference = np.where(information > 0, means[0] - means[1], 0.0)
    found = {}
    for verdict, sign, bound in (("worse", -1, 0.0), ("better", 1, 0.0), ("not worse", 1, -margin)):
        wealth = np.zeros(information.shape)
        for bet in _BETS:
            stakes = np.minimum(bet * information, _MAX_LOSS / (1 + bound))
            wealth += np.exp(np.cumsum(np.log1p(stakes * (sign * difference - bound)), 1)) / len(_BETS)
        reached = wealth >= 1 / RISK
        first = np.take_along_axis(np.cumsum(n_treated, 1), reached.argmax(1)[:, None], 1)[:, 0]
        found[verdict] = np.where(reached.any(1), first, math.inf)
    return found


def simulate(
    share: float, control: Rewards, effect: float, *, margin: float = 0.1, trials: int = 400, treated: int = 200
) -> dict[str, Any]:
    """Simulates trials with rewards of 0 or 1, each with about ``treated`` treated requests."""
    draw = np.random.default_rng(17)
    length = int(treated / share)
    groups = draw.random((trials, length)) < share
    chance = np.broadcast_to(control(np.arange(length), length), (trials, length)) + effect * groups
    return decide(groups, (draw.random((trials, length)) < chance).astype(float), share, margin)


def rate(found: Any) -> float:
    return float(np.isfinite(found).mean())


TRAFFIC: dict[str, Rewards] = {
    "constant": lambda request, n: np.full(n, 0.6),
    "a step from .9 to .4": lambda request, n: np.where(request < n // 4, 0.9, 0.4),
    "a step from .3 to .8": lambda request, n: np.where(request < n // 4, 0.3, 0.8),
    "a linear fall": lambda request, n: 0.9 - 0.5 * request / n,
    "a linear rise": lambda request, n: 0.3 + 0.5 * request / n,
    "a period of 10 requests": lambda request, n: 0.55 + 0.35 * np.sin(request * 2 * math.pi / 10),
    "a period of 500 requests": lambda request, n: 0.55 + 0.35 * np.sin(request * 2 * math.pi / 500),
    "rare rewards": lambda request, n: np.full(n, 0.15),
}


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("traffic", TRAFFIC.values(), ids=TRAFFIC.keys())
def test_errors_stay_within_the_risk_for_every_pattern_of_traffic(traffic: Rewards, share: float) -> None:
    equal = simulate(share, traffic, 0.0)
    assert rate(equal["worse"]) <= limit(400)
    assert rate(equal["better"]) <= limit(400)
    on_the_margin = simulate(share, traffic, -0.1)
    assert rate(on_the_margin["not worse"]) <= limit(400)
    assert rate(on_the_margin["better"]) <= limit(400)


@pytest.mark.soak
@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("traffic", TRAFFIC.values(), ids=TRAFFIC.keys())
def test_errors_stay_within_the_risk_in_long_trials(traffic: Rewards, share: float) -> None:
    equal = simulate(share, traffic, 0.0, trials=500, treated=1000)
    assert max(rate(equal["worse"]), rate(equal["better"])) <= limit(500)
    assert rate(simulate(share, traffic, -0.1, trials=500, treated=1000)["not worse"]) <= limit(500)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_errors_stay_within_the_risk_for_rewards_with_heavy_tails(share: float) -> None:
    """Log-normal rewards, clipped to the range: a few in a thousand are 100 times the median."""
    draw = np.random.default_rng(17)
    groups = draw.random((400, int(200 / share))) < share
    rewards = np.minimum(draw.lognormal(-4.0, 1.5, groups.shape), 1.0)
    found = decide(groups, rewards, share, margin=0.1)
    assert rate(found["worse"]) <= limit(400)
    assert rate(found["better"]) <= limit(400)


def test_equal_versions_are_distinguished_from_worse_versions_in_250_treated_rewards() -> None:
    """With mean .6, share .1 and margin .1, confidence sequences of each arm (arXiv:2010.09686, theorem 2) need 705."""
    equal = simulate(0.1, TRAFFIC["constant"], 0.0, treated=600)
    assert np.median(equal["not worse"]) <= 250
    better = simulate(0.1, TRAFFIC["constant"], 0.1, treated=600)
    assert np.median(better["better"]) <= 250


def test_clear_differences_are_decided_within_a_few_rewards() -> None:
    worse = simulate(0.1, lambda request, n: np.full(n, 0.9), -0.6)
    assert np.median(worse["worse"]) <= 25
    better = simulate(0.1, lambda request, n: np.full(n, 0.5), 0.4)
    assert np.median(better["better"]) <= 35
    assert rate(worse["better"]) == rate(better["worse"]) == 0.0


@pytest.mark.parametrize("users", [20, 100])
def test_a_user_counts_once_with_any_number_of_rewards(users: int) -> None:
    """Users keep their version and rate differently. Counting each reward would call 31 % of equal versions worse."""
    wrong, trials = 0, 150
    for seed in range(trials):
        draw = np.random.default_rng(seed)
        treated, level = draw.random(users) < 0.3, draw.beta(0.8, 0.6, users)
        test = SequentialTest(risk=RISK, margin=0.0, reward_range=(0.0, 1.0), share=0.3)
        for user, chance in zip(draw.integers(users, size=800), draw.random(800), strict=True):
            test.add(float(chance < level[user]), is_treatment=bool(treated[user]), unit=f"user {user}")
            if test.verdict is not None:
                wrong += 1
                break
    assert wrong / trials <= limit(trials, 2 * RISK)  # "worse" and "better" have a risk each


def test_late_and_missing_rewards_do_not_decide_a_trial_of_equal_versions() -> None:
    """Rewards of the candidate arrive 30 requests later, and half of them not at all, while quality falls."""
    draw = np.random.default_rng(17)
    wrong, trials, length = 0, 100, 2000
    for _ in range(trials):
        treated = draw.random(length) < 0.1
        rewards = draw.random(length) < 0.9 - 0.5 * np.arange(length) / length
        arrives = np.arange(length) + 30 * treated
        test = SequentialTest(risk=RISK, margin=0.0, reward_range=(0.0, 1.0), share=0.1)
        for request in np.argsort(arrives, kind="stable"):
            if not treated[request] or draw.random() < 0.5:
                test.add(float(rewards[request]), is_treatment=bool(treated[request]), unit=str(request))
        wrong += test.verdict is not None
    assert wrong / trials <= limit(trials, 2 * RISK)


def test_ten_slightly_worse_candidates_do_not_lower_the_quality() -> None:
    """Each candidate is .02 worse than the stable version; with a margin of .1 for each, quality would fall by .09."""
    draw = np.random.default_rng(17)
    promoted, runs = 0, 100
    for _ in range(runs):
        for trial in range(1, 11):
            groups = draw.random((1, 5000)) < 0.1
            rewards = (draw.random((1, 5000)) < 0.6 - 0.02 * groups).astype(float)
            test = SequentialTest(
                risk=RISK, margin=0.0, reward_range=(0.0, 1.0), share=0.1, promotion_risk=RISK / trial / (trial + 1)
            )
            if rate(decide(groups, rewards, 0.1, margin=0.0)["better"]) == 0.0:
                continue  # not promoted even at the full risk
            for reward, treated, unit in zip(rewards[0], groups[0], range(5000), strict=True):
                test.add(reward, is_treatment=bool(treated), unit=str(unit))
                if test.verdict is not None:
                    break
            promoted += test.verdict == "better"
    assert promoted / runs <= limit(runs)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_sequential_test_decides_like_the_simulation(share: float) -> None:
    draw = np.random.default_rng(17)
    verdicts = set()
    for effect, margin in ((-0.3, 0.1), (-0.05, 0.1), (0.0, 0.1), (0.05, 0.1), (0.3, 0.0)):
        groups = draw.random((1, 1500)) < share
        rewards = (draw.random((1, 1500)) < 0.5 + effect * groups).astype(float)
        expected = {verdict: found[0] for verdict, found in decide(groups, rewards, share, margin).items()}
        test = SequentialTest(risk=RISK, margin=margin, reward_range=(0.0, 1.0), share=share)
        reached: dict[str, float] = dict.fromkeys(expected, math.inf)
        for number, (reward, treated) in enumerate(zip(rewards[0], groups[0], strict=True)):
            test.add(reward, is_treatment=bool(treated), unit=str(number))
            if test.verdict is not None and reached[test.verdict] == math.inf:
                reached[test.verdict] = test.n_treatment
        first = min(expected, key=lambda verdict: expected[verdict])
        assert reached[first] == expected[first]
        verdicts.add(first)
        low, high = test.interval
        assert low <= test.difference <= high
        assert (test.verdict == "worse") == (high < 0)
        assert (test.verdict == "better") == (low > 0)
    assert verdicts == {"worse", "not worse", "better"}


def test_the_interval_contains_the_difference_at_all_times() -> None:
    draw = np.random.default_rng(17)
    missed = 0
    for _ in range(50):
        test, outside = SequentialTest(risk=RISK, margin=0.0, reward_range=(0.0, 1.0), share=0.3), False
        for number in range(400):
            treated = bool(draw.random() < 0.3)
            test.add(draw.beta(2 + treated, 3), is_treatment=treated, unit=str(number))
            if number % 40 == 39:
                low, high = test.interval
                outside = outside or not low <= 0.1 <= high
        missed += outside
    assert missed / 50 <= limit(50, 2 * RISK)


def test_nothing_is_decided_without_rewards_of_the_control() -> None:
    test = SequentialTest(risk=RISK, margin=0.5, reward_range=(0.0, 1.0), share=0.1)
    for number in range(500):
        test.add(1.0, is_treatment=True, unit=str(number))
    assert test.verdict is None
    assert test.interval == pytest.approx((-1.0, 1.0))


def test_rewards_outside_the_range_are_clipped() -> None:
    test = SequentialTest(risk=RISK, margin=1.0, reward_range=(-10.0, 10.0), share=0.5)
    for number in range(8):
        test.add(99.0 if number % 2 else -11.0, is_treatment=number % 2 == 1, unit=str(number))
    assert test.difference == 20.0
    low, high = test.interval
    assert -20.0 <= low < 20.0 == pytest.approx(high)


def first_alarm(former: Any, rewards: Any, share: float, interval: int) -> Any:
    """Returns the number of rewards at which each watch raises its alarm, infinite if it does not.

    It makes the same bets as ``Watch``, in NumPy, for runs of rewards from 0 to 1; a test below compares both.
    """
    size = max(_MIN_BLOCK, round(1 / share))
    shape = (len(former), former.shape[1] // size, size)
    former, rewards = (each[:, : shape[1] * size].reshape(shape) for each in (former, rewards))
    n_former = former.sum(2)
    information = n_former * (size - n_former) / size
    means = [(side * rewards).sum(2) / np.maximum(side.sum(2), 1) for side in (former, ~former)]
    stakes = np.minimum(np.array(_BETS) * information[..., None], _MAX_LOSS)
    gains = 1 + stakes * (means[0] - means[1])[..., None]
    wealth, found = np.zeros((len(former), len(_BETS))), np.full(len(former), math.inf)
    for block in range(shape[1]):
        is_bet = information[:, block, None] > 0
        wealth = np.where(is_bet, np.minimum((wealth + 1) * gains[:, block], 1e300), wealth)
        rung = (wealth.mean(1) >= interval / size) & np.isinf(found)
        found[rung] = (block + 1) * size
    return found


def watch_runs(traffic: Rewards, effect: float, *, n: int, runs: int, interval: int = 1_000_000, since: int = 0) -> Any:
    """Simulates watches of ``n`` rewards; from ``since``, the promoted version earns ``effect`` more than before."""
    draw, requests, share = np.random.default_rng(17), np.arange(n), 0.05
    former = draw.random((runs, n)) < share
    chance = np.broadcast_to(traffic(requests, n), (runs, n)) + effect * (~former & (requests >= since))
    return first_alarm(former, (draw.random((runs, n)) < chance).astype(float), share, interval)


@pytest.mark.parametrize("traffic", TRAFFIC.values(), ids=TRAFFIC.keys())
def test_false_alarms_are_as_rare_as_promised_for_every_pattern_of_traffic(traffic: Rewards) -> None:
    """A run without an alarm counts as one that ends with an alarm."""
    alarms = watch_runs(traffic, 0.0, interval=2000, n=10_000, runs=200)
    assert np.minimum(alarms, 10_000).mean() >= 2000


@pytest.mark.parametrize(("drop", "median"), [(0.1, 10_000), (0.2, 4000), (0.5, 1500)])
def test_a_drop_is_found_as_soon_after_a_long_time_as_at_the_beginning(drop: float, median: int) -> None:
    for since in (0, 20_000):  # within 20,000 rewards, one run in 50 may have a false alarm
        alarms = watch_runs(TRAFFIC["constant"], -drop, n=since + 4 * median, runs=60, since=since)
        assert (alarms > since).mean() > 0.9
        assert np.median(alarms) - since <= median


def test_the_watch_raises_its_alarm_like_the_simulation() -> None:
    draw = np.random.default_rng(17)
    for share, drop in ((0.05, 0.5), (0.3, 0.2), (0.3, 0.0)):
        former = draw.random((1, 4000)) < share
        rewards = (draw.random((1, 4000)) < 0.6 - drop * ~former).astype(float)
        watch = Watch(interval=5000, tolerance=0.0, reward_range=(0.0, 1.0), share=share)
        alarm = math.inf
        for number, (reward, is_former) in enumerate(zip(rewards[0], former[0], strict=True), 1):
            watch.add(reward, is_promoted=not is_former, unit=str(number))
            alarm = min(alarm, number if watch.is_alarming else math.inf)
        assert alarm == first_alarm(former, rewards, share, 5000)[0]
        assert (alarm == math.inf) == (drop == 0.0)
        assert watch.n_former + watch.n_promoted == 4000
        assert drop == 0.0 or watch.difference < -0.05


def test_a_tolerated_drop_raises_no_alarm() -> None:
    draw = np.random.default_rng(17)
    watches = [Watch(interval=10**6, tolerance=each, reward_range=(0.0, 1.0), share=0.3) for each in (0.0, 0.2)]
    for number in range(3000):
        is_promoted = bool(draw.random() < 0.7)
        reward = float(draw.random() < 0.6 - 0.15 * is_promoted)
        for watch in watches:
            watch.add(reward, is_promoted=is_promoted, unit=str(number))
    assert [watch.is_alarming for watch in watches] == [True, False]


@pytest.mark.parametrize(("timeout_s", "rolled_back"), [(600.0, 0), (5.0, 1)])
def test_a_candidate_that_fails_late_is_not_promoted(timeout_s: float, rolled_back: int) -> None:
    """The stable version fails immediately in 20 % of its rollouts, the candidate after the timeout in 30 %.

    Counted in the order of arrival, successes come first, and every candidate that fails after 600 s is promoted.
    """
    settings = LiveLearning(lambda experience: None, max_treated=10**6)
    state = LiveState(phase="trial", since=0.0, stable="tuned@1", share=0.1)
    verdicts = []
    for seed in range(4):
        draw, arrivals = random.Random(seed), []
        for number in range(5000):
            group = "treatment" if draw.random() < 0.1 else "control"
            reward = float(draw.random() < (0.7 if group == "treatment" else 0.8))
            start = number / 5
            rollout = Rollout(rollout_id=f"ro-{number}", input=None, start_time=start, metadata={"group": group})
            hangs = group == "treatment" and not reward
            arrivals.append((start + (timeout_s if hangs else 1.0), Result(rollout, reward)))
        arrivals.sort(key=lambda arrival: arrival[0])
        starts = [result.rollout.start_time for _, result in arrivals]
        horizons = [*itertools.accumulate(reversed(starts), min)][::-1]  # the earliest start among later arrivals
        trial = Trial(settings, state)
        for number in range(0, len(arrivals) - 50, 50):
            trial.add([result for _, result in arrivals[number : number + 50]], horizons[number + 50])
            if trial.verdict is not None:
                break
        verdicts.append(trial.verdict)
    assert verdicts.count("worse") >= rolled_back
    assert "better" not in verdicts
