"""Blocking calls in threads, bounded, and visible while they last.

A call to the source can take as long as the source likes. So each pool has its own limit (metadata never queues
behind data), a cancelled caller does not wait for its thread, and `waiting()` names every call that is under way, for
`dmfs status`.
"""

import itertools
from collections.abc import Callable
from typing import TypeVar

import trio

from dmfs.types import Clock

T = TypeVar("T")


class _Places:
    """A limit of threads for trio.to_thread: like trio.CapacityLimiter, but a free place costs no turn of the event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting = trio.lowlevel.ParkingLot()

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        if self._free:
            self._free -= 1
        else:
            await self._waiting.park()  # woken by `release`, which leaves its place to this one

    def release_on_behalf_of(self, borrower: object) -> None:
        if not self._waiting.unpark():
            self._free += 1


class CallThreads:
    """A bounded set of threads for blocking calls.

    Attributes:
        limit: how many calls may be under way at once; the others wait in order.
    """

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self._places = _Places(limit)
        self._clock = clock
        self._calls: dict[int, tuple[bytes, float]] = {}
        self._ids = itertools.count()

    async def run(self, path: bytes, function: Callable[..., T], *args: object) -> T:
        """Run `function(*args)` in a thread and return what it returns.

        A cancelled caller leaves at once; the call itself goes on and its result is dropped, so `function` must not
        hand out anything that has to be closed by hand.
        """
        call = next(self._ids)
        self._calls[call] = (path, self._clock.monotonic())
        is_started = False

        def run_in_thread() -> T:
            nonlocal is_started
            is_started = True
            try:
                return function(*args)
            finally:
                del self._calls[call]

        try:
            return await trio.to_thread.run_sync(
                run_in_thread,
                thread_name="dmfs",  # the same for all, or each call would rename its thread
                abandon_on_cancel=True,
                limiter=self._places,  # type: ignore[arg-type]  # documented: anything with these two methods
            )
        finally:
            if not is_started:
                self._calls.pop(call, None)

    def waiting(self) -> list[tuple[bytes, float]]:
        """(path, age in seconds) of every call under way or queued, oldest first. Safe from the event loop's thread."""
        now = self._clock.monotonic()
        return sorted(((path, now - started) for path, started in list(self._calls.values())), key=lambda c: -c[1])
