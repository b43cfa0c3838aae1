"""Opening a store from the command line, and printing records at a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import click
from pydantic import BaseModel

from agentlightning.cli import echo
from agentlightning.errors import ConfigError, LightningError, NotFoundError, PluginError
from agentlightning.store.protocol import LightningStore
from agentlightning.types import PaginatedResult
from agentlightning_plugins.shared.rendering.text import print_table

logger = logging.getLogger("agentlightning")
P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=BaseModel)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


DEFAULT_STORE: Final = "the newest run under runs/, else ./agl.db"
"""The default of :func:`find_store` after AGL_STORE, in words."""
store_option = click.option(
    "--store",
    "where",
    metavar="URL",
    help=f"URL of the store, or directory of a run, also without --store. Default: AGL_STORE, else {DEFAULT_STORE}.",
)
written_store_option = click.option(
    "--store",
    default="sqlite:///agl.db",
    envvar="AGL_STORE",
    show_default=True,
    show_envvar=True,
    metavar="URL",
    help="Store to write to: a URL, or the directory of a run; the token of a store is read from AGL_TOKEN.",
)
run_option = click.option(
    "--run", envvar="AGL_RUN", show_envvar=True, metavar="NAME", help="A run of a shared store; default is `default`."
)


class StoreCommand(click.Command):
    """A command with ``store_option``, which also takes the store as an argument without a name.

    Without ``--store``, the first argument that is a URL or a directory with a ``store.db`` is the store, in any place;
    all other arguments are the command's own.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with_value = {
            name for each in self.params if isinstance(each, click.Option) and not each.is_flag for name in each.opts
        }
        is_named = any(text == "--store" or text.startswith("--store=") for text in args)
        for place, text in enumerate(() if is_named else args):
            if not (place and args[place - 1] in with_value) and _is_store(text):
                args = [*args[:place], *args[place + 1 :], "--store", text]
                break
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if "unexpected extra argument" not in error.message:
                raise
            form = "the directory of a run has a store.db, and the URL of a store begins with a scheme"
            raise click.UsageError(f"{error.message}; {form}", ctx) from None

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[RUN_DIR|URL]"]


def _is_store(text: str) -> bool:
    """Whether an argument is a URL, or the directory of a run."""
    return re.match(r"[a-z]\w*://", text) is not None or (len(text) < 1000 and Path(text, "store.db").is_file())


class StoreGroup(click.Group):
    """A group of commands that read a store."""

    command_class = StoreCommand


@contextlib.contextmanager
def failing_run() -> Iterator[None]:
    """Makes the exit code of a failed run 1, because 2 means that a setting is wrong; --debug shows the traceback."""
    try:
        yield
    except (ConfigError, PluginError):
        raise
    except LightningError as error:
        logger.debug("the run failed", exc_info=True)
        raise click.ClickException(str(error)) from error


def limit_option(default: int, help: str) -> Callable[[F], F]:
    """Returns the option ``--limit`` of a command that lists records."""
    return click.option("--limit", default=default, show_default=True, type=click.IntRange(min=1), help=help)


