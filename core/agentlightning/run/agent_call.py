"""Calls an agent for one attempt, so that whatever exits below the agent fails this attempt and nothing else.

asyncio ends the event loop, and with it every rollout of a runner, when SystemExit or KeyboardInterrupt leaves a task
or callback. Threads and finalisers raise where no code can handle it, and signal handlers in
the code of any attempt.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import contextlib
import contextvars
import functools
import gc
import logging
import signal
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Final

from agentlightning.litagent.agent import LitAgent
from agentlightning.records import AttemptedRollout
from agentlightning.resources import NamedResources
from agentlightning.run.thread import EscapedError, SecondInterrupt, ThreadStopped, run_in_thread, thread_group

logger = logging.getLogger("agentlightning")


class AgentCall:
    """The call of an agent that its context belongs to. Its tasks, callbacks and threads inherit the context."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._is_over = self._is_cancelled = False
        self._error: BaseException | None = None
        """The first error that was raised where no code of the agent could handle it."""

    def fail(self, error: BaseException) -> None:
        """Ends the call with an error, from any thread; does nothing if it has ended."""
        if not self._is_over and self._error is None:
            self._error = error
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._task.get_loop().call_soon_threadsafe(self._cancel)

    def end(self) -> BaseException | None:
        """Ends the call; returns the error that failed it, unless others have cancelled it."""
        if self._is_cancelled and not self._is_over:
            self._task.uncancel()
        self._is_over = True
        return None if self._task.cancelling() else self._error

    def _cancel(self) -> None:
        if not self._is_over:
            self._is_cancelled = self._task.cancel()


_current: contextvars.ContextVar[AgentCall | None] = contextvars.ContextVar("agentlightning_agent_call", default=None)


async def call_agent(
    agent: LitAgent[Any],
    task: Any,
    resources: NamedResources,
    rollout: AttemptedRollout,
    abandoned: list[threading.Thread],
) -> Any:
    """Returns the agent's result. Threads that do not stop when the call is cancelled are added to ``abandoned``.

    Raises EscapedError if the agent, or code below it, raises an error that is not an ``Exception``, or a
    CancelledError of its own.
    """
    call = AgentCall()
    token = _current.set(call)
    try:
        result = await _call_method(agent, task, resources, rollout, abandoned)
    except BaseException:  # isolation point: what ended the call may show itself as any other error
        if call.end() is None:
            raise
    finally:
        _current.reset(token)
    error = call.end()
    if error is not None:
        raise EscapedError(error) from error
    return result


async def _call_method(
    agent: LitAgent[Any],
    task: Any,
    resources: NamedResources,
    rollout: AttemptedRollout,
    abandoned: list[threading.Thread],
) -> Any:
    training = rollout.mode == "train"
    own = asyncio.current_task()
    if agent.is_async():
        method = agent.training_rollout_async if training else agent.validation_rollout_async
        with thread_group(on_abandoned=abandoned.extend):  # for synchronous tools and graph nodes
            try:
                return await method(task, resources, rollout)
            except Exception:
                raise
            except BaseException as error:  # isolation point: the error would end the event loop, or not be recorded
                if _must_pass(error, own):
                    raise
                raise EscapedError(error) from error
    function = agent.training_rollout if training else agent.validation_rollout
    try:
        return await run_in_thread(
            lambda: function(task, resources, rollout),
            name=f"agent-{rollout.attempt.attempt_id}",
            on_abandoned=abandoned.append,
        )
    except ThreadStopped as error:
        raise asyncio.CancelledError from error


def _must_pass(error: BaseException, own: asyncio.Task[Any] | None) -> bool:
    """Whether an error is not the agent's: a cancellation, a Ctrl-C, or the end of a task that its loop abandoned."""
    if isinstance(error, KeyboardInterrupt):
        return _is_from_user(error)
    if isinstance(error, asyncio.CancelledError):
        return own is None or own.cancelling() > 0
    try:
        return isinstance(error, GeneratorExit) and asyncio.current_task() is not own
    except RuntimeError:  # no loop runs
        return True


