"""Blocking calls in threads, bounded, and visible while they last.

A call to the source can take as long as the source likes. So each pool has its own limit (metadata never queues
behind data), a cancelled caller does not wait for its thread, and `waiting()` names every call that is under way, for
`dmfs status`. Made of the same parts as trio.to_thread, without a turn of the event loop before the thread starts.
"""

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import outcome
import trio

from dmfs.types import Clock

T = TypeVar("T")


STUCK_AFTER = 5.0  # seconds after which a call does not count against the limit any more, so that others go on
MAX_STUCK = 256  # such calls at most; past that the source is simply down
WATCH_INTERVAL = 0.5  # seconds between two looks for stuck calls


class _Call:
    __slots__ = ("function", "is_stuck", "on_done", "on_stuck", "path", "started")

    def __init__(
        self,
        path: bytes,
        started: float,
        function: Callable[[], Any],
        on_done: Callable[[outcome.Outcome[Any]], None],
        on_stuck: Callable[[], None],
    ) -> None:
        self.path = path
        self.started = started
        self.function = function
        self.on_done = on_done
        self.on_stuck = on_stuck
        self.is_stuck = False


class CallThreads:
    """A bounded set of threads for blocking calls, to be made inside a trio event loop.

    Attributes:
        limit: how many calls may be under way at once, those that hang not counted; the others wait in order.
    """

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self._clock = clock
        self._free = limit
        self._stuck = 0
        self._token: trio.lowlevel.TrioToken | None = None
        self._running: dict[int, _Call] = {}
        self._queued: deque[_Call] = deque()

    async def run(self, path: bytes, function: Callable[..., T], *args: object) -> T:
        """Run `function(*args)` in a thread and return what it returns.

        A cancelled caller leaves at once; the call itself goes on and its result is dropped, so `function` must not
        hand out anything that has to be closed by hand.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        task = trio.lowlevel.current_task()
        call = self._add(path, partial(function, *args), partial(trio.lowlevel.reschedule, task), _ignore)

        def abandon(_: object) -> trio.lowlevel.Abort:
            call.on_done = _ignore
            if call in self._queued:
                self._queued.remove(call)
            return trio.lowlevel.Abort.SUCCEEDED

        result: T = await trio.lowlevel.wait_task_rescheduled(abandon)
        return result

    def start(
        self,
        path: bytes,
        function: Callable[[], T],
        on_done: Callable[[outcome.Outcome[T]], None],
        on_stuck: Callable[[], None],
    ) -> None:
        """Run `function()` in a thread, and `on_done` with its outcome in the event loop, where it must not raise.

        `on_stuck` is called in the event loop, before that, if the call leaves the limit because it takes so long.
        """
        self._add(path, function, on_done, on_stuck)

    async def watch(self) -> None:
        """Let calls that hang leave the limit, so that a source of which some files hang does not take all threads."""
        while True:
            await trio.sleep(WATCH_INTERVAL)
            self._let_leave(self._clock.monotonic() - STUCK_AFTER)

    def _let_leave(self, latest: float) -> None:
        # No part of `watch`, whose frame would hold the last call and its descriptors while it sleeps.
        for call in list(self._running.values()):
            if call.started < latest and not call.is_stuck and self._stuck < MAX_STUCK:
                call.is_stuck = True
                self._stuck += 1
                self._leave()
                call.on_stuck()

    def soon(self, function: Callable[..., object], *args: object) -> None:
        """Called in a thread of this pool: run `function(*args)` in the event loop, without waiting for it."""
        assert self._token is not None
        self._token.run_sync_soon(function, *args)

    def waiting(self) -> list[tuple[bytes, float]]:
        """(path, age in seconds) of every call under way or queued, oldest first."""
        now = self._clock.monotonic()
        calls = [*self._running.values(), *self._queued]
        return sorted(((call.path, now - call.started) for call in calls), key=lambda c: -c[1])

    def _add(
        self,
        path: bytes,
        function: Callable[[], T],
        on_done: Callable[[outcome.Outcome[T]], None],
        on_stuck: Callable[[], None],
    ) -> _Call:
        call = _Call(path, self._clock.monotonic(), function, on_done, on_stuck)
        if self._free:
            self._launch(call)
        else:
            self._queued.append(call)
        return call

    def _launch(self, call: _Call) -> None:
        if self._token is None:
            self._token = trio.lowlevel.current_trio_token()
        self._free -= 1
        call.started = self._clock.monotonic()
        self._running[id(call)] = call
        try:
            trio.lowlevel.start_thread_soon(call.function, partial(self._deliver, call), "dmfs")
        except RuntimeError:  # the system gives us no more threads
            self._deliver(call, outcome.Error(OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))))

    def _deliver(self, call: _Call, result: outcome.Outcome[Any]) -> None:
        """In the thread, after the call."""
        assert self._token is not None
        with contextlib.suppress(trio.RunFinishedError):  # the daemon has ended meanwhile
            self._token.run_sync_soon(self._finish, call, result)

    def _finish(self, call: _Call, result: outcome.Outcome[Any]) -> None:
        del self._running[id(call)]
        if call.is_stuck:
            self._stuck -= 1
        else:
            self._leave()
        call.on_done(result)

    def _leave(self) -> None:
        """A place is free."""
        self._free += 1
        if self._queued:
            self._launch(self._queued.popleft())


def _ignore(result: outcome.Outcome[Any] | None = None) -> None:
    pass
