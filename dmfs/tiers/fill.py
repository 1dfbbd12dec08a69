"""One running fill: a file on its way from the source into a tier, piece by piece, readable while it runs.

All readers of a file share its one fill. A piece is shown to readers only after the source's version was checked
behind it, so pieces of two versions never mix. What is fetched next is decided by `queue`, what happens with a
finished copy by `manager`.

Threads do the blocking work on their own references; all state changes in the event loop.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import trio
import xxhash

from dmfs.errors import DmfsError, StaleFile, TierUnavailable
from dmfs.tiers.descriptors import Descriptor
from dmfs.tiers.source import Source
from dmfs.tiers.store import Copy, Reservation, Store, TempFile
from dmfs.types import PIECE_SIZE, DataFile

ABSENT, IN_FLIGHT, HERE = range(3)

_buffers: list[bytearray] = []
"""Buffers of one piece that no thread uses.

Bounded by the number of pieces in flight, since a thread takes at most one.
"""

_ZEROS = bytes(PIECE_SIZE)
_ZERO_DIGEST: int = xxhash.xxh3_64_intdigest(_ZEROS)


class Outcome(Enum):
    """How a fill stands."""

    RUNNING = auto()
    BROKEN = auto()  # the source gave an error: pieces are fetched only for readers who ask, nothing is published
    OVER = auto()  # published, failed or dropped


class PieceWait:
    """Readers waiting for one piece. After `event`, `error` says why it is not here, if it is not."""

    __slots__ = ("error", "event")

    def __init__(self) -> None:
        self.event = trio.Event()
        self.error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A complete copy in a temporary file or, if `is_published`, under its name."""

    digest: int
    allocated: int
    is_published: bool


