"""Runs code outside of an event loop, in daemon threads that can be stopped; waits until an event is set."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import ctypes
import functools
import inspect
import linecache
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Protocol, TypeVar

from agentlightning.store.waiting import running_loop

T = TypeVar("T")

_MAX_THREADS: Final = 32  # per group; the maximum of a default executor of the standard library


class ThreadStopped(KeyboardInterrupt):
    """Raised in a thread whose caller was cancelled.

    It is of the kind that agents do not swallow, and that ends an event loop even if it is raised in a callback.
    """


class EscapedError(RuntimeError):
    """Carries an exception that would end the event loop if it were raised there, such as SystemExit."""

    def __init__(self, original: BaseException) -> None:
        super().__init__(f"{type(original).__name__}: {original}")
        self.original = original


class SecondInterrupt(KeyboardInterrupt):
    """The second Ctrl-C of a user, in the thread of ``run_beside_loop``."""


def _fits_no_future(error: BaseException) -> bool:
    """Whether a future cannot hold an error, so that its waiters would not wake."""
    return isinstance(error, StopIteration)


def _is_unusual(error: BaseException) -> bool:
    """Whether an error of an agent could be mistaken for the end of the runner's own task."""
    return isinstance(error, StopIteration) or not isinstance(error, (Exception, ThreadStopped))


