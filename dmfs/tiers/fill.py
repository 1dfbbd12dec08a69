"""One running fill: a file on its way from the source into a tier, piece by piece, readable while it runs.

All readers of a file share its one fill. A piece is shown to readers once the source's version was checked behind it,
so pieces of two versions never mix, and from memory at first: nobody waits for the writing. What is fetched next is
decided by `queue`, what happens with a finished copy by `manager`.

Each piece is one call in a thread, on references of its own; all other state changes in the event loop.
"""

import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING

import trio
import xxhash

from dmfs.errors import DmfsError, StaleFile, TierUnavailable, without_traceback
from dmfs.tiers.descriptors import Descriptor
from dmfs.tiers.pending import Pending
from dmfs.tiers.source import Source
from dmfs.tiers.store import Copy, Reservation, Store, TempFile
from dmfs.types import PIECE_SIZE, DataFile

if TYPE_CHECKING:
    import outcome

ABSENT, IN_FLIGHT, HERE = range(3)

_buffers: list[mmap.mmap] = []
"""Buffers of one piece that nobody uses. As many as there were ever pieces in flight at once, which is bounded.

Maps, since those begin on a page: direct I/O into anything else costs a request more for each that it splits.
"""

_ZEROS = bytes(PIECE_SIZE)
_ZERO_DIGEST: int = xxhash.xxh3_64_intdigest(_ZEROS)


class Outcome(Enum):
    """How a fill stands."""

    RUNNING = auto()
    BROKEN = auto()  # the source gave an error, or the file is gone: pieces are fetched for readers who ask, no more
    OVER = auto()  # published, failed or dropped


@dataclass(frozen=True, slots=True)
class Finished:
    """A complete copy in a temporary file or, if `is_published`, under its name."""

    digest: int
    allocated: int
    is_published: bool


@dataclass(frozen=True, slots=True)
class _Fetched:
    """What a thread did for a piece. `opened` is a descriptor to keep, `finished` the end of a file of one piece."""

    digest: int
    temp: TempFile
    opened: Descriptor | None = None
    finished: Finished | None = None


