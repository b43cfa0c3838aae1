"""Code beside an event loop, in daemon threads that can be told to stop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import ctypes
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

T = TypeVar("T")

_MAX_THREADS: Final = 32
"""Of one group at once; as many as an executor of the standard library has at the most."""


class ThreadStopped(BaseException):
    """Raised inside a thread whose caller was cancelled; a BaseException, so that agents do not swallow it."""


class ThreadGroup:
    """The threads that work for one caller, and for nobody else, so that they can be stopped when the caller is.

    What the caller gives to its event loop's default executor runs here (``install_group_executor``): synchronous tools
    and graph nodes, in most frameworks. A call that hangs takes a thread from its own caller only.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._is_stopped = False

    def submit(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Calls a function in one of the threads; a group that was stopped calls nothing more."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            if self._is_stopped:
                future.cancel()
                return future
            self._waiting.append((future, function))
            if len(self._threads) == _MAX_THREADS:
                return future
            thread = threading.Thread(target=self._work, name="agent-call", daemon=True)
            self._threads.add(thread)
        contextvars.Context().run(thread.start)  # each call brings a context of its own
        return future

    def stop(self) -> list[threading.Thread]:
        """Raises ThreadStopped in the threads that are at work, calls nothing more, and returns those threads."""
        with self._lock:
            self._is_stopped = True
            for future, _ in self._waiting:
                future.cancel()
            self._waiting.clear()
            for thread in self._threads:
                _raise_in(thread, ThreadStopped)
            return list(self._threads)

    def _work(self) -> None:
        with contextlib.suppress(ThreadStopped):  # it may come between two calls
            while (call := self._next()) is not None:
                future, function = call
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    result = function()
                except BaseException as error:  # isolation point: whatever the function raised belongs to the caller
                    future.set_exception(_make_awaitable(error))
                else:
                    future.set_result(result)

    def _next(self) -> tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._threads.discard(threading.current_thread())
            return None


_group: contextvars.ContextVar[ThreadGroup | None] = contextvars.ContextVar("agentlightning_thread_group", default=None)


class _GroupExecutor(concurrent.futures.ThreadPoolExecutor):
    """A pool that has the calls of a group made by the group's own threads."""

    def __init__(self, before: concurrent.futures.Executor | None) -> None:
        super().__init__()
        self._before = before

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        if (group := _group.get()) is not None:
            return group.submit(functools.partial(contextvars.copy_context().run, fn, *args, **kwargs))
        if self._before is not None:
            return self._before.submit(fn, *args, **kwargs)
        return super().submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        if self._before is not None:
            self._before.shutdown(wait, cancel_futures=cancel_futures)


@contextlib.contextmanager
def thread_group(on_abandoned: Callable[[list[threading.Thread]], None]) -> Iterator[None]:
    """Gives the block, and the tasks that it starts, a thread group, which is stopped when the block raises.

    Args:
        on_abandoned: called with the threads that were at work then.
    """
    group = ThreadGroup()
    token = _group.set(group)
    try:
        yield
    except BaseException:
        on_abandoned(group.stop())
        raise
    finally:
        _group.reset(token)


def install_group_executor() -> None:
    """Has the running event loop give what a group puts to its default executor to the group's own threads.

    An executor that the loop has already goes on doing everybody else's: the program that steps an agent chose it.
    """
    loop = asyncio.get_running_loop()
    before = getattr(loop, "_default_executor", None)  # it has no public name, and on other kinds of loops none at all
    if not isinstance(before, _GroupExecutor):
        loop.set_default_executor(_GroupExecutor(before))


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
        else:
            future.set_exception(_make_awaitable(error))

    def work() -> None:
        with contextlib.suppress(ThreadStopped):  # it may come when the function has returned
            result, error = None, None
            try:
                result = context.run(function)
            except BaseException as caught:  # isolation point: whatever the function raised belongs to the caller
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(deliver, result, error)

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


class _Interruption:
    """How what ``run_beside_loop`` has called is stopped in order."""

    stop: Callable[[], object] | None = None


_interruption: contextvars.ContextVar[_Interruption | None] = contextvars.ContextVar(
    "agentlightning_interruption", default=None
)


def stop_on_interrupt(stop: Callable[[], object]) -> None:
    """Says what a Ctrl-C does to the running event loop, where ``run_beside_loop`` has put it into a thread.

    Elsewhere this does nothing: there the signal itself arrives.

    Args:
        stop: called in the loop; a second Ctrl-C is raised in it.
    """
    interruption = _interruption.get()
    if interruption is not None:
        interruption.stop = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, stop)


def run_beside_loop(function: Callable[[], T]) -> T:
    """Calls a function that runs an event loop of its own: here, or in a thread where one is running here already.

    That is so in notebooks. A Ctrl-C goes on to the thread, and does there what ``stop_on_interrupt`` was told.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        running = False
    else:
        running = True
    if not running:  # outside the handler: what the function raises has nothing to do with the absent loop
        return function()
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    interruption = _Interruption()
    context = contextvars.copy_context()
    context.run(_interruption.set, interruption)

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
        try:
            if interruption.stop is None:
                _raise_in(thread, KeyboardInterrupt)
            else:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    interruption.stop()
            thread.join()
        except KeyboardInterrupt:
            _raise_in(thread, KeyboardInterrupt)
            thread.join()
        raise


def _make_awaitable(error: BaseException) -> BaseException:
    """What a future can carry: a StopIteration would wake nobody up, and the other two would end the event loop."""
    if isinstance(error, (StopIteration, KeyboardInterrupt, SystemExit)):
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))
