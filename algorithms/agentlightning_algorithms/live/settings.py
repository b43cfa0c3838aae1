"""Settings of ``live`` with their checks, and the proposers of candidates."""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from importlib.metadata import EntryPoint
from typing import Any, TypeAlias

from agentlightning.errors import ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning.plugin.settings import require_least
from agentlightning.resources import Resource, read_resources
from agentlightning.run.thread import run_in_thread
from agentlightning_algorithms.shared.live_resources import LiveExperience, Result

Proposal: TypeAlias = Mapping[str, Resource | str] | None
Proposer: TypeAlias = Callable[[LiveExperience], Proposal | Awaitable[Proposal]]
"""Returns the resources to change, by name; None for no change. A plain str is a prompt."""


@dataclass(eq=False, repr=False)
class LiveSettings:
    """The arguments of ``LiveLearning``."""

    propose: Proposer | str | Mapping[str, Any] | None = None
    """Makes candidates: a function, ``"module:function"`` or an algorithm as ``{"name": "apo", "max_calls": 9}``."""
    _: KW_ONLY
    proposers: Sequence[Mapping[str, Any]] = ()
    """Several proposers instead, as ``{"when": {...}, "use": ...}``. ``when`` may have ``task``, which are fields and
    values of the tasks that the proposer is for, ``reward_below`` and ``reward_from``, which bound the mean reward of
    their rollouts. If it holds for several, the one with the lowest mean makes the candidate, from these rollouts.
    """
    evidence: int = 20
    """Number of rewards of the stable version to collect before each candidate."""
    check_tasks: int = 16
    """Number of recorded tasks in the offline check; 0 disables it."""
    check_tolerance: float = 0.2
    """How much lower than the stable version's the mean reward on these tasks may be, as a share of ``reward_range``,
    and how much larger the share of failures. A larger difference rejects the candidate if it is also significant. The
    check gets half of ``risk``; it cannot reject with fewer than 7 tasks."""
    check_timeout_s: float = 300.0
    """Time limit of the offline check, in seconds; it starts again when a killed learner is restarted."""
    share: float = 0.1
    """Share of the traffic that a candidate gets during its trial."""
    risk: float = 0.05
    """Largest probability of rejecting or rolling back a candidate that is not worse. Also the largest probability,
    over all candidates of the run, of promoting one that is not better (with ``margin``: worse by more than that)."""
    margin: float = 0.0
    """How far all promotions together may lower the reward below the first stable version's, in units of reward. 0
    promotes only better candidates. A positive margin also promotes a candidate that is lower by less than half of the
    remaining margin, for candidates that are cheaper or faster."""
    max_treated: int = 1000
    """Number of rollouts after which a candidate gets no more traffic, whether they have ended or not. Without a
    decision once their rewards are known, the stable version stays."""
    max_trial_s: float = 604800.0
    """Seconds after which a candidate gets no more traffic."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The lowest and the highest reward. A failed rollout gets the lowest."""
    reward_timeout_s: float = 3600.0
    """Seconds after the end of a rollout in which its reward may arrive; a promotion waits for earlier rewards."""
    rollout_timeout_s: float = 3600.0
    """Seconds after its start after which a rollout counts as failed; a promotion waits for earlier rollouts to end."""
    refresh_s: float = 1.0
    """Seconds between two reads of rewards."""
    control_share: float = 0.05
    """Share of the traffic that the version before a promotion keeps, so that the promoted version can be compared with
    it for as long as it is watched; 0: it is not watched."""
    control_s: float = 604800.0
    """Seconds after a promotion for which the promoted version is watched."""
    alarm_interval: int = 1_000_000
    """Smallest mean number of rewards between two false alarms. An alarm publishes the version before the promotion
    again."""
    max_trials: int | None = None
    """``run`` returns after this many candidates, so that the last one is not watched; None: until it is stopped."""

    def __post_init__(self) -> None:
        for name in ("share", "risk"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: a number between 0 and 1 is needed")
        for name in (
            "check_timeout_s",
            "max_trial_s",
            "reward_timeout_s",
            "rollout_timeout_s",
            "refresh_s",
            "control_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: more than 0 is needed")
        if not 0 <= self.control_share < 1:
            raise ConfigError(f"control_share = {self.control_share}: a number from 0 to below 1 is needed")
        require_least(1, evidence=self.evidence, max_treated=self.max_treated, max_trials=self.max_trials)
        require_least(1, alarm_interval=self.alarm_interval)
        require_least(0, check_tasks=self.check_tasks, check_tolerance=self.check_tolerance, margin=self.margin)
        low, high = self.reward_range
        if not low < high:
            raise ConfigError(f"reward_range = {self.reward_range}: the lower bound must come first")
        self.reward_range = (float(low), float(high))
        if (self.propose is None) == (not self.proposers):
            raise ConfigError("live learning needs a proposer: give propose, or several as proposers, and not both")
        self.propose = choose_proposer(self.proposers) if self.propose is None else load_proposer(self.propose)


@dataclass(frozen=True)
class ProposerChoice:
    """One entry of ``proposers``."""

    use: Proposer
    task: Mapping[str, Any]
    reward_below: float = math.inf
    reward_from: float = -math.inf

    def find_results(self, results: Iterable[Result]) -> list[Result]:
        """Returns the results that the proposer is for; none if their mean reward is out of bounds."""
        found = [result for result in results if self._is_for(result.rollout.input)]
        is_within = bool(found) and self.reward_from <= mean_reward(found) < self.reward_below
        return found if is_within else []

    def _is_for(self, task: Any) -> bool:
        if not isinstance(task, Mapping):
            return not self.task
        return all(name in task and task[name] == value for name, value in self.task.items())


def mean_reward(results: Sequence[Result]) -> float:
    return statistics.fmean(result.reward for result in results)


def choose_proposer(given: Sequence[Mapping[str, Any]]) -> Proposer:
    """Resolves the ``proposers`` setting."""
    choices = []
    for entry in given:
        when = entry.get("when") or {}
        unknown = [*(entry.keys() - {"when", "use"}), *(when.keys() - {"task", "reward_below", "reward_from"})]
        if unknown or "use" not in entry:
            raise ConfigError(
                f"proposers: {dict(entry)!r}: give use, and in when any of task, reward_below and reward_from"
            )
        choices.append(ProposerChoice(load_proposer(entry["use"]), **{"task": {}, **when}))

    async def propose(experience: LiveExperience) -> Proposal:
        found = [(choice, results) for choice in choices if (results := choice.find_results(experience.results))]
        if not found:
            return None
        choice, results = min(found, key=lambda each: mean_reward(each[1]))
        return await call_proposer(choice.use, replace(experience, results=results))

    return propose


def load_proposer(given: Proposer | str | Mapping[str, Any]) -> Proposer:
    """Resolves the ``propose`` setting; an algorithm must have ``propose(experience)``."""
    if callable(given):
        return given
    if isinstance(given, str) and ":" in given:
        try:
            found: Proposer = EntryPoint("propose", given, "agentlightning").load()
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"propose = {given!r} cannot be imported as 'module:function': {error}") from error
        return found
    algorithm = get_manager().create("algorithm", given)
    propose: Proposer | None = getattr(algorithm, "propose", None)
    if propose is None:
        raise ConfigError(f"propose = {given!r}: {type(algorithm).__name__} has no propose(experience), as apo has")
    return propose


async def make_candidate(propose: Callable[[LiveExperience], Any], experience: LiveExperience) -> dict[str, Resource]:
    """Calls a proposer and returns all resources, changed or not."""
    proposal = await call_proposer(propose, experience)
    changes = {} if proposal is None else read_resources(proposal)
    if unknown := changes.keys() - experience.resources.keys():
        raise ConfigError(f"proposed {', '.join(sorted(unknown))}; there are: {', '.join(experience.resources)}")
    return {**experience.resources, **changes}


async def call_proposer(propose: Callable[[LiveExperience], Any], experience: LiveExperience) -> Proposal:
    """Calls a proposer; a synchronous one in a thread, so that heartbeats go on and the learner can stop."""
    if inspect.iscoroutinefunction(propose):
        answer = propose(experience)
    else:
        answer = await run_in_thread(lambda: propose(experience), name="proposer")
    proposal: Proposal = await answer if inspect.isawaitable(answer) else answer
    return proposal
