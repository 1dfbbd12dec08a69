"""Copies on one local tier: names, space, publishing, giving up. Knows nothing of the source, of fills or of other
tiers.

Layout, below `<tier>/<basename>-<dataset hash>/`:

    format.json                   guards the layout: which format, which dataset
    lock                          flock'ed as long as a daemon uses the folder; dies with the process
    objects/<key>-<digest>        one complete copy; being there means complete
    objects/<key>.sums            for a copy of several pieces: the digest of each, 8 bytes little-endian
    tmp/                          copies on their way; whatever is here at a start is rubbish

A digest is xxh3-64 of the copy's only piece, or of its `.sums`. Nothing is written under `objects/` but by rename, so
there is no index to lose and nothing to repair. Functions that say "blocks" are called in threads; the others in the
event loop, where the dictionary and the accounting live.
"""

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import trio

from dmfs.errors import CopyDamaged, TierUnavailable
from dmfs.tiers.descriptors import Descriptor
from dmfs.tiers.folder import DatasetFolder
from dmfs.tiers.nowait import make_unnamed, open_cached
from dmfs.types import PIECE_SIZE, Clock, FileKey, GiB, hex_key

ReadMode = Literal["nowait", "memory", "thread"]
"""How a copy is read: `nowait` inline unless that would wait for the disk, `memory` inline, `thread` in a thread."""

BLOCK = 4096  # bytes; what a file system rounds a file up to, for reservations (accounting uses st_blocks)
SCAN_BATCH = 2000  # names taken over at once while the tier is scanned
RETRY_AFTER = 1.0  # seconds a tier that was full or failed is left alone before a fill tries it again
PLENTY = 4 * GiB  # bytes to spare that nobody fills up within PLENTY_FOR
PLENTY_FOR = 0.2  # seconds

_NAME = re.compile(r"([0-9a-f]{32})(?:-([0-9a-f]{16})|\.sums)")


class NoRoom(TierUnavailable):
    """A file does not fit into what `min_free` leaves: no fault, and smaller ones may fit."""


def copy_name(key: FileKey, digest: int) -> str:
    """The name of a copy below objects/."""
    return f"{hex_key(key)}-{digest:016x}"


def sums_name(key: FileKey) -> str:
    """The name of the digests of a copy of several pieces."""
    return f"{hex_key(key)}.sums"


