"""An environment of verifiers: a module in a folder of ``PYTHONPATH``, with a harness of its own that needs no uv."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import verifiers.v1 as vf

__all__ = ["GuessHarness", "GuessTaskset"]


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward(weight=2.0)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.number))

    @vf.reward(weight=0.5)
    async def is_short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 3)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[GuessTask]:
        number = 0
        while True:
            yield GuessTask(GuessData(prompt=f"Say {number}.", number=number), self.config.task)
            number += 1


class GuessHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the model once; the prompt ``Say 3.`` breaks it."""

    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        if data.prompt == "Say 3.":
            raise RuntimeError("it crashed")
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx2.AsyncClient(timeout=None) as client:
            headers = {"Authorization": f"Bearer {secret}"}
            answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        return vf.ProgramResult(0 if answer.is_success else 1, "", answer.text)