class ThreadGroup:
    """The threads that work for one caller only, so that they can be stopped together with it.

    They run what the caller submits to its event loop's default executor (``install_group_executor``), which is where
    most frameworks run synchronous tools and graph nodes. A call that hangs occupies a thread of its own caller only.
    """

    def __init__(self, name: str = "agent-call", escapes: Callable[[BaseException], bool] = _fits_no_future) -> None:
        """Makes a group without threads; an error for which ``escapes`` is true reaches the caller as EscapedError."""
        self._name = name
        self._escapes = escapes
        self._lock = threading.Lock()
        self._waiting: deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._is_stopped = False

    def submit(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Calls a function in one of the threads; a stopped group cancels the future instead."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            if self._is_stopped:
                future.cancel()
                return future
            self._waiting.append((future, function))
            if len(self._threads) == _MAX_THREADS:
                return future
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._threads.add(thread)
        contextvars.Context().run(thread.start)  # each call brings its own context
        return future

    def stop(self) -> list[threading.Thread]:
        """Raises ThreadStopped in the busy threads and returns them; makes no further calls."""
        with self._lock:
            self._is_stopped = True
            for future, _ in self._waiting:
                future.cancel()
            self._waiting.clear()
            for thread in self._threads:
                _raise_in(thread, ThreadStopped)
            return list(self._threads)

    def _work(self) -> None:
        with contextlib.suppress(ThreadStopped):  # it may be raised between two calls
            while (call := self._next()) is not None:
                future, function = call
                if future.set_running_or_notify_cancel():
                    _set_outcome(future, function, self._escapes)

    def _next(self) -> tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._threads.discard(threading.current_thread())
            return None


_group: contextvars.ContextVar[ThreadGroup | None] = contextvars.ContextVar("agentlightning_thread_group", default=None)


class _GroupExecutor(concurrent.futures.ThreadPoolExecutor):
    """A pool that delegates the calls of a group to the group's own threads, and others to the previous executor."""

    def __init__(self, previous: concurrent.futures.Executor | None) -> None:
        super().__init__()
        self._previous = previous

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        if (group := _group.get()) is not None:
            return group.submit(functools.partial(contextvars.copy_context().run, fn, *args, **kwargs))
        if self._previous is not None:
            return self._previous.submit(fn, *args, **kwargs)
        return super().submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        if self._previous is not None:
            self._previous.shutdown(wait, cancel_futures=cancel_futures)


@contextlib.contextmanager
def thread_group(on_abandoned: Callable[[list[threading.Thread]], None]) -> Iterator[None]:
    """Gives the block and its tasks a thread group; if the block raises, stops the group and reports busy threads."""
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
    """Makes the running loop's default executor use the threads of the caller's group; other calls are not affected."""
    loop = asyncio.get_running_loop()
    previous = getattr(loop, "_default_executor", None)  # has no public name; other loops may not have it
    if not isinstance(previous, _GroupExecutor):
        loop.set_default_executor(_GroupExecutor(previous))


async def run_in_thread(
    function: Callable[[], T], *, name: str, on_abandoned: Callable[[threading.Thread], None] | None = None
) -> T:
    """Runs a function in a new daemon thread, with the caller's context variables.

    It uses no pool, so that a function that never returns blocks neither a slot nor the exit of the process. When the
    caller is cancelled, ThreadStopped is raised in the thread, and ``on_abandoned`` gets the
    thread.
    """
    group = ThreadGroup(name, _is_unusual)
    try:
        return await asyncio.wrap_future(group.submit(functools.partial(contextvars.copy_context().run, function)))
    except asyncio.CancelledError:
        for thread in group.stop():
            if on_abandoned is not None:
                on_abandoned(thread)
        raise


_interruption: contextvars.ContextVar[list[Callable[[], object]] | None] = contextvars.ContextVar(
    "agentlightning_interruption", default=None
)  # the last one stops the function that ``run_beside_loop`` runs in a thread


def stop_on_interrupt(stop: Callable[[], object]) -> None:
    """Sets the function that a Ctrl-C calls in the running event loop, if ``run_beside_loop`` runs it in a thread.

    Otherwise it does nothing, because the loop gets the signal itself. A second Ctrl-C is raised in the thread.
    """
    interruption = _interruption.get()
    if interruption is not None:
        interruption.append(functools.partial(asyncio.get_running_loop().call_soon_threadsafe, stop))


def run_beside_loop(function: Callable[[], T]) -> T:
    """Calls a function that runs its own event loop, in a thread if a loop already runs here, as in notebooks.

    A Ctrl-C is forwarded to the thread as ``stop_on_interrupt`` configured.
    """
    if running_loop() is None:
        return function()
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    interruption: list[Callable[[], object]] = []
    context = contextvars.copy_context()
    context.run(_interruption.set, interruption)
    work = functools.partial(_set_outcome, future, functools.partial(context.run, function), lambda _: False)
    thread = threading.Thread(target=work, name="beside-the-loop", daemon=True)
    thread.start()
    try:
        return future.result()
    except KeyboardInterrupt:
        try:
            if not interruption:
                _raise_in(thread, SecondInterrupt)
            else:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    interruption[-1]()
            thread.join()
        except KeyboardInterrupt:
            _raise_in(thread, SecondInterrupt)
            thread.join()
        raise


def _set_outcome(
    future: concurrent.futures.Future[T], function: Callable[[], T], escapes: Callable[[BaseException], bool]
) -> None:
    try:
        result = function()
    except BaseException as error:  # isolation point: any error of the function belongs to its caller
        if escapes(error):
            escaped = EscapedError(error)
            escaped.__cause__ = error
            future.set_exception(escaped)
        else:
            future.set_exception(error)
    else:
        future.set_result(result)


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raises an error in a thread, as soon as the thread neither takes nor releases a lock or an event loop.

    Python raises it at the thread's next bytecode. Between the bytecode that takes a lock and the one that enters its
    ``with`` statement, it would leave the lock taken for ever, and block every thread that shares, say, an HTTP client.
    """
    if not _try_to_raise_in(thread, error):
        threading.Thread(target=_raise_soon_in, args=(thread, error), name="agl-stop-thread", daemon=True).start()


def _raise_soon_in(thread: threading.Thread, error: type[BaseException]) -> None:
    pause_s = 0.001
    while thread.is_alive() and not _try_to_raise_in(thread, error):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)


def _try_to_raise_in(thread: threading.Thread, error: type[BaseException]) -> bool:
    if _holds_unguarded(thread):  # other threads run while this reads a file
        return False
    time.sleep(0)  # this thread is then not interrupted for some milliseconds (sys.getswitchinterval)
    if thread.ident is None or _holds_unguarded(thread):
        return False
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))
    return True


_RUNNER: Final[Any] = asyncio.Runner
_ASYNCIO: Final = asyncio.__file__.removesuffix("__init__.py")
_WEAK: Final = (weakref.__file__, weakref.__file__.replace("weakref.py", "_weakrefset.py"))
"""The modules whose callbacks run when an object ends, where Python drops an error."""
_UNGUARDED: Final = {
    _RUNNER._lazy_init.__code__,
    _RUNNER.close.__code__,
    inspect.unwrap(threading.Thread.start).__code__,
}
"""Functions that an error must not leave: those that make and close the loop of ``asyncio.run``, and ``Thread.start``.

Until a new thread runs, Python knows it by the number of the thread that starts it, and would raise the error in the
new one (https://github.com/python/cpython/blob/3.11/Python/pystate.c, ``init_threadstate``). The new thread would end
without a report of its start, and the starting one would wait for it for ever, with the lock of all thread pools.
"""


def _holds_unguarded(thread: threading.Thread) -> bool:
    """Whether a thread takes or releases a lock or an event loop, starts a thread, or is in asyncio or a weak callback.

    Waiting for a condition is safe, because it takes its lock again. An event loop that waits is in ``select``; one
    that is stopped while it schedules a callback loses the callback, and then waits for it for ever.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:  # it begins or ends
        return True
    function, file = frame.f_code.co_name, frame.f_code.co_filename
    if function in ("__enter__", "__exit__", "acquire", "release") or file.startswith(_ASYNCIO) or file in _WEAK:
        return True
    if function != "wait" and "acquire(" in linecache.getline(file, frame.f_lineno or 0):
        return True
    return any(caller.f_code in _UNGUARDED for caller, _ in traceback.walk_stack(frame))


STOP_CHECK_S: Final = 0.1  # polling interval for stop events, which may belong to another thread


class StopEvent(Protocol):
    """A ``threading.Event``, an ``asyncio.Event``, an event of ``multiprocessing`` or anything similar."""

    def is_set(self) -> bool: ...


async def until_set(work: Awaitable[T], event: StopEvent | None) -> T | None:
    """Awaits ``work``, or cancels it and returns None soon after ``event`` is set."""
    if event is None:
        return await work
    limit, loop = asyncio.timeout(None), asyncio.get_running_loop()

    async def watch() -> None:
        while not event.is_set():  # noqa: ASYNC110 # the event may belong to another thread or process
            await asyncio.sleep(STOP_CHECK_S)
        limit.reschedule(loop.time())  # cancels the work once

    watcher = asyncio.create_task(watch())
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():  # raised by the work itself
            raise
        return None
    finally:
        watcher.cancel()
