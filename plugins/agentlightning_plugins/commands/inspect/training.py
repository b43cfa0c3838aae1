"""``agl ledger`` and ``agl tokens``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import click

from agentlightning.cli import echo
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.shared.rendering.text import print_table
from agentlightning_plugins.shared.terminal import StoreCommand, found, print_json, with_store
from agentlightning_plugins.shared.training_records.query import count_outcomes, read_ledger, read_rows
from agentlightning_plugins.shared.training_records.record import Outcome


@click.command("ledger", cls=StoreCommand)
@click.option("--step", type=click.IntRange(min=1), help="List the rollouts of one step; default: counts of all steps.")
@with_store
async def ledger(store: LightningStore, step: int | None, as_json: bool) -> None:
    """Show which training rollouts were trained on, and why the others were not."""
    entries = await read_ledger(store, step)
    if as_json:
        print_json([entry.to_json() for entry in entries])
        return
    if step is None:
        rows = [
            (of_step, sum(counts.values()), f"{counts['trained'] / sum(counts.values()):.0%}", _describe(counts))
            for of_step, counts in count_outcomes(entries).items()
        ]
        print_table(("step", "rollouts", "trained", "outcomes"), rows)
        return
    print_table(
        ("rollout", "group", "reward", "outcome", "calls"),
        [
            (each.rollout_id, each.group, each.reward, each.outcome, _describe(Counter(each.calls.values())))
            for each in entries
        ],
    )
    if entries:
        echo(f"{len(entries)} rollouts: {_describe(Counter(entry.outcome for entry in entries))}", err=True)


@click.command("tokens", cls=StoreCommand)
@click.argument("rollout_id")
@with_store
async def tokens(store: LightningStore, rollout_id: str, as_json: bool) -> None:
    """Show each token of the trained rows of ROLLOUT_ID: mask, both log-probabilities and advantage."""
    found(await store.get_rollout_by_id(rollout_id), "rollout", rollout_id)
    rows = await read_rows(store, rollout_id)
    if as_json:
        print_json([row.to_json() for row in rows])
        return
    if not rows:
        echo(f"{rollout_id} was not trained on; for the reason see: agl ledger", err=True)
    for row in rows:
        calls = ", ".join(call.response_id for call in row.calls)
        echo(f"step {row.step}, reward {row.reward}, {len(row.prompt_ids)} prompt tokens, {row.outcome}: {calls}")
        trainer: Sequence[float | None] = row.trainer_logprobs or [None] * len(row.response_ids)
        fields = zip(row.response_ids, row.mask, row.logprobs, trainer, row.advantages, strict=True)
        print_table(
            ("token", "text", "mask", "sampler", "trainer", "gap", "advantage"),
            [
                (
                    token,
                    repr(row.texts[token]) if token in row.texts else "",
                    mask,
                    f"{sampler:.4f}" if mask else "",
                    f"{theirs:.4f}" if mask and theirs is not None else "",
                    f"{theirs - sampler:+.1e}" if mask and theirs is not None else "",
                    f"{advantage:+.3f}" if mask else "",
                )
                for token, mask, sampler, theirs, advantage in fields
            ],
        )


def _describe(counts: Counter[Outcome]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
