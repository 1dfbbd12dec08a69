"""Which piece is fetched next: asked-for pieces first, then open files, then the others; and how many at once."""

from collections.abc import Callable

import pytest

from dmfs.tiers.queue import FillQueue


class FakeFill:
    """A fill whose pieces are fetched when the test says so."""

    def __init__(self, name: str, pieces: int, log: list[str], *, is_open: bool = True) -> None:
        self.name = name
        self.is_open = is_open
        self.is_wanted_whole = False
        self.absent = set(range(pieces))
        self.in_flight: dict[int, tuple[Callable[[], None], Callable[[], None]]] = {}
        self._log = log

    def needs(self, piece: int) -> bool:
        return piece in self.absent

    def next_piece(self) -> int | None:
        return min(self.absent, default=None)

    def fetch(self, piece: int, *, on_done: Callable[[], None], on_stuck: Callable[[], None]) -> None:
        self.absent.remove(piece)
        self.in_flight[piece] = on_done, on_stuck
        self._log.append(f"{self.name}{piece}")

    def done(self, piece: int) -> None:
        self.in_flight.pop(piece)[0]()

    def hangs(self, piece: int) -> None:
        self.in_flight[piece][1]()


@pytest.fixture
def log() -> list[str]:
    """What was fetched, in order: `a0` is piece 0 of fill a."""
    return []


def make_queue(*, pieces: int = 4, fills: int = 8) -> FillQueue:
    """A queue of fake fills; whole fills take a quarter of the places, here one of four."""
    return FillQueue(lambda fill: fill.is_open, pieces=pieces, fills=fills)  # type: ignore[attr-defined]


def run_down(queue: FillQueue, *fills: FakeFill) -> None:
    """Let everything that is in flight end, until nothing is."""
    while running := [(fill, piece) for fill in fills for piece in fill.in_flight]:
        running[0][0].done(running[0][1])


def test_whole_fill_in_order(log: list[str]) -> None:
    queue, fill = make_queue(), FakeFill("a", 4, log)
    queue.add(fill)  # type: ignore[arg-type]
    queue.add(fill)  # type: ignore[arg-type]
    run_down(queue, fill)
    assert log == ["a0", "a1", "a2", "a3"]


def test_asked_pieces_go_first(log: list[str]) -> None:
    queue, fill, other = make_queue(pieces=1), FakeFill("a", 9, log), FakeFill("b", 9, log)
    queue.add(fill)  # type: ignore[arg-type]
    queue.ask(other, 7)  # type: ignore[arg-type]
    queue.ask(fill, 5)  # type: ignore[arg-type]
    queue.ask(fill, 5)  # type: ignore[arg-type]
    queue.ask(fill, 0)  # type: ignore[arg-type]
    for _ in range(4):
        run_one(fill, other)
    assert log == ["a0", "b7", "a5", "a1", "a2"]


def run_one(*fills: FakeFill) -> None:
    """Let one piece end."""
    fill = next(fill for fill in fills if fill.in_flight)
    fill.done(next(iter(fill.in_flight)))


def test_limits(log: list[str]) -> None:
    """All places for what readers wait for, a quarter of them for whole fills."""
    queue = make_queue(pieces=8)
    whole, asked = FakeFill("w", 99, log), FakeFill("a", 99, log)
    queue.add(whole)  # type: ignore[arg-type]
    assert len(whole.in_flight) == 2
    for piece in range(20):
        queue.ask(asked, piece)  # type: ignore[arg-type]
    assert (len(whole.in_flight), len(asked.in_flight)) == (2, 6)
    for step in range(50):
        run_one(*((whole, asked) if step % 2 else (asked, whole)))
        assert len(whole.in_flight) <= 2
        assert len(whole.in_flight) + len(asked.in_flight) <= 8
    assert not asked.in_flight


def test_reader_never_waits_behind_read_ahead_alone(log: list[str]) -> None:
    queue = make_queue(pieces=4)
    fills = [FakeFill(name, 99, log) for name in "abcdefgh"]
    for fill in fills:
        queue.add(fill)  # type: ignore[arg-type]
    queue.ask(fills[7], 42)  # type: ignore[arg-type]
    assert log == ["a0", "h42"]