class Fill:
    """The fill of one file into one store.

    Attributes:
        file, store: what goes where.
        outcome: see Outcome.
        is_wanted_whole: every piece is to be fetched, asked for or not.
        settled: set once no more pieces will come unasked: it is over, or broken.
        error: what broke it or ended it, None after a good end.
        has_open_failed: the last error is from opening the file, so it is the one of an open that waits for this fill.
    """

    def __init__(
        self,
        file: DataFile,
        store: Store,
        reservation: Reservation,
        source: Source,
        *,
        can_publish_at_once: Callable[[DataFile], bool],
        on_progress: "Callable[[Fill, int], None]",
        on_finished: "Callable[[Fill, Finished], None]",
        on_error: "Callable[[Fill, Exception], None]",
    ) -> None:
        """The callbacks come in the event loop and must not raise.

        Args:
            can_publish_at_once: whether a copy of this file may get its name without a second look.
            on_progress: so many bytes more are in the tier.
            on_finished: the copy is complete; `hand_over` takes it.
            on_error: StaleFile or TierUnavailable: the fill is over, unless every piece is here and readers go on with
                them; anything else is the source's own error, or a surprise: the fill is broken.
        """
        self.file = file
        self.store = store
        self.outcome = Outcome.RUNNING
        self.is_wanted_whole = False
        self.settled = trio.Event()
        self.error: Exception | None = None
        self.has_open_failed = False
        self.piece_count = -(-file.version.size // PIECE_SIZE)
        self._source = source
        self._reservation = reservation
        self._can_publish_at_once = can_publish_at_once
        self._on_progress = on_progress
        self._on_finished = on_finished
        self._on_error = on_error
        self._pieces = bytearray(self.piece_count)
        self._digests = [0] * self.piece_count
        self._missing = self.piece_count
        self._in_flight = 0
        self._next = 0
        self._waits: dict[int, Pending] = {}
        self._memory: dict[int, memoryview] = {}  # pieces that are here and still being written
        self._temp: TempFile | None = None
        self._opened: Descriptor | None = None  # of the source, where it was not open before
        self._begin = threading.Lock()  # held by the thread that opens both files, for all pieces
        self._is_clean = False

    def __repr__(self) -> str:
        here = self.piece_count - self._missing
        return f"<Fill {self.file.path!r} {self.outcome.name} {here}/{self.piece_count}, {self._in_flight} in flight>"

    # ---- for readers

    @property
    def has_waiters(self) -> bool:
        """True while a reader waits for a piece."""
        return bool(self._waits)

    @property
    def has_started(self) -> bool:
        """True once something was asked of the source."""
        return self._in_flight > 0 or self._missing < self.piece_count

    def read_nowait(self, view: memoryview, offset: int) -> bool:
        """Fill `view` if its pieces are here and can be read without a wait."""
        if not self._is_here(offset, len(view)):
            return False
        if not self._memory:
            return self._temp is not None and self.store.read_nowait(self._temp.descriptor, view, offset)
        for piece, part, start in (self._part(piece, view, offset) for piece in _pieces_of(offset, len(view))):
            if self._copy_from_memory(piece, part, start):
                continue
            if self._temp is None or not self.store.read_nowait(self._temp.descriptor, part, start):
                return False
        return True

    def _is_here(self, offset: int, length: int) -> bool:
        if self.outcome is Outcome.OVER:
            return False
        return all(self._pieces[piece] == HERE for piece in _pieces_of(offset, length))

    @staticmethod
    def _part(piece: int, view: memoryview, offset: int) -> tuple[int, memoryview, int]:
        """(piece, the part of `view` that lies in it, the offset of that part in the file)."""
        start = max(offset, piece * PIECE_SIZE)
        end = min(offset + len(view), (piece + 1) * PIECE_SIZE)
        return piece, view[start - offset : end - offset], start

    def _copy_from_memory(self, piece: int, part: memoryview, start: int) -> bool:
        memory = self._memory.get(piece)
        if memory is None:
            return False
        start -= piece * PIECE_SIZE
        part[:] = memory[start : start + len(part)]
        return True

    def reader(self, view: memoryview, offset: int) -> Callable[[], None] | None:
        """A blocking function that fills `view`, or None if some of its pieces are not here.

        What is in memory is copied by this call, the rest by the function. That raises TierUnavailable.
        """
        if not self._is_here(offset, len(view)):
            return None
        parts = [self._part(piece, view, offset) for piece in _pieces_of(offset, len(view))]
        rest = [(part, start) for piece, part, start in parts if not self._copy_from_memory(piece, part, start)]
        if self._temp is None:
            return None if rest else _nothing
        return partial(_read_parts, self.store, self._temp.descriptor, rest)

    def wait_for(self, piece: int) -> Pending | None:
        """Wait for a piece: the wait to await, or None if it is here. The caller tells the queue.

        Raises:
            DmfsError: the fill has ended without it, and nobody would end the wait.
        """
        if self._pieces[piece] == HERE:
            return None
        if self.outcome is Outcome.OVER and self.error is not None:
            raise without_traceback(self.error)
        wait = self._waits.get(piece)
        if wait is None:
            wait = self._waits[piece] = Pending()
        return wait

    # ---- for the queue and the manager

    @property
    def is_idle(self) -> bool:
        """True if this may be dropped once nobody has the file open.

        A file of one piece that is on its way is as good as whole: dropped, it would be fetched twice.
        """
        if self.piece_count == 1:
            return not self._in_flight
        return not self.is_wanted_whole or not self.has_started

    def needs(self, piece: int) -> bool:
        """True if the piece is neither here nor on its way, and the fill goes on."""
        return self.outcome is not Outcome.OVER and self._pieces[piece] == ABSENT

    def next_piece(self) -> int | None:
        """The first piece in order that has to be fetched, or None."""
        while self._next < self.piece_count and self._pieces[self._next] != ABSENT:
            self._next += 1
        return self._next if self._next < self.piece_count else None

    def fetch(self, piece: int, *, on_done: Callable[[], None], on_stuck: Callable[[], None]) -> None:
        """Start to fetch a piece.

        Args:
            on_done: called last, in the event loop, whatever came of it.
            on_stuck: called if the source takes so long that others should not wait for it.
        """
        self._pieces[piece] = IN_FLIGHT
        self._in_flight += 1
        buffer = _buffers.pop() if _buffers else mmap.mmap(-1, PIECE_SIZE)
        view = memoryview(buffer)[: self._length(piece)]
        kept = self._source.kept(self.file.key)
        if self.piece_count == 1:
            function = partial(self._copy_file, kept, view, self._can_publish_at_once(self.file))
        else:
            function = partial(self._copy_piece, piece, kept, view)
        self._source.data.start(self.file.path, function, partial(self._fetched, piece, buffer, on_done), on_stuck)

    def end(self, error: DmfsError) -> None:
        """The fill is over without a copy; whoever waits gets `error`."""
        self.outcome = Outcome.OVER
        self.error = without_traceback(error)
        self.settled.set()
        for piece in list(self._waits):
            self._wake(piece, error)
        self._clean_up()

    def hand_over(self, finished: Finished) -> tuple[Copy, Descriptor]:
        """The fill is over, with a copy: what the store is to know of it (at once), and a descriptor to read it by."""
        assert self._temp is not None
        self.outcome = Outcome.OVER
        self.settled.set()
        self._reservation.release()
        temp, self._temp = self._temp, None
        self._is_clean = True
        return Copy(finished.digest, finished.allocated, None if finished.is_published else temp.name), temp.descriptor

    # ---- what comes back from threads

    def _arrived(self, piece: int, view: memoryview) -> None:
        """The piece is in memory and checked, and is being written: show it to readers."""
        if self.outcome is Outcome.OVER:
            return
        self._pieces[piece] = HERE
        self._missing -= 1
        self._memory[piece] = view
        self._wake(piece, None)

    def _fetched(
        self, piece: int, buffer: mmap.mmap, on_done: Callable[[], None], result: "outcome.Outcome[_Fetched]"
    ) -> None:
        """The thread of a piece has ended."""
        self._in_flight -= 1
        self._memory.pop(piece, None)
        _buffers.append(buffer)
        try:
            fetched = result.unwrap()
        except Exception as exc:
            self._failed(piece, exc)
            exc.__traceback__ = None  # its frames hold `result`, hence itself, and the descriptors of the thread
        else:
            self._written(piece, fetched)
        self._clean_up()
        on_done()

    def _written(self, piece: int, fetched: _Fetched) -> None:
        length = self._length(piece)
        self._temp = fetched.temp
        self._digests[piece] = fetched.digest
        self._reservation.wrote(length)
        if fetched.opened is not None and self.outcome is not Outcome.OVER:
            self._source.keep(self.file.key, fetched.opened)
        if self.piece_count == 1 and self.outcome is not Outcome.OVER:
            if fetched.finished is not None:
                self._on_finished(self, fetched.finished)  # whole and checked, whatever went wrong before
            else:
                self._break(StaleFile(f"{os.fsdecode(self.file.path)} was removed at the source"))
        elif not self._missing and not self._in_flight and self.outcome is Outcome.RUNNING:
            self._finish()
        self._on_progress(self, length)

    def _failed(self, piece: int, exc: Exception) -> None:
        if self.outcome is Outcome.OVER:
            return  # dropped meanwhile: nobody is left to be told
        is_shown = self._pieces[piece] == HERE
        if isinstance(exc, StaleFile | TierUnavailable) or is_shown:
            self.end(exc if isinstance(exc, DmfsError) else TierUnavailable(f"cache {self.store.path}: {exc!r}"))
        else:
            self._pieces[piece] = ABSENT
            self._next = min(self._next, piece)
            self._break(exc)
            self._wake(piece, exc)
        self._on_error(self, exc)

    def _finish(self) -> None:
        """All pieces are written: one more look at the source, then the digests and the name."""
        self._in_flight += 1
        self.is_wanted_whole = True  # so that nobody drops it meanwhile
        assert self._temp is not None
        descriptor = self._source.kept(self.file.key) or self._opened
        publish = self._can_publish_at_once(self.file)
        self._source.data.start(
            self.file.path,
            partial(self._finish_in_thread, descriptor, self._temp, publish),
            self._finish_done,
            _nothing,
        )

    def _finish_done(self, result: "outcome.Outcome[Finished]") -> None:
        self._in_flight -= 1
        try:
            finished = result.unwrap()
        except Exception as exc:
            # Every piece was checked and is here: those who have it open read on, but there is nothing to publish.
            if self.outcome is not Outcome.OVER:
                self._break(exc)
                self._on_error(self, exc)
            exc.__traceback__ = None  # as in `_fetched`
        else:
            if self.outcome is Outcome.RUNNING:
                self._on_finished(self, finished)
        self._clean_up()

    def _wake(self, piece: int, error: Exception | None) -> None:
        wait = self._waits.pop(piece, None)
        if wait is not None:
            if error is not None:
                wait.fail(error)
            wait.finish()

    def _break(self, error: Exception) -> None:
        if self.outcome is Outcome.RUNNING:
            self.outcome = Outcome.BROKEN
            self.error = without_traceback(error)
            self.settled.set()
        self.is_wanted_whole = False

    def _clean_up(self) -> None:
        """Once over without a copy and with nothing in flight: the temporary file goes, and the space is given back."""
        if self.outcome is not Outcome.OVER or self._in_flight or self._is_clean:
            return
        self._is_clean = True
        self._reservation.release()
        if self._temp is not None:
            self.store.remove_temp(self._temp.name)
            self._temp = None

    # ---- in threads

    def _length(self, piece: int) -> int:
        """Bytes of a piece: all are PIECE_SIZE but the last."""
        return min(PIECE_SIZE, self.file.version.size - piece * PIECE_SIZE)

    def _open(self) -> Descriptor:
        self.has_open_failed = True
        descriptor = self._source.open_file(self.file)
        self.has_open_failed = False
        return descriptor

    def _copy_file(self, kept: Descriptor | None, view: memoryview, publish: bool) -> _Fetched:
        """A file of one piece in one go: opened, read, checked, shown, written, published and closed."""
        self.store.check_room(len(view))  # before the source is read, or another tier would have to read it again
        descriptor = kept or self._open()
        is_current = self._source.read_into(descriptor, self.file, 0, view)
        self._source.data.soon(self._arrived, 0, view)
        del descriptor
        digest: int = xxhash.xxh3_64_intdigest(view)
        temp = self.store.create(self.file.key, len(view))
        try:
            self._write(temp, view, 0, digest)
            finished = None
            if is_current:
                finished = Finished(digest, self.store.allocated(temp), publish)
                if publish:
                    self.store.publish(self.file.key, digest, temp.name)
        except BaseException:
            self.store.remove_temp(temp.name)
            raise
        return _Fetched(digest, temp, finished=finished)

    def _copy_piece(self, piece: int, kept: Descriptor | None, view: memoryview) -> _Fetched:
        opened = None
        with self._begin:
            if self.outcome is Outcome.OVER:
                raise TierUnavailable("dropped before it began")
            if kept is None:
                kept = self._opened
            if kept is None:
                kept = opened = self._opened = self._open()
            if self._temp is None:
                self._temp = self.store.create(self.file.key, self.file.version.size)
            temp = self._temp
        offset = piece * PIECE_SIZE
        self._source.read_into(kept, self.file, offset, view)
        self._source.data.soon(self._arrived, piece, view)
        digest: int = xxhash.xxh3_64_intdigest(view)
        self._write(temp, view, offset, digest)
        return _Fetched(digest, temp, opened)

    def _write(self, temp: TempFile, view: memoryview, offset: int, digest: int) -> None:
        """Write a piece, or leave it as the hole it is: a piece of zeros takes no space, here as at the source."""
        # The digest asks cheaply, the bytes decide.
        if digest != _ZERO_DIGEST or len(view) < PIECE_SIZE or bytes(view) != _ZEROS:
            self.store.write(temp, view, offset)

    def _finish_in_thread(self, descriptor: Descriptor | None, temp: TempFile, publish: bool) -> Finished:
        descriptor = descriptor or self._open()
        if not self._source.check_version(descriptor, self.file):
            raise StaleFile(f"{os.fsdecode(self.file.path)} was removed at the source")
        allocated = self.store.allocated(temp)
        sums = b"".join(digest.to_bytes(8, "little") for digest in self._digests)
        digest: int = xxhash.xxh3_64_intdigest(sums)
        self.store.write_sums(self.file.key, sums)
        if publish:
            self.store.publish(self.file.key, digest, temp.name)
        return Finished(digest, allocated, publish)


def _read_parts(store: Store, descriptor: Descriptor, parts: list[tuple[memoryview, int]]) -> None:
    for view, offset in parts:
        store.read(descriptor, view, offset)


def _nothing() -> None:
    pass


def _pieces_of(offset: int, length: int) -> range:
    """The pieces that a range of at least one byte touches."""
    return range(offset // PIECE_SIZE, (offset + length - 1) // PIECE_SIZE + 1)
