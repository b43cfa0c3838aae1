"""The ground that searches for prompts stand on: candidates in the store, trials, paid model calls, a budget."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.algorithm.context import RunContext
from agentlightning.errors import ConfigError, LightningError
from agentlightning.plugin.settings import require_least
from agentlightning.resources import LLM, PromptTemplate, Resource
from agentlightning.types import Dataset, RolloutMode
from agentlightning_algorithms.prompt_search.budget import Budget
from agentlightning_algorithms.prompt_search.candidate import CANDIDATE_NAME, Candidate
from agentlightning_algorithms.prompt_search.chat import PaidChat, private_copy
from agentlightning_algorithms.prompt_search.critique import REPAIR_PROMPT, read_prompt
from agentlightning_algorithms.prompt_search.ledger import FILE_NAME, Ledger
from agentlightning_algorithms.prompt_search.placeholder import find_placeholders, fit, show_placeholders
from agentlightning_algorithms.prompt_search.trial import RolloutResult, make_requests, run_trial
from agentlightning_plugins.chat_history.adapter import TraceToMessages

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger("agentlightning")


class PromptSearch(Algorithm):
    """What APO and GEPA share.

    A search can be killed at any moment: resumed, it is the same search run again, in which every rollout that has
    finished and every model call that was recorded answers at once.
    """

    default_adapter: ClassVar[str | None] = "messages"

    def __init__(
        self,
        async_openai_client: AsyncOpenAI | None,
        *,
        models: Sequence[str],
        prompts: Sequence[str] | str | None,
        rollout_batch_timeout: float,
        target_score: float | None,
        seed: int | None,
        budget: Budget,
        llm_attempts: int,
    ) -> None:
        if not rollout_batch_timeout > 0:
            raise ConfigError(f"rollout_batch_timeout = {rollout_batch_timeout}: seconds above 0 are needed")
        require_least(1, llm_attempts=llm_attempts)
        budget.require_prices(*models)
        self.async_openai_client = async_openai_client
        self.models = models
        self.prompts = (prompts,) if isinstance(prompts, str) else prompts
        self.rollout_batch_timeout = rollout_batch_timeout
        self.target_score = target_score
        self.seed = seed
        self.budget = budget
        self.llm_attempts = llm_attempts
        self.history: list[Candidate] = []
        """Every candidate in the order of their making, with lineage and scores; the seed is the first."""
        self._reset()

    def _reset(self) -> None:
        self.history.clear()
        self.stopped_because: str | None = None
        """Why the search ended: ``rounds``, ``target_score``, ``patience``, ``budget`` or ``model_calls_failed``."""
        self._best: Candidate | None = None
        self._base: Mapping[str, Resource] = {}
        self._versions: dict[str, int] = {}
        self._published: dict[str, Candidate] = {}
        self._chat: PaidChat | None = None
        self._ledger = Ledger()

    def get_best_prompt(self, name: str | None = None) -> PromptTemplate:
        """The best prompt found so far.

        Args:
            name: of the resource; needed when several prompts are tuned.

        Raises:
            ConfigError: the search has not begun, or ``name`` does not say which prompt is meant.
        """
        return self.get_best().prompt(name)

    def get_best(self) -> Candidate:
        """The best candidate found so far: all its prompts, its scores and where it came from.

        Raises:
            ConfigError: the search has not begun.
        """
        if self._best is None:
            raise ConfigError(f"{type(self).__name__} has found nothing yet; run it first, as in Trainer.fit(...)")
        return self._best

    def diff(self) -> str:
        """What the search changed: a unified diff from the seed to the best prompts; empty when nothing is better."""
        return self.get_best().diff(self.history[0])

    def check_setup(self, context: RunContext) -> Sequence[LLM]:
        """Refuses what ``run`` would: no task, no prompt to tune, no key."""
        check_datasets(context.train_dataset, context.val_dataset)
        if context.store is None:
            choose_prompts(context.initial_resources or {}, self.prompts)
        client = private_copy(self.async_openai_client)
        return [LLM(endpoint=str(client.base_url), model=model, api_key=client.api_key) for model in self.models]

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Searches until a limit is reached, and leaves the best prompts as the latest resources.

        Raises:
            ConfigError: there is no task, or no prompt to tune.
            LightningError: model calls failed, and nothing was learned.
        """
        train, val = check_datasets(train_dataset, val_dataset)
        if self.context.adapter is not None and not isinstance(self.context.adapter, TraceToMessages):
            unread, name = type(self.context.adapter).__name__, type(self).__name__
            logger.warning("the adapter %s has no effect: %s reads messages; leave adapter out", unread, name)
        try:
            await self.search(await self.begin(), train, val)
            self.report()
            if self.stopped_because == "model_calls_failed":
                self._report_failed_calls()
        finally:
            await self.close_chat()

    async def search(self, seed: Candidate, train: Dataset[Any], val: Dataset[Any]) -> None:
        """What a subclass does, from the published seed on."""
        raise ConfigError(f"{type(self).__name__} defines no search(seed, train, val)")

    async def begin(self) -> Candidate:
        """Finds the prompts to tune and publishes the seed. Called when a run begins or is resumed.

        Raises:
            ConfigError: there is no prompt to tune, or one that ``prompts`` names is not there.
        """
        self._reset()
        self.open_books(self.context.directory)
        self._base = await self._find_base()
        seed = Candidate.of(choose_prompts(self._base, self.prompts))
        for prompt in seed.prompts.values():
            find_placeholders(prompt)
        self.history.append(seed)
        self._best = seed
        await self.publish()
        return seed

    def open_books(self, directory: Path | None) -> None:
        """Counts from now on what is spent, with what the ledger of the directory says was paid before."""
        self.budget.calls, self.budget.tokens, self.budget.cost = 0, 0, 0.0
        if directory is not None:
            self._ledger = Ledger(directory / FILE_NAME)
        self._chat = self._open_chat()

    async def close_chat(self) -> None:
        """Closes the connections to the models."""
        if self._chat is not None:
            await self._chat.close()
            self._chat = None

    @property
    def chat(self) -> PaidChat:
        """The model calls of this run."""
        if self._chat is None:
            self._chat = self._open_chat()
        return self._chat

    def draw(self, *place: str | int) -> random.Random:
        """Random numbers for one place of the search: the same for the same seed, whatever ran before."""
        seed = self.context.seed if self.seed is None else self.seed
        return random.Random("/".join(map(str, (seed, *place))))

    async def try_on(
        self,
        candidate: Candidate,
        dataset: Dataset[Any],
        indices: Sequence[int],
        mode: RolloutMode,
        *place: str | int,
        with_messages: bool = False,
    ) -> list[RolloutResult]:
        """Runs a candidate on tasks of a dataset, all at once.

        Args:
            candidate: must be published.
            dataset: the tasks.
            indices: which of them.
            mode: of the rollouts.
            place: which trial of the search this is; a resumed search does not run it again.
            with_messages: whether to read the chats as well.
        """
        context = self.context
        tasks = {
            context.rollout_id(*place, candidate.candidate_id, position): dataset[index]
            for position, index in enumerate(indices)
        }
        step = next((part for part in place if isinstance(part, int)), 0)
        requests = make_requests(
            tasks,
            resources_id=self.resources_id(candidate),
            mode=mode,
            metadata={"group": candidate.candidate_id, "step": step, "place": "/".join(map(str, place))},
        )
        adapter = self.message_adapter if with_messages else None
        results = await run_trial(self.get_store(), requests, timeout_s=self.rollout_batch_timeout, adapter=adapter)
        self.budget.spend(usage for result in results for usage in result.usage)
        return results

    @property
    def message_adapter(self) -> TraceToMessages:
        """Reads the chats in a rollout's spans."""
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
        """A model's rewriting of a prompt, with the placeholders of the original; the model may mend it once.

        Args:
            place: which call of the search this is.
            model: the editor.
            request: what it is told.
            original: the prompt.
            temperature: of the sampling.
            read: finds the new prompt in an answer.

        Returns:
            None when a call failed, the budget is spent, or the mended prompt cannot be used either.
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

    def resources_id(self, candidate: Candidate) -> str:
        """Of the snapshot that holds a candidate's prompts, all other resources and its lineage."""
        return self._snapshot_id(candidate.candidate_id)

    def update(self, candidate: Candidate, **fields: Any) -> Candidate:
        """Changes what is known of a candidate, in the history too."""
        changed = candidate.model_copy(update=fields)
        self.history = [changed if old.candidate_id == changed.candidate_id else old for old in self.history]
        if self._best is not None and self._best.candidate_id == changed.candidate_id:
            self._best = changed
        return changed

    def take_if_better(self, candidate: Candidate) -> bool:
        """Makes a candidate the best when it scores more on the whole validation set than the best so far."""
        best = self.get_best()
        if candidate.full_score is None or candidate.candidate_id == best.candidate_id:
            return False
        if best.full_score is not None and candidate.full_score <= best.full_score:
            return False
        self._best = candidate
        return True

    async def publish(self) -> None:
        """Stores what is new of the candidates; the best prompts stay the latest resources of the run."""
        store = self.get_store()
        new = [each for each in self.history if self._published.get(each.candidate_id) != each]
        wrote = await asyncio.gather(*(self._store_version(candidate) for candidate in new))
        best_id = self._snapshot_id("best")
        latest = await store.get_latest_resources()
        if not any(wrote) and latest is not None and latest.resources_id == best_id:
            newest = latest.resources
            if all(newest.get(name) == prompt for name, prompt in self.get_best().prompts.items()):
                return
        await store.update_resources(best_id, {**self._base, **self.get_best().prompts})

    async def publish_prompts(self, candidate: Candidate) -> None:
        """Makes a candidate's prompts ready to be run, before its place in the lineage is settled."""
        if candidate.candidate_id not in self._published:
            await self._store_version(Candidate.of(candidate.prompts, round=candidate.round))

    def is_spent(self) -> bool:
        """Whether the budget is used up; says so once."""
        if self.stopped_because != "budget" and self.budget.is_spent():
            self.stopped_because = "budget"
        return self.stopped_because == "budget"

    def report(self) -> None:
        """Logs how it ended and what changed, and keeps the diff in the run's directory."""
        best, seed, diff = self.get_best(), self.history[0], self.diff()
        logger.info(
            "%s tried %d prompts and stopped (%s): %s -> %s; %d model calls, %d tokens, cost %.4f\n%s",
            type(self).__name__,
            len(self.history),
            self.stopped_because,
            seed.score,
            best.score,
            self.budget.calls,
            self.budget.tokens,
            self.budget.cost,
            diff or "no prompt was better than the first",
        )
        if self.context.directory is not None:
            (self.context.directory / "prompts.diff").write_text(diff and diff + "\n", encoding="utf-8")

    def metrics(self) -> dict[str, float]:
        """What every round reports."""
        best = self.get_best()
        scores = {"reward": best.score, "best_score": best.full_score}
        return {
            **{name: score for name, score in scores.items() if score is not None},
            "candidates": float(len(self.history)),
            "model_calls": float(self.budget.calls),
            "tokens": float(self.budget.tokens),
            "cost": self.budget.cost,
        }

    def _report_failed_calls(self) -> None:
        reason = next(iter(self.chat.failed.values()), "no edit could be used")
        if len(self.history) == 1:
            raise LightningError(f"{type(self).__name__} learned nothing, for its model calls failed: {reason}")
        logger.error("%s ended early, for its model calls failed: %s", type(self).__name__, reason)

    def _open_chat(self) -> PaidChat:
        return PaidChat(self.async_openai_client, self._ledger, self.budget, attempts=self.llm_attempts)

    def _snapshot_id(self, name: str) -> str:
        return self.context.rollout_id("resources", name).replace("ro-", "rs-", 1)

    async def _find_base(self) -> Mapping[str, Resource]:
        """What the run began with: stored with its first life, for later ones find candidates as the latest."""
        store, base_id = self.get_store(), self._snapshot_id("seed")
        kept = await store.get_resources_by_id(base_id)
        if kept is None:
            latest = await store.get_latest_resources()
            published = {} if latest is None else latest.resources
            kept = await store.update_resources(base_id, {**(self.context.initial_resources or {}), **published})
        return {name: resource for name, resource in kept.resources.items() if name != CANDIDATE_NAME}

    async def _store_version(self, candidate: Candidate) -> bool:
        """Stores the next version of a candidate's snapshot, unless an earlier life of the run has."""
        store, resources_id = self.get_store(), self.resources_id(candidate)
        version = self._versions[resources_id] = self._versions.get(resources_id, 0) + 1
        self._published[candidate.candidate_id] = candidate
        if await store.get_resources_by_id(resources_id, version) is not None:
            return False
        await store.update_resources(resources_id, {**self._base, **candidate.prompts, CANDIDATE_NAME: candidate})
        return True


