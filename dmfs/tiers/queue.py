"""Which piece of which fill is fetched next, and by how many at once.

Order: pieces that a reader waits for; then whole fills of files that are open; then those nobody has open any more.
Waited-for pieces may take every place, whole fills only a quarter of them: a reader never queues behind read-ahead
alone, and the pieces in flight do not all wait for the source, then all for the disk.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

from dmfs.tiers.fill import Fill


class FillQueue:
    """Lets at most `pieces` pieces be fetched at once, of which whole fills take a quarter.

    `is_open` tells whether a file has readers, which decides the order of whole fills.
    """

    def __init__(self, is_open: Callable[[Fill], bool], *, pieces: int, fills: int) -> None:
        self._is_open = is_open
        self._pieces = pieces
        self._background_pieces = max(1, pieces // 4)
        self._fills = fills
        self._asked: deque[tuple[Fill, int]] = deque()
        self._active: deque[Fill] = deque()  # whole fills that take turns, at most `fills`
        self._queued: deque[Fill] = deque()  # whole fills that wait for a place
        self._closed: deque[Fill] = deque()  # the same, of files that were closed after they had been started
        self._hanging: dict[Fill, int] = {}  # fills that the source hangs in, and in how many pieces
        self._running = 0
        self._running_background = 0

    def ask(self, fill: Fill, piece: int) -> None:
        """A reader waits for this piece."""
        if fill.needs(piece):
            self._asked.append((fill, piece))
            self._start()

    def add(self, fill: Fill) -> None:
        """Fetch the whole file. Nothing happens if that is so already, or while the source hangs in the file."""
        if not fill.is_wanted_whole and fill not in self._hanging:
            fill.is_wanted_whole = True
            self._queued.append(fill)
            self._start()

    def remove(self, fill: Fill) -> None:
        """Stop fetching what nobody asked for."""
        fill.is_wanted_whole = False
        for fills in (self._active, self._queued, self._closed):
            if fill in fills:
                fills.remove(fill)

    def _start(self) -> None:
        while self._running < self._pieces:
            job = self._next()
            if job is None:
                return
            fill, piece, is_background = job
            self._running += 1
            self._running_background += is_background
            place = _Place(partial(self._leave, is_background))
            fill.fetch(piece, on_done=partial(self._done, fill, place), on_stuck=partial(self._stuck, fill, place))

    def _done(self, fill: Fill, place: "_Place") -> None:
        if place.is_left:
            self._hanging[fill] -= 1
            if not self._hanging[fill]:
                del self._hanging[fill]
        place.leave()

    def _stuck(self, fill: Fill, place: "_Place") -> None:
        """The source hangs in a piece: others take its place, and no more of this file are fetched unasked."""
        self._hanging[fill] = self._hanging.get(fill, 0) + 1
        self.remove(fill)
        place.leave()

    def _leave(self, is_background: bool) -> None:
        self._running -= 1
        self._running_background -= is_background
        self._start()

    def _next(self) -> tuple[Fill, int, bool] | None:
        while self._asked:
            fill, piece = self._asked.popleft()
            if fill.needs(piece):
                return fill, piece, False
        if self._running_background >= self._background_pieces:
            return None
        self._fill_places()
        for is_open in (True, False):
            for _ in range(len(self._active)):
                fill = self._active[0]
                self._active.rotate(-1)
                if self._is_open(fill) is not is_open:
                    continue
                next_piece = fill.next_piece()
                if next_piece is not None:
                    return fill, next_piece, True
        return None

    def _fill_places(self) -> None:
        """Give free places to the fills that wait longest, and places of closed files to open ones."""
        for fill in [f for f in self._active if f.next_piece() is None or not f.is_wanted_whole]:
            self._active.remove(fill)
        while len(self._active) < self._fills and (self._queued or self._closed):
            self._active.append(self._queued.popleft() if self._queued else self._closed.popleft())
        if self._queued:
            for fill in self._active:
                if not self._is_open(fill):
                    self._active.remove(fill)
                    self._closed.append(fill)
                    self._active.append(self._queued.popleft())
                    break


class _Place:
    """One of the places for pieces, given back once: when the piece is done, or when the source hangs in it."""

    __slots__ = ("_on_leave", "is_left")

    def __init__(self, on_leave: Callable[[], None]) -> None:
        self._on_leave = on_leave
        self.is_left = False

    def leave(self) -> None:
        if not self.is_left:
            self.is_left = True
            self._on_leave()
