"""Cost of training records: ``python tests/benchmarks/bench_training_records.py [--steps 6]``.

Trains the demo's agent by ``grpo`` with a ``sqlite`` store and prints, for each step, the time spent on records as a
share of the step. The baseline is the rest of the same step of the same run.

Target (issue 20): at most 3 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

import agentlightning as agl
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.demo.training import CHECKPOINT, GRPO_SETTINGS
from agentlightning_plugins.shared.training_records.query import read_ledger
from agentlightning_plugins.shared.training_records.record import LEDGER_SPAN, ROW_SPAN, TrainedRow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/store.db"
        settings = {**GRPO_SETTINGS, "model": str(CHECKPOINT), "steps": arguments.steps, "eval_every": 0}
        trainer = agl.Trainer(algorithm=settings, store=agl.create_store(url), run_dir=Path(folder) / "run")
        trainer.fit(calculator_agent, make_problems("train", 512))
        asyncio.run(report(url))


async def report(url: str) -> None:
    store = agl.create_store(url)
    try:
        total = recorded = 0.0
        for entry in await store.query_metrics():
            values = entry.values
            if "record_s" not in values:
                continue
            step_s = values["sample_s"] + values["prepare_s"] + values["train_s"]
            total, recorded = total + step_s, recorded + values["record_s"]
            share = values["record_s"] / step_s
            print(f"step {entry.step}: {step_s:.2f} s, records {1000 * values['record_s']:.0f} ms, {share:.2%}")
        rows = await store.query_spans(None, name=ROW_SPAN)
        tokens = sum(sum(TrainedRow.from_span(span).mask) for span in rows)
        size = sum(len(json.dumps(dict(span.attributes))) for span in rows)
        ledger = await store.query_spans(None, name=LEDGER_SPAN)
        print(
            f"all steps: {recorded / total:.2%}; {len(rows)} rows, {tokens} tokens, {size / 1e6:.1f} MB of attributes"
        )
        print(f"ledger: {len(ledger)} spans for {len(await read_ledger(store))} rollouts")
    finally:
        await store.close()


if __name__ == "__main__":
    main()