def parse_name(name: str) -> tuple[FileKey, int | None] | None:
    """(key, digest) of a copy's name, (key, None) of a `.sums`; None for anything else."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    key, digest = match.groups()
    return bytes.fromhex(key), int(digest, 16) if digest else None


@dataclass(slots=True)
class Copy:
    """A complete copy.

    `digest` is in its name; `allocated` is bytes of disk; `temp` is its name in tmp/ until it is published.
    """

    digest: int
    allocated: int
    temp: str | None = None


@dataclass(frozen=True, slots=True)
class TempFile:
    """A copy on its way: its name in tmp/ and an open descriptor for writing and reading."""

    name: str
    descriptor: Descriptor


class Store:
    """The copies of one dataset on one tier.

    Attributes:
        path: the tier's directory.
        capacity: bytes that copies of all datasets on this tier may take together.
        read_mode: see ReadMode; found out at start.
        scanned: set once every copy left by earlier daemons is known.
        on_removed: called with the key of a copy that was given up or discarded.
    """

    def __init__(
        self, folder: DatasetFolder, *, capacity: int, min_free: int, read_mode: ReadMode, clock: Clock
    ) -> None:
        self.path = folder.tier
        self.capacity = capacity
        self.read_mode = read_mode
        self.scanned = trio.Event()
        self.on_removed: Callable[[FileKey], None] = lambda key: None
        self._folder = folder
        self._min_free = min_free
        self._clock = clock
        self._copies: dict[FileKey, Copy] = {}
        self._pins: dict[FileKey, int] = {}
        self._used = 0  # bytes allocated by copies, published or not, of all datasets
        self._held: dict[FileKey, int] = {}  # bytes of removed copies that somebody still has open
        self._reserved = 0  # bytes promised to running fills
        self._unwritten = 0  # of these, bytes not on the disk yet
        self._plenty_until = 0.0  # until when the free space of the file system need not be looked at
        self._trouble: tuple[str, float] | None = None  # what is wrong, and when to try again
        self._no_room: tuple[int, float] | None = None  # bytes that did not fit, and when to try so many again
        self._temp_ids = itertools.count()

    # ---- what is here

    def get(self, key: FileKey) -> Copy | None:
        """The copy of a key, if it is here."""
        return self._copies.get(key)

    def pin(self, key: FileKey) -> None:
        """Keep the copy of this key (there now or to come) until `unpin`."""
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: FileKey) -> None:
        """Take back one `pin`."""
        count = self._pins.pop(key) - 1
        if count:
            self._pins[key] = count
        else:
            self._held.pop(key, None)

    def statistics(self) -> dict[str, object]:
        """This tier in `dmfs status`: `{path, capacity_bytes, used_bytes, held_bytes, copies, state}`.

        Used is what `du` says; held is what removed copies still take that are open.
        """
        return {
            "path": self.path,
            "capacity_bytes": self.capacity,
            "used_bytes": self._used + self._reserved - self._unwritten,
            "held_bytes": sum(self._held.values()),
            "copies": len(self._copies),
            "state": self._state(),
        }

    def _state(self) -> str:
        if not self.scanned.is_set():
            return "scanning"
        if self._trouble:
            return self._trouble[0]
        return "full" if self._no_room else "ok"

    async def scan(self) -> None:
        """Take over the copies of earlier daemons, and remove what they left unfinished.

        Ends with `scanned`, whatever happens.
        """
        try:
            others = await trio.to_thread.run_sync(self._scan, abandon_on_cancel=True)
            self._used += others  # not in one line: `+=` would take the old value before it waits
        except OSError as exc:
            self.report(exc)
        finally:
            self.scanned.set()

    def _scan(self) -> int:
        """Returns the bytes that other datasets take on this tier. Blocks.

        What cannot be looked at or removed is left alone, and is no reason to leave out the rest.
        """
        self._folder.clear_tmp()
        sums: set[FileKey] = set()
        large: set[FileKey] = set()  # copies that need a `.sums`
        batch: list[tuple[FileKey, Copy]] = []
        with os.scandir(self._folder.objects_fd) as entries:
            for entry in entries:
                parsed = parse_name(entry.name)
                if parsed is None:
                    continue
                key, digest = parsed
                if digest is None:
                    sums.add(key)
                    continue
                try:
                    st = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if st.st_size > PIECE_SIZE:
                    large.add(key)
                batch.append((key, Copy(digest, st.st_blocks * 512)))
                if len(batch) == SCAN_BATCH:
                    self._hand_in(batch)
                    batch = []
        self._hand_in(batch)
        for key in sums - large:
            self._remove(sums_name(key))
        trio.from_thread.run_sync(self._discard_all, large - sums)
        return self._folder.others_allocated()

    def _hand_in(self, batch: list[tuple[FileKey, Copy]]) -> None:
        """Blocks."""
        for key, copy in trio.from_thread.run_sync(self._take_over, batch):
            self._remove(copy_name(key, copy.digest))

    def _take_over(self, batch: list[tuple[FileKey, Copy]]) -> list[tuple[FileKey, Copy]]:
        """Returns those that must be removed.

        Two copies of one version with different digests: one is wrong, nobody can say which, so both go.
        """
        refused = []
        for key, copy in batch:
            if key in self._copies:
                refused.append((key, copy))
                self.discard(key)
            else:
                self._copies[key] = copy
                self._used += copy.allocated
        return refused

    def _discard_all(self, keys: set[FileKey]) -> None:
        for key in keys & self._copies.keys():
            self.discard(key)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder.objects_fd)

    # ---- space

    def reserve(self, size: int) -> "Reservation | None":
        """Promise `size` bytes (rounded up to blocks) to a fill.

        None if they are not there, or the tier is out of service.
        """
        size = -(-size // BLOCK) * BLOCK
        now = self._clock.monotonic()
        if self._trouble and now < self._trouble[1]:
            return None
        if self._no_room and size >= self._no_room[0] and now < self._no_room[1]:
            return None
        held = sum(self._held.values()) if self._held else 0
        if self._used + self._reserved + held + size > self.capacity:
            return None
        self._reserved += size
        self._unwritten += size
        return Reservation(self, size)

    def report(self, exc: BaseException | None) -> None:
        """An operation on this tier failed with `exc`, so fills leave it alone for a while.

        `statistics` shows it until one works.
        """
        is_full = isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT)
        state = "full" if is_full else f"failing: {getattr(exc, 'strerror', None) or exc}"
        self._trouble = (state, self._clock.monotonic() + RETRY_AFTER)

    def clear(self) -> None:
        """Nothing is on its way any more: remove what was. Blocks."""
        with contextlib.suppress(OSError):
            self._folder.clear_tmp()

    # ---- a copy on its way

    def make_probe(self) -> Descriptor:
        """An empty file without a name, to try what this tier's file system can do. Blocks. Raises TierUnavailable."""
        with self._faults():
            return Descriptor(make_unnamed(self._folder.tmp_fd))

    def create(self, key: FileKey, size: int) -> TempFile:
        """A temporary file for `size` bytes, to be written. Blocks. Raises TierUnavailable, NoRoom among it."""
        self.check_room(size)
        with self._faults():
            name = f"{hex_key(key)}.{next(self._temp_ids)}"
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._folder.tmp_fd)
            temp = TempFile(name, Descriptor(fd))
            if size >= PIECE_SIZE:  # a smaller file is written in one go; this one may end in a hole
                try:
                    os.ftruncate(fd, size)
                except OSError:
                    self.remove_temp(name)
                    raise
            return temp

    def check_room(self, size: int) -> None:
        """Raise NoRoom if the file system has not `min_free` to spare with all that is promised, `size` among it.

        Blocks. Raises TierUnavailable. Where there is plenty, looks seldom.
        """
        now = self._clock.monotonic()
        if now < self._plenty_until:
            return
        with self._faults():
            fs = os.fstatvfs(self._folder.tmp_fd)
        spare = fs.f_bavail * fs.f_frsize - self._unwritten - self._min_free
        if spare < 0:
            self._no_room = (size, now + RETRY_AFTER)
            raise NoRoom(f"cache {self.path}: less free space than min_free")
        if self._no_room and size >= self._no_room[0]:
            self._no_room = None
        if spare > PLENTY:
            self._plenty_until = now + PLENTY_FOR

    def write(self, temp: TempFile, view: memoryview, offset: int) -> None:
        """Write all of `view`. Blocks. Raises TierUnavailable."""
        with self._faults():
            done = 0
            while done < len(view):
                done += os.pwrite(temp.descriptor.fd, view[done:], offset + done)

    def allocated(self, temp: TempFile) -> int:
        """Bytes of disk that a temporary file takes. Blocks. Raises TierUnavailable."""
        with self._faults():
            return os.fstat(temp.descriptor.fd).st_blocks * 512

    def write_sums(self, key: FileKey, sums: bytes) -> None:
        """Put the digests of a copy's pieces into place, which must come before its `publish`.

        Blocks. Raises TierUnavailable.
        """
        name = sums_name(key)
        with self._faults():
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=self._folder.tmp_fd)
            try:
                with open(fd, "wb") as file:
                    file.write(sums)
                os.rename(name, name, src_dir_fd=self._folder.tmp_fd, dst_dir_fd=self._folder.objects_fd)
            except OSError:
                self.remove_temp(name)
                raise

    def publish(self, key: FileKey, digest: int, temp_name: str) -> None:
        """Give a complete copy its name. Blocks. Raises TierUnavailable."""
        with self._faults():
            os.rename(
                temp_name, copy_name(key, digest), src_dir_fd=self._folder.tmp_fd, dst_dir_fd=self._folder.objects_fd
            )

    def remove_temp(self, name: str) -> None:
        """Remove a temporary file, if it is still there. Blocks, briefly."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder.tmp_fd)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """A fault of the disk becomes TierUnavailable, so that it is never taken for one of the source."""
        try:
            yield
        except OSError as exc:
            raise TierUnavailable(f"cache {self.path}: {exc.strerror or exc}") from exc

    def add(self, key: FileKey, copy: Copy) -> None:
        """A fill ended well: its copy is here, in tmp/ if `copy.temp` is set. The caller releases its reservation."""
        self._copies[key] = copy
        self._used += copy.allocated
        self._trouble = None

    def published(self, key: FileKey) -> None:
        """The copy of a key has got its name."""
        self._copies[key].temp = None

    # ---- reading and giving up

    def read_nowait(self, descriptor: Descriptor, view: memoryview, offset: int) -> bool:
        """Fill `view` if that needs no wait; False if it would, or the bytes are not there (`read` then says why)."""
        if self.read_mode == "thread":
            return False
        flags = os.RWF_NOWAIT if self.read_mode == "nowait" else 0
        try:
            return os.preadv(descriptor.fd, [view], offset, flags) == len(view)
        except OSError:
            return False

    def read(self, descriptor: Descriptor, view: memoryview, offset: int) -> None:
        """Fill `view`. Blocks. Raises TierUnavailable, CopyDamaged if the bytes are not there."""
        with self._faults():
            done = 0
            while done < len(view):
                count = os.preadv(descriptor.fd, [view[done:]], offset + done)
                if count == 0:
                    raise CopyDamaged(f"cache {self.path}: a copy is shorter than its file")
                done += count

    def open_copy_nowait(self, key: FileKey) -> Descriptor | None:
        """Open a copy if that needs no wait for a disk; None if it would, or fails (`open_copy` then says why)."""
        if self.read_mode == "thread":
            return None
        dir_fd, name = self._locations(key, self._copies[key])[0]
        try:
            return Descriptor(open_cached(name, dir_fd))
        except OSError:
            return None

    def open_copy(self, key: FileKey, copy: Copy) -> Descriptor:
        """Open a copy. Blocks. Raises TierUnavailable, CopyDamaged if somebody removed it."""
        with self._faults():
            for dir_fd, name in self._locations(key, copy):
                with contextlib.suppress(FileNotFoundError):
                    return Descriptor(os.open(name, os.O_RDONLY | os.O_NOATIME | os.O_CLOEXEC, dir_fd=dir_fd))
            raise CopyDamaged(f"cache {self.path}: a copy was removed")

    def seek(self, descriptor: Descriptor, offset: int, whence: int) -> int:
        """lseek(2) on a copy. Blocks. Raises TierUnavailable, or OSError that says what is wrong with the question."""
        try:
            return os.lseek(descriptor.fd, offset, whence)
        except OSError as exc:
            if exc.errno in (errno.ENXIO, errno.EINVAL):
                raise
            raise TierUnavailable(f"cache {self.path}: {exc.strerror or exc}") from exc

    def _locations(self, key: FileKey, copy: Copy) -> list[tuple[int, str]]:
        """Where a copy may be, as (directory, name). A thread may be giving it its name just now."""
        published = (self._folder.objects_fd, copy_name(key, copy.digest))
        return [published] if copy.temp is None else [(self._folder.tmp_fd, copy.temp), published]

    def evict(self, key: FileKey) -> bool:
        """Give up the copy of a key.

        False if it is pinned, or not here. Whoever keeps descriptors of it is told by `on_removed`.
        """
        if key in self._pins or key not in self._copies:
            return False
        self.discard(key)
        return True

    def discard(self, key: FileKey) -> None:
        """Remove a copy that must not be used any more, pinned or not: open descriptors of it read on."""
        copy = self._copies[key]
        self._forget(key)
        # The copy goes first: a `.sums` without a copy is rubbish that a scan removes, the reverse would be a copy
        # without proof.
        for dir_fd, name in (*self._locations(key, copy), (self._folder.objects_fd, sums_name(key))):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=dir_fd)
        self.on_removed(key)

    def _forget(self, key: FileKey) -> None:
        allocated = self._copies.pop(key).allocated
        self._used -= allocated
        if key in self._pins:
            self._held[key] = self._held.get(key, 0) + allocated


class Reservation:
    """Space promised to one fill. `release` it exactly once, when its bytes are accounted for as a copy or are gone."""

    def __init__(self, store: Store, size: int) -> None:
        self._store = store
        self._size = size
        self._unwritten = size

    def wrote(self, size: int) -> None:
        """`size` bytes are on the disk now, so its free space has shrunk by them."""
        size = min(size, self._unwritten)
        self._unwritten -= size
        self._store._unwritten -= size

    def release(self) -> None:
        """Give the promise back."""
        self._store._reserved -= self._size
        self._store._unwritten -= self._unwritten
