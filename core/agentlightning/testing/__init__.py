"""Conformance tests for authors of plugins: a class of tests for each kind, in the module of that name."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

pytest.register_assert_rewrite(
    *(f"{__name__}.{kit}" for kit in ("adapter", "algorithm", "reward", "store", "strategy", "tracer", "tracker")),
    "agentlightning_plugins.gateway.testing",
    "agentlightning_plugins.shared.agent_testing",
    "agentlightning_plugins.shared.environments.testing",
    "agentlightning_algorithms.shared.testing",
)


class BrokenPromise(AssertionError):
    """A component raised an error where its kind promises that it raises none."""


@contextlib.contextmanager
def promised(promise: str) -> Iterator[None]:
    """Fails the test with the promise if its block raises anything."""
    try:
        yield
    except (BrokenPromise, KeyboardInterrupt):
        raise
    except BaseException as error:  # a component under test may raise anything
        raise BrokenPromise(f"{promise}; it raised {type(error).__name__}: {error}") from error


def refusal(
    promise: str, kinds: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object]
) -> str | None:
    """Returns the message of the error that a call raises, None if it raises none.

    Fails the test with the promise if the error is not of these kinds.
    """
    with promised(promise):
        try:
            call()
        except kinds as error:
            return str(error)
    return None
