"""Run a service process: turn signals into one event and errors into exit codes, and say whether the process is ready."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pipelinerl.errors import EXIT_FAILURE, EXIT_OK, EXIT_USER_ERROR, FieldError, PipelineRLError, ServiceError, UserError
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.logs import LogContext, configure_logging
from pipelinerl.service.settings import PolicySettings, ServiceSettings, read_settings
from pipelinerl.telemetry.tracing import tracing

log = logging.getLogger(__name__)

MISTAKE = "error: "
"""Beginning of the output that reports a user's mistake."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
TURN_S = 0.02
"""Seconds between two attempts to take the turn on a shared GPU."""
MARK_EVERY_S = 0.25
"""Seconds between two time stamps by which `watch_loop` notices that the event loop is blocked."""


@dataclass
class Readiness:
    """Readiness of a process for its work. Any thread may read and write it, because each attribute is replaced as a whole."""

    reason: str = "starting"
    """Why the process itself is not ready; empty if it is."""
    parts: tuple[Readiness, ...] = ()

    def part(self, reason: str) -> Readiness:
        """Add a part that the process needs, and return its readiness. It is not ready at first, for the given `reason`."""
        self.parts = (*self.parts, part := Readiness(reason))
        return part

    @property
    def why_not(self) -> str:
        """Why the process and its parts are not ready; empty if all are."""
        return "; ".join(filter(None, (self.reason, *(part.why_not for part in self.parts))))


@asynccontextmanager
async def watch_loop() -> AsyncIterator[Callable[[], float]]:
    """Yield a function that returns the seconds since this event loop last ran: about `MARK_EVERY_S` or less, unless the loop
    is blocked. Any thread may call the function."""
    loop, ran_at_s = asyncio.get_running_loop(), time.monotonic()
    handle: asyncio.TimerHandle

    def mark() -> None:
        nonlocal handle, ran_at_s
        ran_at_s = time.monotonic()
        handle = loop.call_later(MARK_EVERY_S, mark)

    mark()
    try:
        yield lambda: time.monotonic() - ran_at_s
    finally:
        handle.cancel()


_Result = TypeVar("_Result")


class StartStopped(PipelineRLError):
    """The process was stopped before the awaited work was done."""


async def unless_stopped(work: Coroutine[Any, Any, _Result], stop: asyncio.Event) -> _Result:
    """Return the result of `work`, or raise its error. If `stop` is set first, cancel `work` and raise `StartStopped`."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.wait((working, stopping))
    raise StartStopped("the process was stopped before its work was done")


class GpuTurn:
    """The right to use a GPU that a trainer and an actor use in turns (`actor.colocate`). A file lock represents it. The kernel
    releases the lock when the process and its forked children have ended. `is_held`: whether this process has the turn."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.is_held = False

    @classmethod
    def of(cls, recipe: Recipe, settings: PolicySettings) -> GpuTurn | None:
        """Return the `GpuTurn` that a service takes before it uses the GPU; None without `actor.colocate`. Raises `FieldError`
        with `actor.colocate` outside a local run."""
        if not recipe.actor.colocate:
            return None
        if settings.gpu_turn is None:
            raise FieldError("actor.colocate", True, "works only in a local run (pipelinerl run), on one GPU; use false here")
        return cls(settings.gpu_turn)

    async def take(self) -> None:
        """Wait until the other process that uses the GPU has released the lock or has ended, and take the lock."""
        while not self.is_held:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.is_held = True
            except BlockingIOError:
                await asyncio.sleep(TURN_S)

    def release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self.is_held = False


def on_thread(name: str, work: Callable[[], _Result]) -> Future[_Result]:
    """Run `work` on a new daemon thread, and return its future. The thread does not delay the end of the process."""
    done = Future[_Result]()
    done.set_running_or_notify_cancel()  # so that cancelling a waiting task does not cancel the work

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            if not isinstance(error, PipelineRLError):
                log.exception("%s failed", name)
            done.set_exception(error.with_traceback(None))  # a traceback would keep the work's objects alive
        else:
            done.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