def test_fills_take_turns(log: list[str]) -> None:
    queue = make_queue(pieces=1)
    fills = [FakeFill(name, 3, log) for name in "abc"]
    for fill in fills:
        queue.add(fill)  # type: ignore[arg-type]
    for _ in range(4):
        run_one(*fills)
    assert {entry[0] for entry in log} == set("abc")
    run_down(queue, *fills)
    assert sorted(log) == sorted(f"{name}{piece}" for name in "abc" for piece in range(3))


def test_open_files_go_before_closed_ones(log: list[str]) -> None:
    queue = make_queue(pieces=1)
    closed, opened = FakeFill("c", 4, log, is_open=False), FakeFill("o", 4, log)
    queue.add(closed)  # type: ignore[arg-type]
    queue.add(opened)  # type: ignore[arg-type]
    run_down(queue, closed, opened)
    assert log == ["c0", "o0", "o1", "o2", "o3", "c1", "c2", "c3"]


def test_closed_fill_gives_its_place_to_an_open_one(log: list[str]) -> None:
    queue = make_queue(pieces=1, fills=1)
    first, second = FakeFill("a", 3, log), FakeFill("b", 3, log)
    queue.add(first)  # type: ignore[arg-type]
    queue.add(second)  # type: ignore[arg-type]
    first.done(0)
    assert log == ["a0", "a1"], "one fill at a time"
    first.is_open = False
    run_down(queue, first, second)
    assert log == ["a0", "a1", "b0", "b1", "b2", "a2"]


def test_at_most_so_many_fills(log: list[str]) -> None:
    queue = make_queue(pieces=16, fills=2)
    fills = [FakeFill(name, 2, log) for name in "abcd"]
    for fill in fills:
        queue.add(fill)  # type: ignore[arg-type]
    assert [bool(fill.in_flight) for fill in fills] == [True, True, False, False]
    run_down(queue, *fills)
    assert len(log) == 8


def test_removed_fill_is_not_fetched_any_more(log: list[str]) -> None:
    queue = make_queue(pieces=1)
    fills = [FakeFill(name, 3, log) for name in "ab"]
    for fill in fills:
        queue.add(fill)  # type: ignore[arg-type]
    queue.remove(fills[1])  # type: ignore[arg-type]
    queue.remove(fills[1])  # type: ignore[arg-type]
    run_down(queue, *fills)
    assert log == ["a0", "a1", "a2"]
    queue.add(fills[1])  # type: ignore[arg-type]
    run_down(queue, *fills)
    assert log[3:] == ["b0", "b1", "b2"]


def test_piece_that_came_meanwhile_is_not_fetched_twice(log: list[str]) -> None:
    queue, fill = make_queue(pieces=1), FakeFill("a", 2, log)
    queue.ask(fill, 0)  # type: ignore[arg-type]
    queue.ask(fill, 1)  # type: ignore[arg-type]
    fill.absent.clear()
    fill.done(0)
    assert log == ["a0"]


def test_hanging_piece_gives_its_place_back_once(log: list[str]) -> None:
    queue = make_queue(pieces=1)
    stuck, fill = FakeFill("s", 1, log), FakeFill("a", 5, log)
    queue.ask(stuck, 0)  # type: ignore[arg-type]
    queue.ask(fill, 0)  # type: ignore[arg-type]
    assert log == ["s0"]
    stuck.hangs(0)
    assert log == ["s0", "a0"]
    stuck.done(0)
    queue.ask(fill, 1)  # type: ignore[arg-type]
    assert log == ["s0", "a0"], "its late end frees no second place"
    fill.done(0)
    assert log == ["s0", "a0", "a1"]


def test_nothing_is_fetched_unasked_where_the_source_hangs(log: list[str]) -> None:
    queue, fill = make_queue(), FakeFill("a", 9, log)
    queue.add(fill)  # type: ignore[arg-type]
    fill.hangs(0)
    queue.add(fill)  # type: ignore[arg-type]
    assert log == ["a0"], "more of the file was fetched into the same hole"
    queue.ask(fill, 5)  # type: ignore[arg-type]
    assert log == ["a0", "a5"], "a reader's piece is asked for all the same"
    fill.done(5)
    fill.done(0)
    queue.add(fill)  # type: ignore[arg-type]
    assert log == ["a0", "a5", "a1"], "the source is back"