def check_datasets(
    train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None
) -> tuple[Dataset[Any], Dataset[Any]]:
    """Training and validation tasks; where one of them is missing, the other serves for both.

    Raises:
        ConfigError: there is none.
    """
    train = train_dataset if train_dataset is not None and len(train_dataset) else val_dataset
    val = val_dataset if val_dataset is not None and len(val_dataset) else train_dataset
    if train is None or val is None or not len(train):
        raise ConfigError("a search for prompts needs tasks: give a train_dataset, and a val_dataset to judge by")
    return train, val


def choose_prompts(resources: Mapping[str, Resource], wanted: Sequence[str] | None) -> dict[str, PromptTemplate]:
    """The prompts to tune: all that there are, or those that are wanted.

    Raises:
        ConfigError: there is none, or none of a name that is wanted.
    """
    known = {name: value for name, value in resources.items() if isinstance(value, PromptTemplate)}
    if not known:
        raise ConfigError(
            "there is no prompt to tune: give one as in Trainer(initial_resources={'prompt': 'Answer: {question}'}); "
            f"resources: {', '.join(sorted(resources)) or 'none'}"
        )
    if wanted is None:
        return dict(sorted(known.items()))
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ConfigError(f"prompts = {list(wanted)}: the prompts of this run are {', '.join(sorted(known))}")
    return {name: known[name] for name in wanted}
