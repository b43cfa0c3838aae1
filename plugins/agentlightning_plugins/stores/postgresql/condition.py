"""PostgreSQL's dialect."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from agentlightning_plugins.stores.postgresql.transaction import index_key
from agentlightning_plugins.stores.shared.sql.condition import Dialect
from agentlightning_plugins.stores.shared.sql.plan import Planner

PLANNER: Final = Planner(
    Dialect(
        prefix="agl.",
        in_list="{} = ANY (?)",
        # The query runs first and its few positions are then looked up, so the planner need not guess how few they are.
        in_query="{} = ANY (ARRAY({}))",
        contains="strpos({}, ?) > 0",
        contains_id="strpos(rollout_id, ?) > 0",
        finds_ids_in_order=False,
        unindexed="({} || '')",
        live="live",
        make_list=list,
        index_key=index_key,
        no_limit=None,
    )
)


@lru_cache(maxsize=1000)
def number_parameters(sql: str) -> str:
    """Replaces each ``?`` by PostgreSQL's ``$1``, ``$2`` and so on."""
    first, *rest = sql.split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))
