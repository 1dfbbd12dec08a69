"""Blocking calls in threads: so many at once, those that hang not counted, and nothing lost when a caller leaves."""

import threading
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from dmfs.tiers import threads
from dmfs.tiers.threads import STUCK_AFTER, CallThreads
from dmfs.types import Clock
from tests.operations.harness import LIMIT, until


class Calls:
    """Calls that block until they are let go, and a clock that stands still until it is moved."""

    def __init__(self, limit: int) -> None:
        self.now = 100.0
        self.looks = 0
        self.threads = CallThreads(limit, Clock(monotonic=self._look))
        self.started: list[int] = []
        self.ended: list[int] = []
        self._go: dict[int, threading.Event] = {}

    def _look(self) -> float:
        self.looks += 1
        return self.now

    async def watched(self) -> None:
        """Wait until `watch` has looked several times."""
        enough = self.looks + 5
        await until(lambda: self.looks >= enough, "it is watched")

    def block(self, number: int) -> int:
        self.started.append(number)
        assert self._go.setdefault(number, threading.Event()).wait(LIMIT)
        return number

    async def call(self, number: int) -> None:
        assert await self.threads.run(b"%d" % number, self.block, number) == number
        self.ended.append(number)

    def let_go(self, *numbers: int) -> None:
        for number in numbers:
            self._go.setdefault(number, threading.Event()).set()

    def let_all_go(self) -> None:
        self.let_go(*range(1000))


@pytest.fixture
def calls() -> Iterator[Calls]:
    """Two at once."""
    calls = Calls(2)
    yield calls
    calls.let_all_go()


async def test_so_many_at_once_and_in_order(calls: Calls) -> None:
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(calls.call, number)
                await trio.testing.wait_all_tasks_blocked()  # in this order
            await until(lambda: sorted(calls.started) == [0, 1], "two have started")
            calls.now += 7.0
            assert [age for _, age in calls.threads.waiting()] == [7.0] * 6
            calls.let_go(1)
            await until(lambda: len(calls.started) == 3, "the next one has started")
            assert calls.started[2] == 2
            calls.let_all_go()
    assert sorted(calls.ended) == list(range(6))
    assert calls.threads.waiting() == []


async def test_result_and_error(calls: Calls) -> None:
    def fail(text: str) -> None:
        raise OSError(5, text)

    with trio.fail_after(LIMIT):
        assert await calls.threads.run(b"", sorted, "cab") == ["a", "b", "c"]
        for _ in range(5):
            with pytest.raises(OSError, match="no"):
                await calls.threads.run(b"", fail, "no")
        assert await calls.threads.run(b"", sorted, "cab") == ["a", "b", "c"]


async def test_cancelled_caller_leaves_at_once(calls: Calls) -> None:
    with trio.fail_after(LIMIT):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(calls.call, number)
                await until(lambda: len(calls.started) == 2, "two have started")
                scope.cancel()
        assert [path for path, _ in calls.threads.waiting()] != [], "what has begun goes on, and is shown"
        assert len(calls.threads.waiting()) == 2, "what has not begun never will"
        calls.let_all_go()
        await until(lambda: not calls.threads.waiting(), "all have ended")
        assert len(calls.started) == 2
        await calls.call(7)
    assert calls.ended == [7]


async def test_call_of_a_cancelled_caller_is_not_begun(calls: Calls) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await calls.call(1)
    assert calls.started == []


async def test_hanging_calls_leave_the_limit(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 5: healthy files go on, but not without bound."""
    monkeypatch.setattr(threads, "WATCH_INTERVAL", 0.001)
    monkeypatch.setattr(threads, "MAX_STUCK", 3)
    stuck: list[str] = []
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(calls.threads.watch)
            calls.threads.start(b"s", lambda: calls.block(100), lambda result: None, lambda: stuck.append("stuck"))
            for number in range(7):
                nursery.start_soon(calls.call, number)
            await until(lambda: len(calls.started) == 2, "two have started")
            calls.now += STUCK_AFTER + 0.1
            await until(lambda: len(calls.started) == 4, "two more have started")
            assert stuck == ["stuck"]
            calls.now += STUCK_AFTER + 0.1
            await until(lambda: len(calls.started) == 5, "one more has started")
            calls.now += STUCK_AFTER + 0.1
            await calls.watched()
            assert len(calls.started) == 5, "three hang, two have a place"
            calls.let_all_go()
            await until(lambda: len(calls.ended) == 7, "all have ended")
            assert calls.threads._free == 2
            assert calls.threads._stuck == 0
            nursery.cancel_scope.cancel()
    assert calls.threads.waiting() == []


async def test_age_is_of_the_call_and_not_of_its_waiting(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waited long for its place does not leave the limit as soon as it has one."""
    monkeypatch.setattr(threads, "WATCH_INTERVAL", 0.001)
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(calls.call, number)
            await until(lambda: len(calls.started) == 2, "two have started")
            calls.now += STUCK_AFTER + 1
            calls.let_go(*calls.started)
            await until(lambda: len(calls.started) == 4, "the others have started")
            nursery.start_soon(calls.threads.watch)
            await calls.watched()
            assert calls.threads._stuck == 0
            calls.let_all_go()
            await until(lambda: len(calls.ended) == 4, "all have ended")
            nursery.cancel_scope.cancel()
