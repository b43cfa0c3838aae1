"""Metrics of the rollouts of a step, and of the machine's GPUs."""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
import subprocess
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from agentlightning.store.lifecycle import MODEL_ERROR
from agentlightning.types import Triplet
from agentlightning_algorithms.shared.rollout_result import RewardCheck
from agentlightning_algorithms.verl.batch_row import BuiltRows

_MAX_TURNS: Final = 8
"""Number of turns with separate metrics; later turns count as the last of them."""


@dataclass(frozen=True)
class RolloutStats:
    """The numbers of one finished rollout."""

    reward: float
    """The reward, or what the rollout counts as if the agent failed or emitted no reward."""
    has_reward: bool
    error: str = ""
    """Type of the error; empty if there is none."""
    built: BuiltRows = field(default_factory=BuiltRows)
    queue_s: float = 0.0
    run_s: float = 0.0
    call_s: Sequence[float] = ()
    """Duration of each call at the gateway, pauses for new weights included."""
    calls: Sequence[Triplet] = ()
    """The rollout's model calls, in order."""
    source: str | None = None
    """The data source of the rollout's task."""


class RolloutMetrics:
    """Collects the stats of rollouts; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats: dict[str, list[RolloutStats]] = {}
        self._reward_check = RewardCheck()
        self._seen: set[tuple[str, str]] = set()
        self.lowest = math.inf
        """Lowest reward of the run."""

    def add(self, mode: str, stats: RolloutStats) -> None:
        """Adds a finished rollout."""
        with self._lock:
            self._stats.setdefault(mode, []).append(stats)
            if stats.has_reward:
                self.lowest = min(self.lowest, stats.reward)

    def is_first(self, mode: str, event: str) -> bool:
        """Whether this is the first event of its kind in a mode since ``take``; one is enough for the log."""
        with self._lock:
            is_first = (mode, event) not in self._seen
            self._seen.add((mode, event))
            return is_first

    def take(self, mode: str) -> dict[str, float]:
        """Returns the metrics of a mode's rollouts since the last call."""
        with self._lock:
            stats = self._stats.pop(mode, [])
            self._seen = {seen for seen in self._seen if seen[0] != mode}
        if stats:
            outcomes = [(each.reward if each.has_reward else None, each.error or None) for each in stats]
            self._reward_check.add(outcomes)
        return summarize(stats)


def summarize(stats: Sequence[RolloutStats]) -> dict[str, float]:
    """Means over rollouts, and counts of errors by kind."""
    if not stats:
        return {}
    # A rollout whose model call failed has no reward, as in ``grpo``: it says nothing about the agent.
    rewards = [each.reward for each in stats if each.error != MODEL_ERROR]
    spread = (
        {
            "reward": statistics.fmean(rewards),
            "reward_std": statistics.pstdev(rewards),
            "reward_min": min(rewards),
            "reward_max": max(rewards),
            "reward_median": statistics.median(rewards),
        }
        if rewards
        else {}
    )
    calls = [each.built.calls for each in stats]
    rows = [len(each.built.rows) for each in stats]
    numbers: dict[str, float] = {
        **spread,
        "rollouts": len(stats),
        "rollouts_without_reward": sum(not each.has_reward for each in stats),
        "rollouts_without_rows": rows.count(0),
        "valid_ratio": statistics.fmean(bool(each.built.rows) and each.has_reward for each in stats),
        "calls": sum(calls),
        "rows": sum(rows),
        "sampled_tokens": sum(sum(row.response_mask) for each in stats for row in each.built.rows),
        "calls_per_rollout": statistics.fmean(calls),
        "calls_per_rollout_max": max(calls),
        "queue_s": statistics.fmean(each.queue_s for each in stats),
        "queue_s_max": max(each.queue_s for each in stats),
        "run_s": statistics.fmean(each.run_s for each in stats),
        "run_s_max": max(each.run_s for each in stats),
    }
    call_s = [seconds for each in stats for seconds in each.call_s]
    if call_s:
        numbers |= {"call_s": statistics.fmean(call_s), "call_s_median": statistics.median(call_s)}
        numbers["call_s_max"] = max(call_s)
    sources: dict[str, list[float]] = {}
    for each in stats:
        if each.source is not None and each.error != MODEL_ERROR:
            sources.setdefault(each.source, []).append(each.reward)
    numbers.update({f"reward/{source}": statistics.fmean(found) for source, found in sorted(sources.items())})
    numbers.update(_describe_turns(stats))
    for prefix, counts in (
        ("errors", Counter(each.error for each in stats if each.error)),
        ("dropped", sum((each.built.dropped for each in stats), Counter())),
        ("mismatches", Counter(mismatch.kind for each in stats for mismatch in each.built.mismatches)),
    ):
        numbers.update({f"{prefix}/{name}": count for name, count in counts.items()})
    return {name: float(number) for name, number in numbers.items()}


def _describe_turns(stats: Sequence[RolloutStats]) -> dict[str, float]:
    """Returns calls, lengths and the share of cut-off answers by turn, counted from 1."""
    by_turn: dict[int, list[Triplet]] = {}
    for each in stats:
        for place, call in enumerate(each.calls, 1):
            by_turn.setdefault(min(place, _MAX_TURNS), []).append(call)
    numbers: dict[str, float] = {}
    for place, calls in sorted(by_turn.items()):
        numbers |= {
            f"turn/{place}/calls": len(calls),
            f"turn/{place}/prompt_length": statistics.fmean(len(call.prompt.get("token_ids") or ()) for call in calls),
            f"turn/{place}/response_length": statistics.fmean(
                len(call.response.get("token_ids") or ()) for call in calls
            ),
            f"turn/{place}/cut_off": statistics.fmean(call.metadata.get("finish_reason") == "length" for call in calls),
        }
    return numbers


class GPUMonitor:
    """Samples this machine's GPUs until :meth:`stop`; without ``nvidia-smi`` it reports nothing."""

    def __init__(self) -> None:
        """Starts to sample every two seconds."""
        self._samples: list[tuple[float, float]] = []
        """Utilization in percent, and memory in MiB."""
        self._process: subprocess.Popen[str] | None = None
        tool = shutil.which("nvidia-smi")
        if tool is not None:
            query = "--query-gpu=utilization.gpu,memory.used"
            command = [tool, query, "--format=csv,noheader,nounits", "--loop=2"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, args=(self._process,), name="agl-gpu", daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                busy, _, used = line.partition(",")
                with contextlib.suppress(ValueError):  # a GPU may not report a value
                    self._samples.append((float(busy), float(used)))

    def take(self) -> dict[str, float]:
        """Returns the mean utilization and the largest memory use of a GPU since the last call."""
        samples, self._samples = self._samples, []
        if not samples:
            return {}
        busy, used = zip(*samples, strict=True)
        return {"gpu_utilization": statistics.fmean(busy) / 100, "gpu_memory_gb_max": max(used) * 2**20 / 1e9}

    def stop(self) -> None:
        """Stops; may be called at any time."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