class Fill:
    """The fill of one file into one store.

    Attributes:
        file, store: what goes where.
        outcome: see Outcome.
        is_wanted_whole: every piece is to be fetched, asked for or not.
        open_error: the source's own error when the file could not be opened, for the open that waits for this fill.
    """

    def __init__(
        self,
        file: DataFile,
        store: Store,
        reservation: Reservation,
        source: Source,
        *,
        can_publish_at_once: Callable[[DataFile], bool],
    ) -> None:
        self.file = file
        self.store = store
        self.outcome = Outcome.RUNNING
        self.is_wanted_whole = False
        self.open_error: OSError | None = None
        self._source = source
        self._reservation = reservation
        self._can_publish_at_once = can_publish_at_once
        self.piece_count = -(-file.version.size // PIECE_SIZE)
        self._pieces = bytearray(self.piece_count)
        self._digests = [0] * self.piece_count
        self._missing = self.piece_count
        self._in_flight = 0
        self._next = 0
        self._waits: dict[int, PieceWait] = {}
        self._temp: TempFile | None = None
        self._begin = trio.Lock()
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
        first, last = offset // PIECE_SIZE, (offset + len(view) - 1) // PIECE_SIZE
        if self._temp is None or any(self._pieces[i] != HERE for i in range(first, last + 1)):
            return False
        return self.store.read_nowait(self._temp.descriptor, view, offset)

    def read_here(self, view: memoryview, offset: int) -> None:
        """Fill `view` from pieces that are here. Blocks. Raises TierUnavailable."""
        assert self._temp is not None
        self.store.read(self._temp.descriptor, view, offset)

    def wait_for(self, piece: int) -> PieceWait | None:
        """Wait for a piece: the wait to await, or None if it is here. The caller tells the queue."""
        if self._pieces[piece] == HERE:
            return None
        wait = self._waits.get(piece)
        if wait is None:
            wait = self._waits[piece] = PieceWait()
        return wait

    # ---- for the queue

    def needs(self, piece: int) -> bool:
        """True if the piece is neither here nor on its way, and the fill goes on."""
        return self.outcome is not Outcome.OVER and self._pieces[piece] == ABSENT

    def next_piece(self) -> int | None:
        """The first piece in order that has to be fetched, or None."""
        while self._next < self.piece_count and self._pieces[self._next] != ABSENT:
            self._next += 1
        return self._next if self._next < self.piece_count else None

    def start_piece(self, piece: int) -> None:
        """The piece is on its way from now on; `fetch` must follow."""
        self._pieces[piece] = IN_FLIGHT
        self._in_flight += 1

    async def fetch(self, piece: int) -> Finished | None:
        """Fetch a started piece, show it to its readers and, if it was the last one, finish the copy.

        Returns:
            The finished copy, if this completed it.

        Raises:
            TierUnavailable: the fill is over; its readers were told so and look elsewhere.
            StaleFile: as before, and the file has changed.
            OSError: the source's own, given to the readers of this piece; the fill is broken.
        """
        try:
            if self.piece_count == 1:
                finished = await self._copy_only_piece()
                self._show(piece)
                if finished is None:
                    self._break()
                return finished
            await self._copy_piece(piece)
            self._show(piece)
            if self._missing or self.outcome is not Outcome.RUNNING:
                return None
            self.is_wanted_whole = True  # so that nobody drops it while it is being finished
            return await self._finish()
        except OSError as exc:
            self._pieces[piece] = ABSENT
            self._next = min(self._next, piece)
            self._break()
            self._wake(piece, exc)
            raise
        except (StaleFile, TierUnavailable) as exc:
            if self._missing:
                self.end(exc)
            else:
                # Every piece was checked and is here: those who have it open read on, but there is nothing to publish.
                self._break()
            raise
        finally:
            self._in_flight -= 1
            self._clean_up()

    def _show(self, piece: int) -> None:
        self._pieces[piece] = HERE
        self._missing -= 1
        self._reservation.wrote(self.piece_length(piece))
        self._wake(piece, None)

    def _wake(self, piece: int, error: Exception | None) -> None:
        wait = self._waits.pop(piece, None)
        if wait is not None:
            wait.error = error
            wait.event.set()

    def _break(self) -> None:
        if self.outcome is Outcome.RUNNING:
            self.outcome = Outcome.BROKEN
        self.is_wanted_whole = False

    def end(self, error: DmfsError) -> None:
        """The fill is over without a copy; whoever waits gets `error`."""
        self.outcome = Outcome.OVER
        for piece in list(self._waits):
            self._wake(piece, error)
        self._clean_up()

    def hand_over(self, finished: Finished) -> tuple[Copy, Descriptor]:
        """The fill is over, with a copy: what the store is to know of it (at once), and a descriptor to read it by."""
        assert self._temp is not None
        self.outcome = Outcome.OVER
        self._reservation.release()
        temp, self._temp = self._temp, None
        self._is_clean = True
        return Copy(finished.digest, finished.allocated, None if finished.is_published else temp.name), temp.descriptor

    def _clean_up(self) -> None:
        """Once over without a copy and with nothing in flight: the temporary file goes, and the space is given back."""
        if self.outcome is not Outcome.OVER or self._in_flight or self._is_clean:
            return
        self._is_clean = True
        self._reservation.release()
        if self._temp is not None:
            self.store.remove_temp(self._temp.name)
            self._temp = None

    # ---- the copying

    async def _copy_piece(self, piece: int) -> None:
        data = self._source.data
        async with self._begin:  # the first piece opens the file and makes the temporary one, for all
            await self._open()
            if self._temp is None:
                self._temp = await data.run(self.file.path, self.store.create, self.file.key, self.file.version.size)
        descriptor = self._source.kept(self.file.key)
        assert descriptor is not None
        calls, self._digests[piece], _ = await data.run(
            self.file.path, self._copy_in_thread, piece, descriptor, self._temp
        )
        self._source.count_reads(calls, self.piece_length(piece))

    async def _open(self) -> None:
        try:
            await self._source.open(self.file)
        except OSError as exc:
            self.open_error = exc
            raise

    async def _copy_only_piece(self) -> Finished | None:
        """A small file costs one thread: opened, read, checked, written and published in one go."""
        descriptor = self._source.kept(self.file.key)
        publish = self._can_publish_at_once(self.file)
        calls, temp, finished = await self._source.data.run(
            self.file.path, self._copy_file_in_thread, descriptor, publish
        )
        if descriptor is None:
            self._source.count_open()
        self._source.count_reads(calls, self.file.version.size)
        self._temp = temp
        return finished

    async def _finish(self) -> Finished:
        await self._open()
        descriptor = self._source.kept(self.file.key)
        assert descriptor is not None
        assert self._temp is not None
        publish = self._can_publish_at_once(self.file)
        return await self._source.data.run(self.file.path, self._finish_in_thread, descriptor, self._temp, publish)

    def piece_length(self, piece: int) -> int:
        """Bytes of a piece: all are PIECE_SIZE but the last."""
        return min(PIECE_SIZE, self.file.version.size - piece * PIECE_SIZE)

    def _copy_in_thread(self, piece: int, descriptor: Descriptor, temp: TempFile) -> tuple[int, int, bool]:
        """Returns (read calls, digest, whether the version is still the source's)."""
        try:
            buffer = _buffers.pop()
        except IndexError:
            buffer = bytearray(PIECE_SIZE)
        try:
            length = self.piece_length(piece)
            view = memoryview(buffer)[:length]
            offset = piece * PIECE_SIZE
            calls, is_current = self._source.read_into(descriptor, self.file, offset, view)
            digest: int = xxhash.xxh3_64_intdigest(view)
            # A piece of zeros is left as the hole it is. The digest asks cheaply, the bytes decide.
            if digest != _ZERO_DIGEST or length != PIECE_SIZE or buffer != _ZEROS:
                self.store.write(temp, view, offset)
            return calls, digest, is_current
        finally:
            _buffers.append(buffer)

    def _copy_file_in_thread(
        self, descriptor: Descriptor | None, publish: bool
    ) -> tuple[int, TempFile, Finished | None]:
        """Returns (read calls, the copy, how it was finished: None if it may not be published)."""
        if descriptor is None:
            try:
                descriptor = self._source.open_file(self.file)
            except OSError as exc:
                self.open_error = exc
                raise
        temp = self.store.create(self.file.key, self.file.version.size)
        try:
            calls, digest, is_current = self._copy_in_thread(0, descriptor, temp)
            if not is_current:
                return calls, temp, None
            allocated = self.store.allocated(temp)
            if publish:
                self.store.publish(self.file.key, digest, temp.name)
            return calls, temp, Finished(digest, allocated, publish)
        except BaseException:
            self.store.remove_temp(temp.name)
            raise

    def _finish_in_thread(self, descriptor: Descriptor, temp: TempFile, publish: bool) -> Finished:
        if not self._source.check_version(descriptor, self.file):
            raise StaleFile(f"{os.fsdecode(self.file.path)} was removed at the source")
        allocated = self.store.allocated(temp)
        sums = b"".join(digest.to_bytes(8, "little") for digest in self._digests)
        digest: int = xxhash.xxh3_64_intdigest(sums)
        self.store.write_sums(self.file.key, sums)
        if publish:
            self.store.publish(self.file.key, digest, temp.name)
        return Finished(digest, allocated, publish)
