"""Code beside an event loop: one daemon thread per call, which can be told to stop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import ctypes
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class ThreadStopped(BaseException):
    """Raised inside a thread whose caller was cancelled; a BaseException, so that agents do not swallow it."""


async def run_in_thread(
    function: Callable[[], T], *, name: str, on_abandoned: Callable[[threading.Thread], None] | None = None
) -> T:
    """Runs a function in a daemon thread of its own, with the caller's context variables.

    A thread per call rather than a pool: one that never returns costs its own stack, not a slot, and never keeps the
    process alive. When the caller is cancelled, ThreadStopped is raised in the thread at its next bytecode; a thread
    that sits in a system call until later is abandoned.

    Args:
        function: what to run.
        name: of the thread, for stack dumps.
        on_abandoned: called with the thread when the caller was cancelled while it was at work.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, (StopIteration, KeyboardInterrupt, SystemExit)):  # a future cannot carry these
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function)
        except BaseException as caught:  # isolation point: whatever the function raised belongs to the caller
            error = caught
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        if thread.is_alive():
            _raise_in(thread, ThreadStopped)
            if on_abandoned is not None:
                on_abandoned(thread)
        raise


def run_beside_loop(function: Callable[[], T]) -> T:
    """Calls a function that runs an event loop of its own: here, or in a thread where one is running here already.

    That is so in notebooks. A Ctrl-C goes on to the thread, and its loop is cancelled as it would be here.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            outcome.set_result(context.run(function))
        except BaseException as error:  # isolation point: whatever the function raised belongs to the caller
            outcome.set_exception(error)

    thread = threading.Thread(target=work, name="beside-the-loop", daemon=True)
    thread.start()
    try:
        return outcome.result()
    except KeyboardInterrupt:
        if thread.is_alive():
            _raise_in(thread, KeyboardInterrupt)
            thread.join()
        raise


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))