def with_store(command: Callable[Concatenate[LightningStore, P], Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Adds ``--json``, ``--store`` and ``--run`` to a coroutine function, which gets the opened store."""

    @json_option
    @store_option
    @run_option
    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        where, run = kwargs.pop("where"), kwargs.pop("run")
        use_store(
            where if isinstance(where, str) else None,
            run if isinstance(run, str) else None,
            lambda store: command(store, *args, **kwargs),
        )

    return wrapper


def use_store(where: str | None, run: str | None, action: Callable[[LightningStore], Coroutine[Any, Any, T]]) -> T:
    """Opens the store of ``--store`` and ``--run``, and returns the result of an action on it."""

    async def main() -> T:
        store = open_store(where, run)
        try:
            return await action(store)
        finally:
            await store.close()

    return asyncio.run(main())


def find_store(where: str | None, configured: str | None = None) -> str:
    """Returns the URL of the store, or the directory of the run, that the user names, or a default.

    The default is AGL_STORE, else ``configured``, else the newest run under ``runs/`` (by its start), which a line on
    stderr names, else ``agl.db`` in the working directory. Raises UsageError if there is none of these.
    """
    if where := where or os.environ.get("AGL_STORE") or configured:
        return where
    records = [file for file in Path("runs").glob("*/run.json") if file.with_name("store.db").is_file()]
    if records:
        newest = max(records, key=lambda file: file.stat().st_mtime).parent
        echo(f"store: {newest}, the newest run; another one: --store URL or --store runs/NAME", err=True)
        return str(newest)
    if not Path("agl.db").is_file():
        raise click.UsageError(
            "there is no run under runs/ and no agl.db here; name the directory of a run or the URL of a store, such "
            "as runs/NAME or http://127.0.0.1:4747 (from `agl store`), or set AGL_STORE"
        )
    return "sqlite:///agl.db"


def open_store(where: str | None, run: str | None = None) -> LightningStore:
    """Opens the store that :func:`find_store` returns: a URL or a run's directory; scoped to ``run`` or ``default``.

    Raises UsageError if it does not exist.
    """
    where = find_store(where)
    if where.startswith("sqlite:///") and not Path(where.removeprefix("sqlite:///").split("?")[0]).is_file():
        raise click.UsageError(f"--store {where}: the file does not exist")
    from agentlightning.store.factory import create_store

    return create_store(where, run=run)


def found(item: T | None, what: str, id: str) -> T:
    """Returns ``item``, the result of a getter; raises NotFoundError if it is None."""
    if item is None:
        hint = "; the directory of a run is taken for the store if it has a store.db" if "/" in id else ""
        raise NotFoundError(f"no {what} {id!r} in this store{hint}")
    return item


def to_json(record: BaseModel) -> Any:
    """Converts a record to plain JSON values."""
    return record.model_dump(mode="json")


def print_json(value: Any) -> None:
    """Prints plain values as indented JSON."""
    echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_record(as_json: bool, record: dict[str, Any]) -> None:
    """Prints one record, as JSON or as lines."""
    (print_json if as_json else print_fields)(record)


def print_result(as_json: bool, value: dict[str, Any], text: str) -> None:
    """Prints the result of a command, as JSON or as text."""
    if as_json:
        print_json(value)
    else:
        echo(text)


def print_event(as_json: bool, value: dict[str, Any], text: str) -> None:
    """Prints one line, as JSON or as text."""
    echo(json.dumps(value, ensure_ascii=False) if as_json else text)


def print_page(
    as_json: bool,
    page: PaginatedResult[M],
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    to_json: Callable[[M], Any] = to_json,
    optional: Sequence[str] = (),
) -> None:
    """Prints the result of a query, as JSON or as a table; stderr shows how many records the table omits.

    ``optional``: as in ``print_table``.
    """
    if page.truncated:
        echo("The search ended at its time limit; matches may be missing. Use fewer conditions.", err=True)
    if as_json:
        print_json([to_json(record) for record in page])
        return
    print_table(columns, rows, optional)
    if page.total > len(page):
        echo(f"{len(page)} of {page.total}; --limit shows more", err=True)


def print_fields(record: dict[str, Any]) -> None:
    """Prints one record: one line for each field that is set."""
    for name, value in record.items():
        if value not in (None, {}, []):
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            echo(f"{name:<22} {shown}")


def show_time(instant: float | None) -> str:
    """Formats a Unix time as local time, with the date unless it is today."""
    if instant is None:
        return ""
    then, today = time.localtime(instant), time.localtime()
    is_today = (then.tm_year, then.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", then)


def shorten(value: Any, length: int = 60) -> str:
    """Formats a value as one line of at most ``length`` characters; a value that is not text becomes JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


def json_or_text(text: str) -> Any:
    """Parses an argument: returns its value if it is JSON, otherwise its text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
