"""On-policy distillation: a second model scores the tokens that the policy sampled."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import aiohttp
import orjson

from agentlightning.errors import ConfigError, LightningError
from agentlightning.run.proxies import find_proxy
from agentlightning.store.url import hide_password
from agentlightning_algorithms.grpo.settings import TeacherSettings
from agentlightning_algorithms.shared.policy.model import Policy, load_policy
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_plugins.shared.token import read_key

logger = logging.getLogger("agentlightning")

_AT_ONCE: Final = 32
"""Number of requests sent at the same time."""
_RETRIED: Final = (429, 502, 503, 504)
"""Statuses of a server that is busy or restarts."""
_DELAYS_S: Final = (2.0, 10.0, 30.0, 60.0)
"""Pauses between the tries of a request: 102 s together, because a restart of vLLM may take more than a minute."""
_PROBE: Final = 32
"""Number of tokens whose texts are compared with the texts of the policy's tokenizer."""


class ServedTeacher:
    """Scores rows with the model of a server; each row is one request."""

    def __init__(self, settings: TeacherSettings, max_length: int) -> None:
        self.max_length = max_length
        self._settings = settings
        self._url = str(settings.endpoint).rstrip("/")
        self._shown_url = hide_password(self._url)
        self._delays_s: Sequence[float] = ()

    @classmethod
    def connect(cls, settings: TeacherSettings, student: Policy) -> ServedTeacher:
        """Finds the model at the endpoint, and checks that the server scores tokens and reads them as the policy does.

        These requests are tried once, so that a wrong address fails immediately. Later requests are repeated if the
        connection fails or the server is busy, but not after a timeout.

        Raises:
            ConfigError: the server does not have the model, ``prompt_logprobs`` or the policy's vocabulary.
            LightningError: the server does not answer.
        """
        teacher = cls(settings, student.max_length)
        found = asyncio.run(teacher._find_model())
        # The server requires room for an answer of at least one token.
        teacher.max_length = int(found.get("max_model_len") or student.max_length + 1) - 1
        size = min(int(student.model.config.vocab_size), len(student.tokenizer))
        probe = [size - 1, *((7 + 13 * i) % size for i in range(min(_PROBE, teacher.max_length - 1)))]
        try:
            (told,) = asyncio.run(teacher._ask_all([probe]))
        except ConfigError:
            raise
        except LightningError as error:
            raise ConfigError(
                f"{error}. The request had tokens of the policy's tokenizer; a teacher scores the policy's own "
                "tokens, so both need the same tokenizer."
            ) from error
        teacher._delays_s = _DELAYS_S
        texts = [
            (entry[str(token)].get("decoded_token"), student.tokenizer.decode([token]))
            for token, entry in zip(probe[1:], told[1:], strict=True)
        ]
        known = [pair for pair in texts if pair[0] is not None]
        if sum(theirs != own for theirs, own in known) > len(known) / 2:  # parts of a character may differ
            raise ConfigError(
                f"teacher: the server at {teacher._url} reads tokens as other texts, such as {known[0][0]!r} for "
                f"{known[0][1]!r}; a teacher scores the policy's own tokens, so both need the same tokenizer."
            )
        return teacher

    def score(
        self, rows: Sequence[TrainingRow], temperature: float = 1.0, *, max_tokens: int = 8192
    ) -> list[list[float]]:
        """Returns the log-probability of every response token at temperature 1; 0 where the token was given."""
        assert temperature == 1, "TeacherSettings.check_sampling refuses others"
        sequences = [[*row.prompt_ids, *row.response_ids] for row in rows]
        scores = []
        for row, tokens, told in zip(rows, sequences, asyncio.run(self._ask_all(sequences)), strict=True):
            first = len(row.prompt_ids)
            values = [float(told[i][str(tokens[i])]["logprob"]) for i in range(first, len(tokens))]
            mask = row.mask or [1] * len(values)
            scores.append([value if sampled else 0.0 for value, sampled in zip(values, mask, strict=True)])
        return scores

    async def _find_model(self) -> dict[str, Any]:
        async with self._session() as session:
            answer = await self._request(session, "GET", "/models")
        models = {str(model["id"]): model for model in answer.get("data", ())}
        if self._settings.model not in models:
            raise ConfigError(
                f"teacher: the server at {self._shown_url} has no model {self._settings.model!r}; it has: "
                f"{', '.join(models) or 'none'}"
            )
        return dict(models[self._settings.model])

    async def _ask_all(self, sequences: Sequence[Sequence[int]]) -> list[list[dict[str, Any]]]:
        """Returns the server's entry for each token of each sequence; the first token's entry is empty."""
        limit = asyncio.Semaphore(_AT_ONCE)

        async def ask(tokens: Sequence[int]) -> list[dict[str, Any]]:
            body = {"model": self._settings.model, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0}
            async with limit:
                answer = await self._request(session, "POST", "/completions", body)
            choice = answer["choices"][0]
            # vLLM has this field in the choice; some compatible servers have it next to the choices.
            told = choice.get("prompt_logprobs") or answer.get("prompt_logprobs")
            if not told or len(told) != len(tokens):
                raise ConfigError(
                    f"teacher: the server at {self._shown_url} returns no prompt_logprobs; use vLLM, or `agl serve`."
                )
            for token, entry in zip(tokens[1:], told[1:], strict=True):
                if not math.isfinite(float(entry[str(token)]["logprob"])):
                    raise LightningError(
                        f"teacher: the server at {self._shown_url} returned a log-probability that is not finite"
                    )
            return [entry or {} for entry in told]

        async with self._session() as session:
            return await asyncio.gather(*map(ask, sequences))

    def _session(self) -> aiohttp.ClientSession:
        key = read_key(self._settings.api_key)
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        return aiohttp.ClientSession(timeout=timeout, headers={"Authorization": f"Bearer {key}"} if key else {})

    async def _request(self, session: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
        shown = f"{self._shown_url}{path}"
        tries = len(self._delays_s) + 1
        for number, delay_s in enumerate((*self._delays_s, None), 1):
            failure: aiohttp.ClientError | None = None
            try:
                url = f"{self._url}{path}"
                async with session.request(method, url, json=body, proxy=find_proxy(url)) as response:
                    text = await response.read()
            except TimeoutError as error:
                # A repetition would probably time out too, and each one blocks the training for timeout_s.
                raise LightningError(
                    f"teacher: {shown} did not answer within timeout_s = {self._settings.timeout_s:g} s; raise "
                    "timeout_s if the server needs more time for a request"
                ) from error
            except aiohttp.ClientError as error:
                failure = error
                problem = f"{shown} does not answer ({hide_password(f'{type(error).__name__}: {error}')})"
            else:
                if response.status == 200:
                    return orjson.loads(text)
                problem = f"{shown} answered {response.status}: {text.decode(errors='replace')[:500]}"
            if delay_s is None or (failure is None and response.status not in _RETRIED):
                raise LightningError(f"teacher: {problem}") from failure
            logger.warning("teacher: try %d of %d failed, the next is in %g s: %s", number, tries, delay_s, problem)
            await asyncio.sleep(delay_s)


_MAX_GAP = 10.0
"""Bound on log(teacher / policy) of a token, in nats, so that one token cannot dominate a batch."""


class Teacher:
    """A model whose distribution the policy is trained towards."""

    def __init__(self, scorer: Policy | ServedTeacher, settings: TeacherSettings) -> None:
        self.scorer = scorer
        self.settings = settings

    @classmethod
    def load(cls, settings: TeacherSettings, student: Policy, *, dtype: str) -> Teacher:
        """Loads the model into this process, or finds it at its endpoint.

        Raises:
            ConfigError: the model does not exist, or its tokenizer's vocabulary differs from the policy's.
            LightningError: the endpoint does not answer.
        """
        if settings.endpoint is not None:
            return cls(ServedTeacher.connect(settings, student), settings)
        policy = load_policy(settings.model, dtype=dtype, device=str(student.device))
        if policy.tokenizer.get_vocab() != student.tokenizer.get_vocab():
            raise ConfigError(
                f"teacher: the tokenizer of {settings.model!r} has another vocabulary than the policy's; a "
                "teacher scores the policy's own tokens, so both need the same tokenizer."
            )
        for parameter in policy.model.parameters():
            parameter.requires_grad_(False)
        return cls(policy, settings)

    def guide(
        self, rows: Sequence[TrainingRow], *, temperature: float, max_tokens: int
    ) -> tuple[list[TrainingRow], dict[str, float]]:
        """Returns the rows with the teacher's part added to the advantage of every sampled token, and metrics.

            gap_t = log teacher(t) - log policy(t)
            A_t   = reward_coefficient A + coefficient (gap_t - mean of the gaps of all rows)

        The negated gap is the reverse KL divergence at a token that the policy sampled (on-policy distillation, Agarwal
        et al. 2023, arXiv:2306.13649; as advantages of single tokens in Lu et al. 2025, "On-Policy Distillation"). The
        mean is a baseline: it lowers the variance of the gradient and does not change its expectation.
        """
        longest = self.scorer.max_length
        if too_long := sum(row.n_tokens > longest for row in rows):
            raise ConfigError(
                f"teacher: {too_long} rows are longer than the {longest} tokens of {self.settings.model!r}; lower "
                "max_tokens of sampling, or use a teacher with more positions."
            )
        scores = self.scorer.score(rows, temperature, max_tokens=max_tokens)
        gaps = [
            [max(-_MAX_GAP, min(_MAX_GAP, theirs - own)) for theirs, own in zip(teacher, row.logprobs, strict=True)]
            for row, teacher in zip(rows, scores, strict=True)
        ]
        sampled = [gap for row, values in zip(rows, gaps, strict=True) for gap in row.sampled(values)]
        if not sampled:
            return [], {}
        mean = math.fsum(sampled) / len(sampled)
        guided = [replace(row, advantage=self._add(row, values, mean)) for row, values in zip(rows, gaps, strict=True)]
        return guided, {"teacher_kl": -mean}

    def _add(self, row: TrainingRow, gaps: Sequence[float], mean: float) -> list[float]:
        own = row.advantage if isinstance(row.advantage, Sequence) else [row.advantage] * len(gaps)
        return [
            self.settings.reward_coefficient * value + self.settings.coefficient * (gap - mean)
            for value, gap in zip(own, gaps, strict=True)
        ]
