"""The base of prompt searches: candidates in the store, trials, model calls, a budget."""

import asyncio
import itertools
import logging
import math
import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from agentlightning.algorithm.algorithm import Algorithm, RunContext
from agentlightning.errors import ConfigError, LightningError
from agentlightning.plugin.settings import require_least
from agentlightning.resources import LLM, PromptTemplate, Resource
from agentlightning.reward import count_failed
from agentlightning.types import Dataset, EnqueueRolloutRequest, RolloutMode
from agentlightning_algorithms.shared.prompt_search.budget import CallUsage, SearchBudget
from agentlightning_algorithms.shared.prompt_search.candidate import (
    CANDIDATE_NAME,
    Candidate,
    choose_prompts,
    fit,
    has_caught_up,
    show_placeholders,
)
from agentlightning_algorithms.shared.prompt_search.chat import FILE_NAME, CachedChat, CallCache, copy_client
from agentlightning_algorithms.shared.prompt_search.critique import REPAIR_PROMPT, read_prompt
from agentlightning_algorithms.shared.prompt_search.results import ResultPool
from agentlightning_algorithms.shared.prompt_search.trial import (
    Confirmation,
    TrialResult,
    check_datasets,
    confirm,
    read_trial_result,
)
from agentlightning_algorithms.shared.rollout_result import RewardCheck, retry_lost, run_rollouts
from agentlightning_plugins.shared.chat_history import TraceToMessages

try:
    from openai import AsyncOpenAI
except ImportError:  # a search can be constructed without it; the trainer says what to install
    if not TYPE_CHECKING:
        AsyncOpenAI = Any

logger = logging.getLogger("agentlightning")