def _is_from_user(error: BaseException) -> bool:
    """Whether a Ctrl-C raised an error: the handler of SIGINT did, if its code can be seen in a traceback."""
    if isinstance(error, SecondInterrupt):
        return True
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    handler: Any = signal.getsignal(signal.SIGINT)
    while isinstance(handler, functools.partial):  # asyncio.Runner's
        handler = handler.func
    code = getattr(handler, "__code__", None)
    return code is None or any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def guard_loop() -> None:
    """Keeps the running event loop running when something below an agent exits, and fails the agent's attempt."""
    loop: Any = asyncio.get_running_loop()

    def close_generator(generator: AsyncGenerator[Any, Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(loop.create_task, _close(generator, _find_finaliser()))

    sys.set_asyncgen_hooks(finalizer=close_generator)  # the loop sets its own whenever it starts to run
    run_once = getattr(loop, "_run_once", None)
    if run_once is None or hasattr(run_once, "__wrapped__"):  # not a loop of asyncio, or guarded
        return

    report = loop.get_exception_handler() or type(loop).default_exception_handler

    @functools.wraps(run_once)
    def run_once_guarded() -> None:
        try:
            run_once()  # the callbacks after the one that raised stay in the queue
        except (KeyboardInterrupt, SystemExit) as error:
            call = None if _is_from_user(error) else _find_call(error)
            if call is None:
                raise
            call.fail(error)

    def report_and_fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, handle = context.get("exception"), context.get("handle")
        if isinstance(error, BaseException) and not isinstance(error, Exception) and handle is not None:
            call = handle._context.get(_current)
            if call is not None:
                call.fail(error)
        report(loop, context)

    loop._run_once = run_once_guarded
    loop.set_exception_handler(report_and_fail)


async def _close(generator: AsyncGenerator[Any, Any], call: AgentCall | None) -> None:
    try:
        await generator.aclose()
    except Exception:
        raise
    except BaseException as error:  # isolation point: an exit in a finaliser ends no loop
        if call is not None:
            call.fail(error)
        logger.warning("an asynchronous generator that was not closed raised %r", error)


def _find_call(error: BaseException) -> AgentCall | None:
    """Returns the call in whose context the callback of the event loop ran that raised an error."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        handle = frame.f_locals.get("self")
        if isinstance(handle, asyncio.Handle):
            found: AgentCall | None = handle._context.get(_current)  # type: ignore[attr-defined] # public from 3.12
            return found
    return None


_lock: Final = threading.Lock()
_users: Final[list[None]] = []  # one for each runner in use
_replaced: Final[list[tuple[Any, str, Any, Any]]] = []
_collecting: Final[set[int]] = set()
"""The threads that the garbage collector runs in."""


def _watch_collector(phase: str, _: object) -> None:
    (_collecting.add if phase == "start" else _collecting.discard)(threading.get_ident())


@contextlib.contextmanager
def guarded_process() -> Iterator[None]:
    """Makes threads carry the context of the agent that starts them, and guards threads, signals and finalisers."""
    with _lock:
        _users.append(None)
        if len(_users) == 1:
            gc.callbacks.append(_watch_collector)
            for owner, name, wrap in _WRAPPERS:
                original = getattr(owner, name)
                _replaced.append((owner, name, original, wrap(original)))
                setattr(owner, name, _replaced[-1][-1])
    try:
        yield
    finally:
        with _lock:
            _users.pop()
            if not _users:
                gc.callbacks.remove(_watch_collector)
                _collecting.clear()
                while _replaced:
                    owner, name, original, wrapper = _replaced.pop()
                    if getattr(owner, name) is wrapper:  # not wrapped by other code since
                        setattr(owner, name, original)


def _find_finaliser() -> AgentCall | None:
    """Returns the call whose code finalises an object; None for the collector, which may run in any call."""
    return None if threading.get_ident() in _collecting else _current.get()


def _wrap_start(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @functools.wraps(start)
    def start_in_context(thread: threading.Thread) -> None:
        is_of_pool = getattr(thread, "_target", None) is concurrent.futures.thread._worker
        call = _current.get()
        if call is not None and not is_of_pool:  # a pool's thread serves all who submit to it
            run = functools.partial(contextvars.copy_context().run, _run, call, thread.run)
            vars(thread)["run"] = run
        start(thread)

    return start_in_context


def _run(call: AgentCall, run: Callable[[], None]) -> None:
    try:
        run()
    except Exception:
        raise
    except BaseException as error:  # isolation point: threading ignores SystemExit
        call.fail(error)
        raise


def _wrap_signal(set_handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_handler)
    def set_handler_guarded(number: int, handler: Any) -> Any:
        call = _current.get()
        is_plain = callable(handler) and handler is not signal.default_int_handler
        if call is not None and is_plain and getattr(handler, "func", None) is not _handle:
            handler = functools.partial(_handle, call, handler)
        return set_handler(number, handler)

    return set_handler_guarded


def _handle(call: AgentCall, handler: Callable[..., Any], number: int, frame: Any) -> None:
    try:
        handler(number, frame)
    except BaseException as error:  # isolation point: it would be raised in the code of any attempt
        if number == signal.SIGINT or _current.get() is call:
            raise
        call.fail(error)


def _wrap_hook(report: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(report)
    def report_and_fail(unraisable: Any) -> None:
        call = _find_finaliser()
        if call is not None and not isinstance(unraisable.exc_value, Exception):
            call.fail(unraisable.exc_value)
        report(unraisable)

    return report_and_fail


_WRAPPERS: Final[tuple[tuple[Any, str, Callable[[Any], Any]], ...]] = (
    (threading.Thread, "start", _wrap_start),
    (signal, "signal", _wrap_signal),
    (sys, "unraisablehook", _wrap_hook),
)
