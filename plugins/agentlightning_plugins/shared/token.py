"""The tokens of a served store, from the environment or a file that may change at any time."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agentlightning.errors import ConfigError

logger = logging.getLogger("agentlightning")
_FILE: Final = "file:"
READ_S: Final = 2.0
"""How often a file of tokens is read again."""


def check_token(token: str) -> str:
    """Returns a token; raises ConfigError if a header cannot carry it."""
    if not token or not token.isprintable() or token != token.strip():
        raise ConfigError(
            "the token of the store (--token or AGL_TOKEN) is empty, begins or ends with a blank, or has a line end or "
            "another control character, which a header cannot carry; remove it"
        )
    return token


def read_token_file(path: Path) -> list[str]:
    """Returns the tokens in a file, which has one on each line; there is at least one.

    Raises ConfigError if the file cannot be read, or has no token or an invalid one.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {path} cannot be read: {error}") from error
    tokens = [check_token(line.rstrip("\r")) for line in lines if line.strip()]
    if not tokens:
        raise ConfigError(f"the token file {path} is empty; write a token on its first line")
    return tokens


class StoreTokens:
    """The tokens of a store: a given one, and one for each line of a file, which is read again while it is used.

    The first token is the one that clients send and that signs the tokens of attempts; servers accept all of them.
    """

    def __init__(self, token: str | None, path: Path | None) -> None:
        """Reads the file; raises ConfigError if that fails, or if it has no token or an invalid one."""
        self._given, self._path = token, path
        self._problem = ""
        self._tokens = self._read()
        self._read_at = time.monotonic()

    @classmethod
    def of_environment(cls) -> StoreTokens:
        """Takes AGL_TOKEN if it is not empty, else the file AGL_TOKEN_FILE; raises ConfigError as the constructor."""
        token, path = os.environ.get("AGL_TOKEN"), os.environ.get("AGL_TOKEN_FILE")
        return cls(token or None, Path(path) if path and not token else None)

    @classmethod
    def of_setting(cls, text: str) -> StoreTokens:
        """Takes a key, or for ``file:PATH`` each line of the file, as settings ``api_key`` name them."""
        return cls(None, Path(text.removeprefix(_FILE))) if text.startswith(_FILE) else cls(text, None)

    @property
    def current(self) -> tuple[str, ...]:
        """The tokens; reads the file if that was not done in the last two seconds."""
        if time.monotonic() >= self._read_at + READ_S:
            self.refresh()
        return self._tokens

    def refresh(self) -> None:
        """Reads the file. If it is not valid, which is logged once, the tokens stay as they were."""
        if self._path is None:
            return
        self._read_at = time.monotonic()
        try:
            tokens, self._problem = self._read(), ""
        except ConfigError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("%s; the tokens stay as they were", error)
        else:
            if tokens != self._tokens:
                self._tokens = tokens
                logger.warning("the tokens of %s have changed; %d are valid now", self._path, len(tokens))

    def _read(self) -> tuple[str, ...]:
        given = [] if self._given is None else [check_token(self._given)]
        return tuple(dict.fromkeys([*given, *(read_token_file(self._path) if self._path is not None else [])]))

    async def follow(self, replace: Callable[[tuple[str, ...]], object]) -> None:
        """Calls ``replace`` with the tokens whenever they change."""
        known = self._tokens
        while self._path is not None:
            await asyncio.sleep(READ_S)
            if self.current != known:
                known = self._tokens
                replace(known)


def find_token() -> str | None:
    """Returns the token in the environment: AGL_TOKEN if not empty, or the first in the file AGL_TOKEN_FILE."""
    return next(iter(StoreTokens.of_environment().current), None)


def is_key_file(setting: object) -> bool:
    """Whether a setting ``api_key`` names a file."""
    return isinstance(setting, str) and setting.startswith(_FILE)


def read_key(setting: str | None) -> str | None:
    """Returns the key of a setting ``api_key``: for ``file:PATH`` the current first line of the file.

    Raises ConfigError if the file cannot be read, or has no key.
    """
    return StoreTokens.of_setting(setting).current[0] if setting is not None and is_key_file(setting) else setting
