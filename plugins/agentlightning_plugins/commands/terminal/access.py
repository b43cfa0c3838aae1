"""Opens the store that a command works on, and reads its records page by page."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import click

from agentlightning.errors import NotFoundError, StoreError
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.types import PaginatedResult

P = ParamSpec("P")
T = TypeVar("T")
_PAGE = 500


def with_store(command: Callable[Concatenate[LightningStore, P], Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorates a coroutine function as a click command that gets the store of ``--store`` and ``--run``."""

    @click.option(
        "--store", "where", metavar="URL", help="Or a run's directory. Default: AGL_STORE, then agl.db, then agl store."
    )
    @click.option("--run", metavar="NAME", help="A run of a shared store; default is `default`.")
    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        where, run = kwargs.pop("where"), kwargs.pop("run")

        async def main() -> None:
            store = open_store(where if isinstance(where, str) else None, run if isinstance(run, str) else None)
            try:
                await command(store, *args, **kwargs)
            finally:
                await store.close()

        try:
            asyncio.run(main())
        except StoreError as error:
            if type(error) is StoreError and where is None and "AGL_STORE" not in os.environ:
                raise StoreError(f"{error} Select another store with --store URL or --store runs/NAME.") from error
            raise

    return wrapper


def open_store(where: str | None, run: str | None) -> LightningStore:
    """Opens the store that the user names, or a default.

    Args:
        where: a URL or the directory of a run. None: AGL_STORE, else ``agl.db`` in the working directory, else
            ``agl store`` on its default port.
        run: name of the run; None is ``default``.

    Raises:
        ConfigError: the store does not exist.
    """
    where = where or os.environ.get("AGL_STORE")
    if where is None:
        where = "sqlite:///agl.db" if Path("agl.db").is_file() else "http://127.0.0.1:4747"
    elif "://" not in where:
        folder = Path(where)
        if not (folder / "store.db").is_file():
            raise click.UsageError(f"--store {where}: not a URL, and {folder}/store.db does not exist")
        where = f"sqlite:///{folder / 'store.db'}"
    if where.startswith("sqlite:///") and not Path(where.removeprefix("sqlite:///").split("?")[0]).is_file():
        raise click.UsageError(f"--store {where}: the file does not exist")
    return create_store(where, run=run, token=os.environ.get("AGL_TOKEN") if where.startswith("http") else None)


async def every(
    query: Callable[..., Awaitable[PaginatedResult[T]]], *args: Any, limit: int | None = None, **conditions: Any
) -> AsyncIterator[T]:
    """Yields the items of a query. Reads page by page, so memory stays bounded."""
    left, offset, cursor = limit, 0, None
    while left is None or left > 0:
        size = _PAGE if left is None else min(_PAGE, left)
        place = {"offset": offset} if cursor is None else {"cursor": cursor}
        page = await query(*args, limit=size, **place, **conditions)
        for item in page.items:
            yield item
        offset += len(page.items)
        cursor = page.cursor
        left = None if left is None else left - len(page.items)
        if len(page.items) < size:
            return


def found(item: T | None, what: str, id: str) -> T:
    """Returns ``item``, the result of a getter.

    Raises:
        NotFoundError: ``item`` is None.
    """
    if item is None:
        raise NotFoundError(f"no {what} {id!r} in this store")
    return item