Settings = TypeVar("Settings", bound=ServiceSettings)
ServiceMain = Callable[[Settings, asyncio.Event, LogContext], Awaitable[None]]
"""Main function of a service. It ends when its work is done or the event is set. It updates `LogContext.policy_version`."""


def run_service(kind: type[Settings], service: str, main: ServiceMain[Settings], *, stop_within_s: float | None = None) -> int:
    """Read the settings, run `main` to its end and return the exit code: 0 success, 2 a user's mistake, 1 any other failure.

    SIGTERM or SIGINT sets the event that `main` receives; a second signal cancels `main`. A process that still runs
    `stop_within_s` after the first signal ends with code 1 (None = no limit).
    """

    def end_at_once() -> None:
        log.critical("still running %g s after the signal; exiting at once", stop_within_s)
        logging.shutdown()
        os._exit(EXIT_FAILURE)

    overdue = threading.Timer(stop_within_s or 0.0, end_at_once)
    overdue.daemon = True

    async def until_stopped(settings: Settings, context: LogContext) -> None:
        with stop_event(overdue.start if stop_within_s is not None else lambda: None) as stop:
            await main(settings, stop, context)

    def run() -> None:
        settings = read_settings(kind)
        context = LogContext(settings.run, service, settings.instance)
        configure_logging(context, log_format=settings.log_format, level=settings.log_level)
        with tracing(context):
            asyncio.run(until_stopped(settings, context))

    try:
        return exit_code(run)
    finally:
        overdue.cancel()


def leave(code: int) -> NoReturn:
    """End the process with `code` at once. A normal shutdown of the interpreter could hang or abort while a thread runs
    native code, such as an abandoned transfer."""
    try:
        # Without a normal shutdown, libraries do not end their child processes.
        for child in multiprocessing.active_children():
            child.kill()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def exit_code(run: Callable[[], None]) -> int:
    """Call `run` and return the exit code. Print a user's mistake, and log any other error."""
    try:
        run()
    except asyncio.CancelledError:
        log.error("cancelled by a second signal before everything had ended")
        return EXIT_FAILURE
    except Exception as raised:  # the process boundary
        error = sole_error(raised)
        if isinstance(error, UserError):
            print(f"{MISTAKE}{error}", file=sys.stderr)
            return EXIT_USER_ERROR
        log.critical("stopped: %s", error, exc_info=None if isinstance(error, ServiceError) else raised)
        return EXIT_FAILURE
    return EXIT_OK


def sole_error(error: BaseException) -> BaseException:
    """Return the error inside exception groups if all errors there have the same type and text, else the group."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    inner = [sole_error(one) for one in error.exceptions]
    return inner[0] if len({(type(one), str(one)) for one in inner}) == 1 else error


@contextmanager
def stop_event(on_stop: Callable[[], None] = lambda: None) -> Iterator[asyncio.Event]:
    """Yield an event that SIGTERM and SIGINT set, after calling `on_stop`. A second signal cancels the calling task."""
    task, stop = asyncio.current_task(), asyncio.Event()
    assert task is not None

    def on_signal(number: int) -> None:
        if stop.is_set():
            task.cancel()
            return
        log.info("stopping on %s", signal.Signals(number).name)
        on_stop()
        stop.set()

    with signals_to(on_signal, STOP_SIGNALS):
        yield stop


@contextmanager
def signals_to(on_signal: Callable[[int], None], numbers: Iterable[int]) -> Iterator[None]:
    """Call `on_signal` on the event loop for each signal in `numbers` that arrives during the block."""
    loop, heeded = asyncio.get_running_loop(), list(numbers)
    for number in heeded:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in heeded:
            loop.remove_signal_handler(number)


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` during the block. At the end of the block, cancel it or, if it has failed, raise its error."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()
