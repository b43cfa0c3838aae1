"""Measures training and sampling on one GPU, each beside its alternative, and survives being stopped.

    python examples/gpu/measure.py --out runs/gpu --minutes 9 --part update
    python examples/gpu/measure.py --out runs/tiny --tiny          # every part with a toy model on a CPU

``OUT/measured.jsonl`` and ``OUT/measured.md`` get a line as soon as it is measured. A call ends when its minutes are
over; it stops a training as Ctrl-C does, and reports how far it came. The next call with the same ``--out`` measures
what is missing, and continues a stopped training. README.md explains the parts.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from sheet import Figures, Sheet, interrupted_after
from transformers import GenerationConfig
from warm_start import SIZES, describe, make_model, make_tokenizer, warm_start

import agentlightning as agl
from agentlightning_algorithms.shared.policy.draw import Generation, SamplingParams
from agentlightning_algorithms.shared.policy.lora import add_lora
from agentlightning_algorithms.shared.policy.model import Policy
from agentlightning_algorithms.shared.policy.sampler import Sampler
from agentlightning_algorithms.shared.policy.server.completion import CompletionAnswer
from agentlightning_algorithms.shared.policy.server.request import ChatRequest, PolicyCompletions
from agentlightning_algorithms.shared.policy.settings import LoraSettings, UpdateSettings
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_algorithms.shared.policy.updater import Updater
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems

SHAPES: dict[str, dict[str, Any]] = {
    "full": {
        "update": {"rows": 4, "tokens": 16_384, "prompt": 2048, "rounds": 3},
        "sample": {"requests": (1, 64, 256), "prompt": 256, "shared": 1024, "reply": 128, "rounds": 3, "batching": {}},
        "talk": {"conversations": 16, "turns": 6, "prompt": 256, "reply": 32},
        "long": {"turns": 128, "prompt": 516, "reply": 24},
        "learn": ("corrected", "random rewards", "frozen", "uncorrected"),
        "async": {"steps": 12, "tail_s": 6.0, "staleness": (0, 4, 1)},
        "cache_bytes": 16 * 2**30,
    },
    "tiny": {
        "update": {"rows": 2, "tokens": 32, "prompt": 8, "rounds": 1},
        "sample": {
            "requests": (4,), "prompt": 8, "shared": 32, "reply": 4, "rounds": 1,
            "batching": {"num_blocks": 64, "max_batch_tokens": 64},
        },
        "talk": {"conversations": 2, "turns": 2, "prompt": 32, "reply": 4},
        "long": {"turns": 3, "prompt": 32, "reply": 6},
        "learn": ("random rewards",),
        "async": {"steps": 1, "tail_s": 0.1, "staleness": (4,)},
        "cache_bytes": 64 * 2**20,
    },
}  # fmt: skip
LEARNING: dict[str, dict[str, Any]] = {
    "corrected": {"old_logprobs": "trainer", "importance_weights": "token", "importance_upper": 2.0},
    "uncorrected": {"old_logprobs": "trainer"},
    "random rewards": {"old_logprobs": "trainer", "importance_weights": "token", "importance_upper": 2.0},
    "frozen": {"lr": 1e-12},
}
"""Trainings of the part ``learn``, and their settings of updates; the last two are controls that must not learn."""
PUBLISHED = "prime-rl publishes 11.9k and 13.3k tokens/s for this shape"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all parts need."""

    sheet: Sheet
    out: Path
    size: dict[str, Any]
    shape: dict[str, Any]
    device: str
    dtype: str
    backend: str

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def measure(self, name: str, run: Callable[[], Figures]) -> None:
        """Measures and writes what is not written yet."""
        if name in self.sheet.done:
            return
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
        self.sheet.add(name, run())

    def policy(self, *, trained: bool = False) -> Policy:
        """Returns a policy with random weights, in float32 if they are trained."""
        tokenizer = make_tokenizer(self.size["model"]["vocab_size"])
        return Policy(
            make_model(self.size, self.device, torch.float32 if trained else self._dtype, tokenizer), tokenizer
        )

    def sampler(self, policy: Policy, **options: Any) -> closing[Sampler]:
        memory: int = self.shape["cache_bytes"]
        settings = {"prefix_cache_bytes": memory, "kv_cache_bytes": memory, **options}
        return closing(Sampler(policy, max_batch_size=256, seed=0, **settings))

    def seconds(self, work: Callable[[], object], rounds: int) -> float:
        """Returns the median time of ``work`` after one round of warming up."""
        found = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            work()
            if self.is_gpu:
                torch.cuda.synchronize()
            found.append(time.perf_counter() - started)
        return statistics.median(found[1:])

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    # ---- update ----

    def update(self) -> None:
        """Updates with all weights and with LoRA, of our updater and of a plain PyTorch loop with the same loss."""
        for kind in ("full", "LoRA r16"):
            for name, make in (("ours", self._our_update), ("plain PyTorch", self._plain_update)):
                self.measure(f"update, {kind}, {name}", partial(self._update, make, kind))

    def _update(self, make: Callable[[Policy, list[TrainingRow]], Callable[[], object]], kind: str) -> Figures:
        shape = self.shape["update"]
        policy = self.policy(trained=kind == "full")
        if kind != "full":
            add_lora(policy.model, LoraSettings(rank=16))
        rng = random.Random(0)
        n_tokens, n_prompt = shape["tokens"], shape["prompt"]
        rows = []
        for _ in range(shape["rows"]):
            ids = [rng.randrange(policy.vocabulary) for _ in range(n_tokens)]
            rows.append(TrainingRow(ids[:n_prompt], ids[n_prompt:], [0.0] * (n_tokens - n_prompt), rng.gauss(0, 1)))
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            seconds = self.seconds(make(policy, rows), shape["rounds"])
        except torch.OutOfMemoryError:
            return {"context": n_tokens, "result": "out of memory"}
        figures: Figures = {"context": n_tokens, "tokens/s": len(rows) * n_tokens / seconds}
        if self.is_gpu:
            figures["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
        return {**figures, "reference": PUBLISHED}

    def _our_update(self, policy: Policy, rows: list[TrainingRow]) -> Callable[[], object]:
        settings = UpdateSettings(
            objective="cross_entropy", max_tokens_per_microbatch=rows[0].n_tokens, gradient_checkpointing=True
        )
        updater = Updater(policy, settings, autocast=self.dtype != "float32")
        return lambda: updater.update(rows)

    def _plain_update(self, policy: Policy, rows: list[TrainingRow]) -> Callable[[], object]:
        model: Any = policy.model
        recompute = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        recompute({"use_reentrant": False})
        model.train()  # activations are recomputed in this mode only
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=1e-6, fused=True)
        total = sum(len(row.response_ids) for row in rows)

        def step() -> None:
            for row in rows:
                ids = torch.tensor([[*row.prompt_ids, *row.response_ids]], device=self.device)
                with torch.autocast(policy.device.type, torch.bfloat16, enabled=self.dtype != "float32"):
                    logits = model(input_ids=ids, use_cache=False).logits[0, len(row.prompt_ids) - 1 : -1]
                logprobs = torch.log_softmax(logits.float(), -1)
                chosen = logprobs.gather(1, ids[0, len(row.prompt_ids) :, None])
                (-row.advantages[0] * chosen.sum() / total).backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    # ---- sample ----

    def sample(self) -> None:
        """Sampling in this process, beside transformers' continuous batching."""
        shape, talk = self.shape["sample"], self.shape["talk"]
        prompt = shape["prompt"]
        rng = random.Random(0)
        policy = self.policy()

        def draw(length: int) -> list[int]:
            return [rng.randrange(policy.vocabulary - 2) for _ in range(length)]

        def independent(n: int) -> Callable[[], list[list[int]]]:
            return lambda: [draw(prompt) for _ in range(n)]

        def shared() -> list[list[int]]:
            prefix = draw(shape["shared"])
            return [prefix + draw(prompt // 8) for _ in range(shape["requests"][-1] // 2)]

        cases = {f"{n} requests of {prompt} tokens": independent(n) for n in shape["requests"]}
        cases[f"{shape['requests'][-1] // 2} requests with a prefix of {shape['shared']} tokens"] = shared
        answerers: dict[str, Callable[[Policy], closing[Any]]] = {
            "ours": self.sampler,
            "ours without CUDA graphs": partial(self.sampler, cuda_graphs=False),
            "ours without prefix cache": partial(self.sampler, prefix_cache_bytes=0),
            "transformers' continuous batching": lambda policy: closing(TransformersBatch(policy, shape["batching"])),
        }
        for name, open_one in answerers.items():
            for case, prompts in cases.items():
                work = partial(self._sample, open_one, policy, prompts)
                self.measure(f"sample, {case}, {name}", work)
            talks = f"{talk['conversations']} conversations of {talk['turns']} turns"
            self.measure(f"sample, {talks}, {name}", partial(self._talk, open_one, policy, draw))

    def _sample(
        self, open_one: Callable[[Policy], closing[Any]], policy: Policy, prompts: Callable[[], list[list[int]]]
    ) -> Figures:
        """Measures new prompts in each round, so that only what they share is in a cache."""
        counted: list[int] = []
        reply = self.shape["sample"]["reply"]
        with open_one(policy) as sampler:

            def answer() -> None:
                counted.append(sum(map(len, sample(sampler, prompts(), reply))))

            try:
                seconds = self.seconds(answer, self.shape["sample"]["rounds"])
            except Unavailable as error:
                return {"result": str(error)}
        return {"tokens/s": statistics.median(counted[1:]) / seconds, "reply": reply}

    def _talk(
        self, open_one: Callable[[Policy], closing[Any]], policy: Policy, draw: Callable[[int], list[int]]
    ) -> Figures:
        shape = self.shape["talk"]

        def talk() -> None:
            prompts: list[list[int]] = [[] for _ in range(shape["conversations"])]
            for _ in range(shape["turns"]):
                prompts = [prompt + draw(shape["prompt"]) for prompt in prompts]
                replies = sample(sampler, prompts, shape["reply"])
                prompts = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]

        with open_one(policy) as sampler:
            try:
                seconds = self.seconds(talk, 1)
            except Unavailable as error:
                return {"result": str(error)}
        return {"seconds": seconds, "tokens of a turn": shape["prompt"], "reply": shape["reply"]}

    # ---- long ----

    def long(self) -> None:
        """One long conversation over the policy server's own prompts, beside tokenizing each prompt again."""
        turns = self.shape["long"]["turns"]
        for name, continues in (("reusing sampled tokens", True), ("tokenizing each turn again", False)):
            self.measure(f"long, a conversation of {turns} turns, {name}", partial(self._converse, continues))

    def _converse(self, continues: bool) -> Figures:
        shape, policy = self.shape["long"], self.policy()
        tokenizer: Any = policy.tokenizer
        completions = PolicyCompletions(policy, "policy", policy.max_length)
        rng = random.Random(0)
        messages: list[dict[str, Any]] = []
        calls: list[tuple[list[int], list[int]]] = []
        prompt_s = 0.0
        started = time.perf_counter()
        with self.sampler(policy) as sampler:
            for _ in range(shape["turns"]):
                said = tokenizer.decode([rng.randrange(256, policy.vocabulary - 2) for _ in range(shape["prompt"])])
                messages.append({"role": "user", "content": said})
                request = ChatRequest(messages=messages)
                begun = time.perf_counter()
                prompt = completions.prompt(request)
                if not continues:
                    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                    prompt = prompt._replace(token_ids=tokenizer.encode(text, add_special_tokens=False), digest=b"")
                prompt_s += time.perf_counter() - begun
                params = SamplingParams(max_tokens=shape["reply"], seed=len(messages))
                generation = sampler.submit(prompt.token_ids, params).result()
                calls.append((prompt.token_ids, list(generation.token_ids)))
                answer = CompletionAnswer(completions, request, prompt).whole([generation])
                messages.append(answer["choices"][0]["message"])
            totals = sampler.statistics
        seconds = time.perf_counter() - started
        breaks = sum(later[: len(old) + len(new)] != old + new for (old, new), (later, _) in pairwise(calls))
        drift = {name: float(n) for name, n in completions.conversations.counts.items() if name.startswith("drift")}
        return {
            "tokens": float(sum(map(len, calls[-1]))), "training rows": 1.0 + breaks, "seconds": seconds,
            "seconds of prompts": prompt_s, "reused": totals["reused_tokens"] / totals["prompt_tokens"],
            **(drift if continues else {}),
        }  # fmt: skip

    # ---- learn and async ----

    def learn(self) -> None:
        """Trains the calculator agent with and without correction, and two controls."""
        for name in self.shape["learn"]:
            agent = random_reward_agent if name == "random rewards" else calculator_agent
            self._train(f"learn, {name}", agent, LEARNING[name], {})

    def asynchronous(self) -> None:
        """Trains with staleness, where one rollout in sixteen is slow."""
        shape = self.shape["async"]
        for staleness in shape["staleness"]:
            steps = {"steps": shape["steps"], "staleness": staleness, "eval_every": 0}
            self._train(f"async, staleness {staleness}", uneven_agent, {}, steps)

    def _start(self) -> Path:
        start = self.out / "start"
        if not start.is_dir():
            name = "warm start"
            self.sheet.add(name, {**warm_start(start, self.size, self.device, self._dtype)})
        return start

    def _train(self, name: str, agent: Any, update: dict[str, Any], further: dict[str, Any]) -> None:
        """Trains, or continues a training that was stopped; writes how far it came, also if it is stopped."""
        if self.backend != "transformers":
            name += f", {self.backend}"
        if name in self.sheet.done:
            return
        model, folder = self._start(), self.out / name.replace(", ", "-").replace(" ", "-")
        settings = {**self.size["training"], **further}
        rate = settings.pop("lr")
        trainer = agl.Trainer(
            algorithm={
                "name": "grpo", "model": str(model), "sampling": {"temperature": 1.0, "max_tokens": 32},
                "device": self.device, "dtype": self.dtype, "backend": self.backend, "max_batch_size": 256,
                "rollout_timeout_s": 120.0,
                **settings,
                "update": {"lr": rate, "betas": (0.9, 0.99), "minibatches": 4, **update},
            },
            run_dir=folder, resume=folder.exists(), trackers=["jsonl"], strategy=self.size["strategy"],
            n_runners=self.size["runners"], max_concurrency=64,
        )  # fmt: skip
        train = [{**task, "tail_s": self.shape["async"]["tail_s"]} for task in make_problems("train", 4096)]
        complete = False
        try:
            status = trainer.fit(agent, train, make_problems("val", self.size["validation"])).status
            complete = status == "succeeded"
        finally:
            figures = read_curve(folder / "metrics.jsonl")
            if figures:
                self.sheet.add(name, figures, complete=complete)
        if not complete:
            raise SystemExit(f"{name}: the training ended as {status}; see {folder}")


def read_curve(file: Path) -> Figures:
    """Returns the figures of a training; none before its first step."""
    lines = file.read_text().splitlines() if file.is_file() else []
    by_step = {entry["step"]: entry for entry in map(json.loads, lines) if "step" in entry}  # the newest of each
    steps = [by_step[step] for step in sorted(by_step)]
    trained = [entry for entry in steps if "reward" in entry]
    if not trained:
        return {}

    def median(key: str) -> float:
        return float(statistics.median([entry[key] for entry in trained if key in entry] or [0.0]))

    rewards = [entry["val_reward"] for entry in steps if "val_reward" in entry]
    return {
        "steps": float(len(trained)), "reward of each step": " ".join(f"{e['reward']:.2f}" for e in trained),
        "held-out before": rewards[0], "after": rewards[-1],
        "rollouts/s": sum(e["rollouts"] for e in trained) / sum(e["seconds"] for e in trained),
        "sampled tokens/s": median("tokens_per_s"), "trained tokens/s": median("train_tokens_per_s"),
        "gap": median("logprob_gap_max"), "largest gap": max(e.get("logprob_gap_max", 0.0) for e in trained),
        "mean staleness": statistics.mean(e.get("staleness", 0.0) for e in trained),
    }  # fmt: skip


def random_reward_agent(task: Mapping[str, Any], llm: agl.LLM, rollout: agl.AttemptedRollout) -> float:
    """The control of the part ``learn``: in training, the reward says nothing about the answer."""
    reward = calculator_agent(task, llm)
    return reward if rollout.mode != "train" else float(random.Random(rollout.rollout_id).random() < 0.25)


def uneven_agent(task: Mapping[str, Any], llm: agl.LLM, rollout: agl.AttemptedRollout) -> float:
    """Runs the demo's agent, slowed down in one of sixteen rollouts of training."""
    if rollout.mode == "train" and random.Random(rollout.rollout_id).random() < 1 / 16:
        time.sleep(task["tail_s"])
    return calculator_agent(task, llm)


class Unavailable(Exception):
    """The installed transformers cannot do what is asked."""


class TransformersBatch:
    """transformers' continuous batching with paged attention, behind the interface of our sampler that is used here."""

    def __init__(self, policy: Policy, memory: dict[str, int]) -> None:
        """Takes the settings of its memory; without, it takes the free memory of the GPU."""
        self._policy, self._memory = policy, memory

    def submit_all(self, prompts: Sequence[list[int]], reply: int) -> list[list[int]]:
        """Returns the replies.

        Raises:
            Unavailable: this version of transformers fails.
        """
        model: Any = self._policy.model
        generation = GenerationConfig(max_new_tokens=reply, do_sample=True, eos_token_id=-1, pad_token_id=0)
        try:
            from transformers.generation.configuration_utils import ContinuousBatchingConfig  # newer than 5.0

            batching = ContinuousBatchingConfig(return_logprobs=True, **self._memory)
            answers = model.generate_batch(
                inputs=prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False
            )
        except Exception as error:  # an isolation point: the other measurements go on
            raise Unavailable(f"failed: {type(error).__name__}: {error}"[:200]) from error
        replies = [list(answer.generated_tokens) for answer in answers.values()]
        if len(replies) != len(prompts):
            raise Unavailable(f"failed: {len(replies)} of {len(prompts)} requests were answered")
        return replies

    def close(self) -> None:
        """Releases nothing: each call ends its own batch."""


def sample(sampler: Sampler | TransformersBatch, prompts: Sequence[list[int]], reply: int) -> list[list[int]]:
    """Returns a reply to each prompt."""
    if isinstance(sampler, TransformersBatch):
        return sampler.submit_all(prompts, reply)
    futures: list[Future[Generation]] = [sampler.submit(each, SamplingParams(max_tokens=reply)) for each in prompts]
    return [list(future.result().token_ids) for future in futures]


PARTS: dict[str, Callable[[Bench], None]] = {
    "learn": Bench.learn, "update": Bench.update, "sample": Bench.sample, "long": Bench.long,
    "async": Bench.asynchronous,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="directory of the figures and the trainings")
    parser.add_argument("--part", nargs="+", choices=[*PARTS], default=[*PARTS], help="default: all, in this order")
    parser.add_argument("--minutes", type=float, default=9.0, help="the call ends after this time (default: 9)")
    parser.add_argument("--tiny", action="store_true", help="a model of thousands of weights, for a check on a CPU")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--backend", default="transformers", help="backend of trainings: transformers or vllm")
    options = parser.parse_args(arguments)
    kind = "tiny" if options.tiny else "full"
    if options.tiny:
        torch.set_num_threads(1)
    sheet = Sheet(options.out, describe(options.device))
    bench = Bench(
        sheet=sheet, out=options.out, size=SIZES[kind], shape=SHAPES[kind], device=options.device, dtype=options.dtype,
        backend=options.backend,
    )  # fmt: skip
    # A training ends its processes, and a kernel runs to its end, before the interrupt takes effect.
    with interrupted_after(max(1.0, 60 * options.minutes - 25)) as over:
        try:
            for part in options.part:
                PARTS[part](bench)
        except KeyboardInterrupt:
            if not over:
                raise
            print(f"stopped after {options.minutes:g} minutes; the same command measures what is missing", flush=True)


if __name__ == "__main__":
    main()