# No ``from __future__ import annotations``: the types of these settings are resolved in the subclasses' modules.
@dataclass(eq=False, repr=False)
class PromptSearch(Algorithm):
    """The base of APO and GEPA, with the settings that they share.

    A resumed search runs the same search again: finished rollouts and recorded model calls return immediately. The
    run's best prompts stay published until it has found them again, or better ones; if it adds nothing to a confirmed
    search, it ends with them.
    """

    default_adapter: ClassVar[str | None] = "messages"

    async_openai_client: AsyncOpenAI | None = None
    """Client of any OpenAI-compatible endpoint; None takes OPENAI_API_KEY and OPENAI_BASE_URL."""
    _: KW_ONLY
    rollout_batch_timeout: float = 3600.0
    """Seconds for the rollouts of one trial; rollouts that are still open after that have failed."""
    target_score: float | None = None
    """Mean reward of the best prompt on the whole validation set at which the search stops."""
    prompts: Sequence[str] | str | None = None
    """Names of the prompt resources to tune, all by default; they are edited in turn."""
    prompts_per_child: int = 1
    """Number of prompts that a proposal edits together, from the same rollouts."""
    seed: int | None = None
    """Seed of all random choices; the run's seed by default."""
    max_calls: int | None = None
    """Budget in model calls of the search and, if they are traced, of agents. The search ends after the round that
    spends the budget; its own model calls stop immediately."""
    max_tokens: int | None = None
    """Budget in tokens of prompts and answers."""
    max_cost: float | None = None
    """Budget in money; needs the prices of the search's models."""
    max_reflection_cost: float | None = None
    """Budget in money of the search's own model calls only."""
    prices: Mapping[str, tuple[float, float]] | None = None
    """Price of a million prompt tokens and of a million answer tokens, by model."""
    max_rollouts: int | None = None
    """Limit of rollouts for training, validation and confirmation together; None: no limit."""
    perfect_score: float | None = 1.0
    """The reward of a solved task, if no reward is higher. The search ends when a prompt solves the whole validation
    set; None: it does not."""
    confirm_pairs: int = 20
    """Minimum number of fresh validation rollouts of the best prompt at the end, to compare it with the first; 0 skips
    them. They are at most a twelfth of ``max_rollouts`` (or 6, if that is more)."""
    confirm: Literal["fair", "strict"] = "fair"
    """``fair`` publishes the best prompt if it earns more than the first did on the same tasks. ``strict`` runs both
    again and publishes the best one only if it is unlikely to be better by chance (p at most .05)."""

    def __post_init__(self) -> None:
        if not self.rollout_batch_timeout > 0:
            raise ConfigError(f"rollout_batch_timeout = {self.rollout_batch_timeout}: seconds above 0 are needed")
        require_least(0, confirm_pairs=self.confirm_pairs)
        require_least(1, max_rollouts=self.max_rollouts, prompts_per_child=self.prompts_per_child)
        if self.confirm not in ("fair", "strict"):
            raise ConfigError(f"confirm = {self.confirm!r}: give 'fair' or 'strict'")
        self.budget = SearchBudget(self.max_calls, self.max_tokens, self.max_cost, self.prices or {})
        self.reflection_budget = SearchBudget(max_cost=self.max_reflection_cost, prices=self.prices or {})
        for budget in (self.budget, self.reflection_budget):
            if budget.max_cost is not None:
                budget.require_prices(*self.models)
        if isinstance(self.prompts, str):
            self.prompts = (self.prompts,)
        self.history: list[Candidate] = []
        """All candidates in the order in which they were made, with lineage and scores; the seed is the first."""
        self._reset()

    @property
    def models(self) -> Sequence[str]:
        """The models that the search calls."""
        return ()

    def _reset(self) -> None:
        self.history.clear()
        self.stopped_because: str | None = None
        """``rounds``, ``rollouts``, ``target_score``, ``perfect_score``, ``patience``, ``budget``, ``no_new_prompt``
        (proposals repeat) or ``model_calls_failed``."""
        self.results = ResultPool()
        """The results of each candidate by task."""
        self.n_rollouts = 0
        """Number of rollouts so far."""
        self._highest = -math.inf
        self.confirmation: Confirmation | None = None
        """The comparison of the first and the best prompt on fresh rollouts; None if they were not compared."""
        self._reserve: list[CallUsage] = []
        self.n_val = 0
        """Number of validation tasks."""
        self._best: Candidate | None = None
        self._earlier: Candidate | None = None
        """The best candidate of the run before it was resumed, if it is not the seed."""
        self._was_confirmed = False
        """Whether the run compared its first and its best prompt before it was resumed."""
        self._base: Mapping[str, Resource] = {}
        self._versions: dict[str, int] = {}
        self._published: dict[str, Candidate] = {}
        self._chat: CachedChat | None = None
        self._cache = CallCache()
        self._reward_check = RewardCheck()

    def get_best_prompt(self, name: str | None = None) -> PromptTemplate:
        """The best prompt found so far; ``name`` is needed if several prompts are tuned.

        Raises:
            ConfigError: the search has not begun, or ``name`` is not one of the tuned prompts.
        """
        best = self.get_best()
        return best.prompts[best.prompt_name(name)]

    def get_best(self) -> Candidate:
        """The best candidate found so far; raises ConfigError if the search has not begun."""
        if self._best is None:
            raise ConfigError(f"{type(self).__name__} has found nothing yet; run it first, as in Trainer.fit(...)")
        return self._best

    def diff(self) -> str:
        """A unified diff from the seed to the best prompts; empty when no candidate is better."""
        return self.get_best().diff(self.history[0])

    def check_setup(self, context: RunContext) -> Sequence[LLM]:
        """Refuses a run without tasks, without a prompt to tune, without a critic, or without an API key."""
        check_datasets(context.train_dataset, context.val_dataset)
        if context.store is None and not context.is_resumed:
            choose_prompts(context.initial_resources or {}, self.prompts)
        client = copy_client(self.async_openai_client)
        return [LLM(endpoint=str(client.base_url), model=model, api_key=client.api_key) for model in self.models]

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Searches until a limit is reached, and leaves the best prompts as the latest resources.

        Raises:
            ConfigError: there is no task, or no prompt to tune.
            LightningError: all model calls failed, so no candidate was made.
        """
        train, val = check_datasets(train_dataset, val_dataset)
        if self.context.adapter is not None and not isinstance(self.context.adapter, TraceToMessages):
            adapter, name = type(self.context.adapter).__name__, type(self).__name__
            logger.warning("the adapter %s has no effect: %s reads messages; leave adapter out", adapter, name)
        try:
            seed = await self.begin()
            self.n_val = len(val)
            known = await self._count_rollouts()
            await self.search(seed, train, val)
            earlier = self._earlier
            if earlier is not None and not has_caught_up(self.history, self.get_best(), earlier):
                self._best = earlier
                self.history += [earlier] * (earlier.candidate_id not in {each.candidate_id for each in self.history})
            if self._was_confirmed and await self._count_rollouts() == known:
                self._best = earlier or seed
            elif not await self._confirm(val):
                self._best = (self._was_confirmed and earlier) or self.history[0]
            self._earlier = None
            await self.publish()
            await self._log_end()
            self._report()
        finally:
            await self.close_chat()

    @abstractmethod
    async def search(self, seed: Candidate, train: Dataset[Any], val: Dataset[Any]) -> None:
        """Searches, starting from the published seed."""

    @abstractmethod
    def count_first(self, limit: int | None) -> int:
        """Number of validation tasks that the first prompt runs on before others, with ``max_rollouts = limit``."""

    def left_for_search(self) -> float:
        """Number of rollouts that the search may still run: the confirmation's are reserved."""
        if self.max_rollouts is None:
            return math.inf
        return self.max_rollouts - self.n_rollouts - self._count_reserved(self.max_rollouts)

    def require_rollouts(self, needed: int) -> None:
        """Logs how many ``needed`` and the confirmation are; raises ConfigError if ``max_rollouts`` is smaller."""
        least = next(n for n in itertools.count(needed) if n >= needed + self._count_reserved(n))
        said = f"max_rollouts = {self.max_rollouts}: at least {least} are needed to try one new prompt: "
        said += f"{needed} for the search and {least - needed} to confirm the result"
        if self.max_rollouts is not None and self.max_rollouts < needed + self._count_reserved(self.max_rollouts):
            raise ConfigError(said)
        logger.info(said)

    def _count_reserved(self, limit: int) -> int:
        """Number of rollouts of the confirmation, with ``max_rollouts = limit``."""
        pairs = self._count_pairs(limit)
        known = len(self.results.scores(self.history[0].candidate_id)) or self.count_first(limit)
        return 2 * pairs - (min(pairs, known) if self.confirm == "fair" else 0)

    def _count_pairs(self, limit: int | None) -> int:
        """Number of fresh rollouts of each of two prompts at the end."""
        wanted = max(self.confirm_pairs, self.n_val) if self.confirm_pairs else 0
        return wanted if limit is None else min(wanted, max(limit // 12, 6))

    async def begin(self) -> Candidate:
        """Finds the prompts to tune and publishes the seed. Called when a run begins or is resumed."""
        self._reset()
        self.open_chat(self.context.directory)
        self._base = await self._read_base()
        seed = Candidate.of(choose_prompts(self._base, self.prompts))
        self.results.add_parent(seed)
        self.history.append(seed)
        self._best = seed
        await self._read_earlier(seed)
        await self.publish()
        return seed

    def open_chat(self, directory: Path | None) -> None:
        """Opens the cache of model calls in the run's directory, and counts the budget from 0."""
        self.budget.by_model.clear()
        self.reflection_budget.by_model.clear()
        if directory is not None:
            self._cache = CallCache(directory / FILE_NAME)
        self._chat = None

    async def close_chat(self) -> None:
        """Closes the connections to the models."""
        if self._chat is not None:
            await self._chat.close()
            self._chat = None

    @property
    def chat(self) -> CachedChat:
        """The model calls of this run."""
        if self._chat is None:
            self._chat = CachedChat(self.async_openai_client, self._cache, self.budget, self.reflection_budget)
        return self._chat

    def random_for(self, *place: str | int) -> random.Random:
        """Returns a random generator for one place of the search; it depends only on the place and the seed."""
        seed = self.context.seed if self.seed is None else self.seed
        return random.Random("/".join(map(str, (seed, *place))))

    async def run_trial(
        self,
        candidate: Candidate,
        dataset: Dataset[Any],
        indices: Sequence[int],
        mode: RolloutMode,
        *place: str | int,
        step: int = 0,
        with_messages: bool = False,
    ) -> list[TrialResult]:
        """Runs a published candidate on the tasks at ``indices``, concurrently.

        Rollouts that failed, timed out or have no reward count as 0, or as the lowest reward of the search so far if
        that is negative.
        ``place`` identifies the trial: a resumed search does not run a candidate on the same task there again.
        """
        requests = [
            EnqueueRolloutRequest(
                input=dataset[index],
                mode=mode,
                resources_id=self._snapshot_id(candidate.candidate_id),
                config=retry_lost(),
                metadata={"group": candidate.candidate_id, "step": step, "place": "/".join(map(str, place))},
                rollout_id=self.context.rollout_id(*place, candidate.candidate_id, index),
            )
            for index in indices
        ]
        store, adapter = self.get_store(), self.message_adapter if with_messages else None
        rollouts = await run_rollouts(store, requests, timeout_s=self.rollout_batch_timeout)
        results = await asyncio.gather(*(read_trial_result(store, rollout, adapter) for rollout in rollouts))
        trials = -(-2 * self._count_pairs(self.max_rollouts) // max(len(results), 1))  # for confirmation, rounded up
        self._reserve = trials * [usage for result in results for usage in result.usage]
        self.n_rollouts += len(results)
        self._highest = max((self._highest, *(result.score for result in results)))
        self.budget.spend(usage for result in results for usage in result.usage)
        self._reward_check.add(result.outcome for result in results)
        failed_reward = count_failed([self._reward_check.lowest])
        return [replace(result, failed_reward=failed_reward) for result in results]

    @property
    def message_adapter(self) -> TraceToMessages:
        """The adapter that reads the chats in a rollout's spans."""
        given = self.context.adapter
        return given if isinstance(given, TraceToMessages) else TraceToMessages()

    async def ask_for_edit(
        self,
        place: str,
        model: str,
        request: str,
        original: PromptTemplate,
        *,
        temperature: float,
        read: Callable[[str], str] = read_prompt,
    ) -> PromptTemplate | None:
        """Asks a model to rewrite a prompt. If the answer breaks a placeholder, the model may repair it once.

        ``place`` identifies the call within the search, and ``read`` extracts the new prompt from an answer. Returns
        None when a call failed, the budget is spent, or the repaired prompt cannot be used either.
        """
        messages = [{"role": "user", "content": request}]
        for stage in ("", "/repair"):
            answer = await self.chat.ask(place + stage, model, messages, temperature=temperature)
            if answer is None:
                return None
            try:
                return fit(read(answer), original)
            except ConfigError as problem:
                logger.info("the edit %s cannot be used: %s", place, problem)
                repair = REPAIR_PROMPT.format(problem=problem, placeholders=show_placeholders(original))
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": repair}]
        return None

    def update(self, candidate: Candidate, **fields: Any) -> Candidate:
        """Changes fields of a candidate, in the history too, and returns the changed candidate."""
        changed = candidate.model_copy(update=fields)
        self.history = [changed if old.candidate_id == changed.candidate_id else old for old in self.history]
        if self._best is not None and self._best.candidate_id == changed.candidate_id:
            self._best = changed
        return changed

    async def publish(self) -> None:
        """Stores new versions of changed candidates; the best prompts stay the latest resources of the run."""
        store = self.get_store()
        new = [each for each in self.history if self._published.get(each.candidate_id) != each]
        await asyncio.gather(*(self._store_version(candidate) for candidate in new))
        best, earlier = self.get_best(), self._earlier
        if earlier is not None and (self._was_confirmed or not has_caught_up(self.history, self.get_best(), earlier)):
            best = earlier
        resources, latest = {**self._base, **best.prompts}, await store.get_latest_resources()
        if latest is None or dict(latest.resources) != resources:
            await store.update_resources(self._snapshot_id("best"), resources)

    async def publish_prompts(self, candidate: Candidate) -> None:
        """Publishes a candidate's prompts for trials, before its lineage is known."""
        if candidate.candidate_id not in self._published:
            await self._store_version(Candidate.of(candidate.prompts, round=candidate.round))

    def is_spent(self) -> bool:
        """Whether the budget is spent, except for the confirmation's share; sets ``stopped_because``."""
        if self.budget.is_spent(self._reserve) or self.reflection_budget.is_spent():
            self.stopped_because = "budget"
        return self.stopped_because == "budget"

    def has_reached_target(self) -> bool:
        """Whether the best candidate reaches ``target_score`` or solves every task; sets ``stopped_because``."""
        best, perfect = self.get_best(), self.perfect_score
        if self.target_score is not None and best.full_score is not None and best.full_score >= self.target_score:
            self.stopped_because = "target_score"
        elif perfect is not None and best.task_scores and min(best.task_scores) >= perfect >= self._highest:
            self.stopped_because = "perfect_score"
        return self.stopped_because in ("target_score", "perfect_score")

    def metrics(self) -> dict[str, float]:
        """The metrics of every round."""
        best = self.get_best()
        scores = {"reward": best.score, "best_score": best.full_score}
        return {
            **{name: score for name, score in scores.items() if score is not None},
            "candidates": float(len(self.history)),
            **self.budget.metrics(),
        }

    async def _confirm(self, val: Dataset[Any]) -> bool:
        """Whether the best prompt may be published: it is the first, or better on fresh rollouts."""
        first, best, n_pairs = self.history[0], self.get_best(), self._count_pairs(self.max_rollouts)
        if best.candidate_id == first.candidate_id or not n_pairs:
            return True

        if self.stopped_because == "rollouts":  # what the search could not use makes the comparison more certain
            n_pairs += int(max(self.left_for_search(), 0)) // 2
        known = self.results.scores(first.candidate_id)

        async def score(candidate: Candidate, indices: Sequence[int], number: int) -> list[float]:
            found = dict(known) if candidate is first and number == 0 and self.confirm == "fair" else {}
            missing = [index for index in indices if index not in found]
            results = await self.run_trial(candidate, val, missing, "val", "confirm", number) if missing else []
            found |= {index: result.score for index, result in zip(missing, results, strict=True)}
            return [found[index] for index in indices]

        tasks = list(range(len(val)))
        self.random_for("confirm").shuffle(tasks)
        tasks.sort(key=lambda index: index not in known)
        self.confirmation = found = await confirm(first, best, tasks, n_pairs, score)
        is_published = found.is_better if self.confirm == "fair" else found.is_confirmed
        logger.info(
            "fresh rollouts: %.3f -> %.3f in %d pairs, p = %.2g, %s; expect a gain of %.3f (search: %s -> %s); %s",
            found.first, found.best, n_pairs, found.p_value, "confirmed" if found.is_confirmed else "not confirmed",
            found.gain, first.score, best.score,
            "the best prompt is published" if is_published else "the first prompt stays",
        )  # fmt: skip
        return is_published

    async def _log_end(self) -> None:
        """Adds the end of the search, and what it and its confirmation cost, to the metrics of its last step."""
        steps, found = (await self.get_store().query_metrics()).items, self.confirmation
        numbers = {"progress": 1.0, **self.budget.metrics()}
        if found is not None:
            numbers |= {"confirmed_first": found.first, "confirmed_best": found.best, "confirmed_p": found.p_value}
            numbers["confirmed_gain"] = found.gain
            if found.interval is not None:
                numbers |= dict(zip(("confirmed_gain_low", "confirmed_gain_high"), found.interval, strict=True))
        await self.get_store().add_metrics(steps[-1].step if steps else 0, numbers)

    def _report(self) -> None:
        """Logs the result, writes the diff to the run's directory, and raises when no model call succeeded."""
        name, diff = type(self).__name__, self.diff()
        logger.info(
            "%s tried %d prompts in %d rollouts%s and stopped (%s): %s -> %s; %s\n%s",
            name, len(self.history), self.n_rollouts, f" of {self.max_rollouts}" if self.max_rollouts else "",
            self.stopped_because, self.history[0].score, self.get_best().score,
            ", ".join(f"{name} {value:g}" for name, value in self.budget.metrics().items()),
            diff or "no prompt was better than the first",
        )  # fmt: skip
        if self.context.directory is not None:
            (self.context.directory / "prompts.diff").write_text(diff and diff + "\n", encoding="utf-8")
        if self.stopped_because == "model_calls_failed":
            reason = next(iter(self.chat.failed.values()), "no edit could be used")
            if len(self.history) == 1:
                raise LightningError(f"{name} learned nothing because its model calls failed: {reason}")
            logger.error("%s ended early because its model calls failed: %s", name, reason)

    def _snapshot_id(self, name: str) -> str:
        """The id of the resources of a candidate (by its id), of the ``best`` candidate, or of the ``seed``."""
        return self.context.rollout_id("resources", name).replace("ro-", "rs-", 1)

    async def _read_base(self) -> Mapping[str, Resource]:
        """Returns the resources that the run began with, which are stored: a resumed run has newer latest resources."""
        store, base_id = self.get_store(), self._snapshot_id("seed")
        kept = await store.get_resources_by_id(base_id)
        if kept is None:
            latest = await store.get_latest_resources()
            published = {} if latest is None else latest.resources
            kept = await store.update_resources(base_id, {**(self.context.initial_resources or {}), **published})
        return {name: resource for name, resource in kept.resources.items() if name != CANDIDATE_NAME}

    async def _read_earlier(self, seed: Candidate) -> None:
        """Reads the best candidate of the run before it was resumed, and whether it was confirmed."""
        store = self.get_store()
        self._was_confirmed = any("confirmed_p" in step.values for step in await store.query_metrics())
        published = await store.get_resources_by_id(self._snapshot_id("best"))
        if published is None or not published.resources.keys() >= seed.prompts.keys():
            return
        found = Candidate.of(choose_prompts(published.resources, list(seed.prompts)))
        kept = await store.get_resources_by_id(self._snapshot_id(found.candidate_id))
        if kept is not None and found.candidate_id != seed.candidate_id:
            candidate = kept.resources[CANDIDATE_NAME]
            assert isinstance(candidate, Candidate)
            self._earlier = candidate

    async def _count_rollouts(self) -> int:
        return (await self.get_store().query_rollouts(limit=1)).total

    async def _store_version(self, candidate: Candidate) -> None:
        """Stores the next version of a candidate's snapshot, unless the run stored it before it was resumed."""
        store, resources_id = self.get_store(), self._snapshot_id(candidate.candidate_id)
        version = self._versions[resources_id] = self._versions.get(resources_id, 0) + 1
        self._published[candidate.candidate_id] = candidate
        if await store.get_resources_by_id(resources_id, version) is None:
            await store.update_resources(resources_id, {**self._base, **candidate.prompts, CANDIDATE_NAME: candidate})
