"""One node without a mount: source, tiers, manager and `Operations` in this process, with clocks and faults in hand.

Tests speak to `Operations` as a front end does: the `*_nowait` method first, its coroutine if that would wait. Every
blocking call to the source or to a tier can be counted, made to fail, delivered short, or held until it is let go.
Each wait has a limit.
"""

import contextlib
import fcntl
import os
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import trio
import trio.testing

from dmfs.errors import StaleFile
from dmfs.fuse.operations import Operations
from dmfs.fuse.ttl import MetadataTtl
from dmfs.log import ErrorLog
from dmfs.metrics import Metrics
from dmfs.tiers.descriptors import Descriptor
from dmfs.tiers.folder import DatasetFolder, open_folder
from dmfs.tiers.manager import Manager
from dmfs.tiers.source import Source
from dmfs.tiers.store import Copy, ReadMode, Store, TempFile
from dmfs.types import Clock, DirEntry, Entry, FileKey, MiB, Stat, VersionFrom, unpack_attributes

T = TypeVar("T")

LIMIT = 10.0  # seconds for anything in these tests; they need a small part of it
DAYS_PASSED = 2 * 86_400.0  # seconds: files written just now are old, unless a test wants them fresh
A_LOT = 1 << 40  # bytes
DATASET_ID = "dataset"


class FakeClock:
    """The clocks of a node, which stand still until they are moved. Also moves trio's own clock, if a test mocks it."""

    def __init__(self, *, is_fresh: bool, trio_clock: trio.testing.MockClock | None) -> None:
        self._passed = 0.0
        self._wall = time.time() + (0.0 if is_fresh else DAYS_PASSED)
        self._trio_clock = trio_clock
        self.clock = Clock(wall=lambda: self._wall + self._passed, monotonic=lambda: 1000.0 + self._passed)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._passed += seconds
        if self._trio_clock is not None:
            self._trio_clock.jump(seconds)


@dataclass
class Fault:
    """What happens to some calls. `entered` is set when the first of them has come.

    Attributes:
        offset: only reads that begin there are concerned; None: all.
        error: raised by the call, if it is not 0.
        size: bytes that a read delivers at most.
        skip: as many calls go well before.
        times: as many calls are concerned; None: all.
    """

    call: str
    path: bytes | None
    offset: int | None = None
    error: int = 0
    size: int | None = None
    skip: int = 0
    times: int | None = None
    is_held: bool = False
    entered: threading.Event = field(default_factory=threading.Event)
    _go: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Let held calls go on."""
        self._go.set()

    async def wait_entered(self) -> None:
        """Wait until the first call concerned has come."""
        await in_thread(self.entered.wait, f"a call of {self.call}")

    def meet(self) -> None:
        self.entered.set()
        if self.is_held:
            assert self._go.wait(LIMIT), f"{self.call} was never let go"
        if self.error:
            raise OSError(self.error, os.strerror(self.error))


class Faults:
    """The faults of a node's source or tiers, and how often each call was made. Used from threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def fail(
        self,
        call: str,
        error: int,
        *,
        path: bytes | None = None,
        offset: int | None = None,
        skip: int = 0,
        times: int | None = None,
    ) -> Fault:
        """Make calls raise OSError with this errno."""
        return self._add(Fault(call, path, offset, error=error, skip=skip, times=times))

    def hold(
        self,
        call: str,
        *,
        path: bytes | None = None,
        offset: int | None = None,
        error: int = 0,
        skip: int = 0,
        times: int | None = None,
    ) -> Fault:
        """Make calls hang until `release`, and then go on, or fail with `error`."""
        return self._add(Fault(call, path, offset, error=error, is_held=True, skip=skip, times=times))

    def shorten(self, size: int) -> Fault:
        """Make reads of the source deliver `size` bytes at most."""
        return self._add(Fault("read", None, size=size))

    def _add(self, fault: Fault) -> Fault:
        self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """No more faults; what is held goes on."""
        faults, self._faults = self._faults, []
        for fault in faults:
            fault.release()

    def meet(self, call: str, path: bytes = b"", offset: int = 0) -> int | None:
        """A call is made: raise, wait or return the number of bytes to deliver at most."""
        size = None
        concerned = []
        with self._lock:
            self.counts[call] += 1
            for fault in self._faults:
                if fault.call != call or fault.path not in (None, path) or fault.offset not in (None, offset):
                    continue
                if fault.skip:
                    fault.skip -= 1
                elif fault.times != 0:
                    fault.times = fault.times and fault.times - 1
                    concerned.append(fault)
        for fault in concerned:
            fault.meet()
            size = fault.size if fault.size is not None else size
        return size


class FaultySource(Source):
    """A source whose calls meet `faults`: `stat`, `open`, `opendir`, `read`, `check`, `readlink`, `statvfs`."""

    faults: Faults

    def _stat(self, path: bytes) -> os.stat_result:
        self.faults.meet("stat", path)
        return super()._stat(path)

    def _readlink(self, path: bytes) -> bytes:
        self.faults.meet("readlink", path)
        return super()._readlink(path)

    def _statvfs(self) -> os.statvfs_result:
        self.faults.meet("statvfs")
        return super()._statvfs()

    def _open_beneath(self, path: bytes, flags: int) -> int:
        self.faults.meet("opendir" if flags & os.O_DIRECTORY else "open", path)
        return super()._open_beneath(path, flags)

    def _read_some(self, descriptor: Descriptor, view: memoryview, offset: int) -> int:
        name = os.readlink(f"/proc/self/fd/{descriptor.fd}").rpartition("/")[2]
        size = self.faults.meet("read", os.fsencode(name), offset)
        return super()._read_some(descriptor, view[:size], offset)

    def _fstat(self, descriptor: Descriptor) -> os.stat_result:
        self.faults.meet("check")
        return super()._fstat(descriptor)


class FaultyStore(Store):
    """A tier whose blocking calls meet `faults`: `create`, `write`, `sums`, `publish`, `open_copy`, `read_copy`.

    `no_room` is the look at the free space for so many bytes (`offset`): where it fails, `min_free` stands in the way.
    """

    faults: Faults

    def check_room(self, size: int) -> None:
        try:
            self.faults.meet("no_room", offset=size)
        except OSError:
            self._min_free, min_free = A_LOT * A_LOT, self._min_free
            self._plenty_until = 0.0
            try:
                super().check_room(size)
            finally:
                self._min_free = min_free
        super().check_room(size)

    def create(self, key: FileKey, size: int) -> TempFile:
        with self._faults():
            self.faults.meet("create")
        return super().create(key, size)

    def write(self, temp: TempFile, view: memoryview, offset: int) -> None:
        with self._faults():
            self.faults.meet("write")
        super().write(temp, view, offset)

    def write_sums(self, key: FileKey, sums: bytes) -> None:
        with self._faults():
            self.faults.meet("sums")
        super().write_sums(key, sums)

    def publish(self, key: FileKey, digest: int, temp_name: str) -> None:
        with self._faults():
            self.faults.meet("publish")
        super().publish(key, digest, temp_name)
        self.faults.meet("published")

    def open_copy(self, key: FileKey, copy: Copy) -> Descriptor:
        with self._faults():
            self.faults.meet("open_copy")
        return super().open_copy(key, copy)

    def read(self, descriptor: Descriptor, view: memoryview, offset: int) -> None:
        with self._faults():
            self.faults.meet("read_copy")
        super().read(descriptor, view, offset)


class Node:
    """A running node. Made by `run_node`.

    Attributes:
        folder: the directory of the source. tiers: those of the tiers, first one first.
        faults, tier_faults: of the source, and of each tier.
    """

    operations: Operations

    def __init__(
        self,
        base: Path,
        *,
        clock: FakeClock,
        capacities: list[int],
        read_mode: ReadMode,
        min_free: int,
        version_from: VersionFrom,
        is_immutable: bool,
        metadata_ttl: float | None,
        open_wait: int,
        open_wait_seconds: float,
        pieces_in_flight: int,
        metadata_threads: int,
    ) -> None:
        self.folder = base / "source"
        self.folder.mkdir(exist_ok=True)
        self.clock = clock
        self.metrics = Metrics()
        self.errors = ErrorLog()
        self.faults = Faults()
        self.source = FaultySource(
            str(self.folder),
            metrics=self.metrics,
            clock=clock.clock,
            metadata_threads=metadata_threads,
            data_threads=16,
            version_from=version_from,
        )
        self.source.faults = self.faults
        self.tiers = [base / f"tier{number}" for number in range(len(capacities))]
        self.tier_faults = [Faults() for _ in capacities]
        self._folders: list[DatasetFolder] = []
        self.stores: list[FaultyStore] = []
        for tier, capacity, faults in zip(self.tiers, capacities, self.tier_faults, strict=True):
            folder = open_folder(str(tier), source=str(self.folder), dataset_id=DATASET_ID)
            store = FaultyStore(folder, capacity=capacity, min_free=min_free, read_mode=read_mode, clock=clock.clock)
            store.faults = faults
            self._folders.append(folder)
            self.stores.append(store)
        self.manager = Manager(
            self.source,
            list(self.stores),
            metrics=self.metrics,
            errors=self.errors,
            clock=clock.clock,
            is_immutable=is_immutable,
            open_wait=open_wait,
            open_wait_seconds=open_wait_seconds,
            pieces_in_flight=pieces_in_flight,
            fills=8,
            threads=4,
        )
        self._version_from = version_from
        self._ttl = MetadataTtl(clock.clock, fixed=metadata_ttl, is_immutable=is_immutable)

    async def _start(self, nursery: trio.Nursery) -> None:
        await nursery.start(self.manager.run)
        self.operations = Operations(
            self.manager,
            await self.source.lstat(b""),
            nursery=nursery,
            metrics=self.metrics,
            errors=self.errors,
            clock=self.clock.clock,
            ttl=self._ttl,
            dataset_id=os.fsencode(DATASET_ID),
            version_from=self._version_from,
        )
        self.metrics.source.stats = 0
        self.faults.counts.clear()
        for store in self.stores:
            await store.scanned.wait()

    def unlock(self) -> None:
        """Release the tiers, as the end of a process does."""
        for folder in self._folders:
            fcntl.flock(folder._lock.fd, fcntl.LOCK_UN)

    def release_all(self) -> None:
        """End every fault; what is held goes on."""
        for faults in (self.faults, *self.tier_faults):
            faults.clear()

    # ---- as a front end

    async def lookup_in(self, parent: int, name: bytes) -> Entry:
        """One look-up."""
        entry = self.operations.lookup_nowait(parent, name)
        return entry if entry is not None else await self.operations.lookup(parent, name)

    async def lookup(self, path: bytes) -> Entry:
        """Walk a path; every node on it gets a reference. Raises FileNotFoundError."""
        entry = Entry(1, b"", 0.0)
        for name in path.split(b"/"):
            entry = await self.lookup_in(entry.node, name)
            if not entry.node:
                raise FileNotFoundError(path)
        return entry

    async def stat(self, path: bytes) -> Stat:
        """Attributes by path."""
        return unpack_attributes((await self.lookup(path)).attributes)

    async def getattr(self, node: int) -> Stat:
        """Attributes by node."""
        known = self.operations.getattr_nowait(node)
        return unpack_attributes((known if known is not None else await self.operations.getattr(node))[0])

    async def open_node(self, node: int) -> int:
        """A handle of a node."""
        handle = self.operations.open_nowait(node)
        return handle if handle is not None else await self.operations.open(node)

    async def open(self, path: bytes) -> int:
        """A handle of a path. As the kernel, walks once more, asking the source, when the open says ESTALE."""
        try:
            return await self.open_node((await self.lookup(path)).node)
        except StaleFile:
            return await self.open_node((await self.lookup(path)).node)

    async def read(self, handle: int, offset: int, size: int) -> bytes:
        """One READ. The buffer starts full of 0xEE, so that what was never written shows."""
        view = memoryview(bytearray(b"\xee" * size))
        count = self.operations.read_nowait(handle, offset, view)
        if count is None:
            count = await self.operations.read(handle, offset, view)
        return bytes(view[:count])

    async def read_all(self, handle: int, size: int, request: int = MiB) -> bytes:
        """All bytes of a handle whose file has `size`, by requests of `request` bytes, none of them short."""
        parts = []
        for offset in range(0, size, request):
            part = await self.read(handle, offset, request)
            assert len(part) == min(request, size - offset), f"short read at {offset}"
            parts.append(part)
        assert await self.read(handle, size, request) == b""
        return b"".join(parts)

    async def read_file(self, path: bytes, request: int = MiB) -> bytes:
        """Open, read to the end, close."""
        handle = await self.open(path)
        try:
            size = self.operations._files[handle].file.version.size
            return await self.read_all(handle, size, request)
        finally:
            self.operations.release(handle)

    async def listing(self, node: int = 1, count: int = 100) -> list[DirEntry]:
        """A whole listing."""
        handle = self.operations.opendir(node)
        try:
            entries: list[DirEntry] = []
            while chunk := await self.readdir(handle, len(entries), count):
                entries += chunk
            return entries
        finally:
            self.operations.releasedir(handle)

    async def readdir(self, handle: int, index: int, count: int) -> list[DirEntry]:
        """One READDIR."""
        chunk = self.operations.readdir_nowait(handle, index, count)
        return chunk if chunk is not None else await self.operations.readdir(handle, index, count)

    # ---- a look inside

    def dataset_folder(self, tier: int = 0) -> Path:
        """The folder of the dataset on a tier."""
        return Path(self._folders[tier].path)

    def copies(self, tier: int = 0) -> list[Path]:
        """The published copies on a tier, digests left out."""
        if not self.tiers:
            return []
        return sorted(p for p in (self.dataset_folder(tier) / "objects").iterdir() if p.suffix != ".sums")

    def temp_files(self) -> list[str]:
        """What lies in tmp/ of all tiers."""
        return sorted(p.name for tier in range(len(self.tiers)) for p in (self.dataset_folder(tier) / "tmp").iterdir())

    async def wait_idle(self) -> None:
        """Wait until no fill is under way, and what dropped ones had begun has ended."""
        await until(lambda: not self.manager._fills and not self.source.data.waiting(), "no fill is left")

    async def assert_settled(self) -> None:
        """With every handle released: nothing is promised, pinned or half done, and `used` is what `du` says."""
        await self.wait_idle()
        assert self.temp_files() == []
        for tier, store in enumerate(self.stores):
            assert (store._reserved, store._unwritten) == (0, 0)
            assert store._pins == {}
            allocated = sum(copy.stat().st_blocks * 512 for copy in self.copies(tier))
            assert store.statistics()["used_bytes"] == allocated
            assert store.statistics()["copies"] == len(self.copies(tier))


@contextlib.asynccontextmanager
async def run_node(
    base: Path,
    *,
    trio_clock: trio.testing.MockClock | None = None,
    is_fresh: bool = False,
    capacities: tuple[int, ...] = (A_LOT,),
    read_mode: ReadMode = "memory",
    min_free: int = 0,
    version_from: VersionFrom = "ctime",
    is_immutable: bool = False,
    metadata_ttl: float | None = None,
    open_wait: int = 8 * MiB,
    open_wait_seconds: float = LIMIT,
    pieces_in_flight: int = 4,
    metadata_threads: int = 8,
) -> AsyncIterator[Node]:
    """A node over `base/source` with tiers `base/tier0`... for the block; then it ends as a daemon does.

    Args:
        is_fresh: files written just now are young; else they are two days old by the node's clock.
    """
    node = Node(
        base,
        clock=FakeClock(is_fresh=is_fresh, trio_clock=trio_clock),
        capacities=list(capacities),
        read_mode=read_mode,
        min_free=min_free,
        version_from=version_from,
        is_immutable=is_immutable,
        metadata_ttl=metadata_ttl,
        open_wait=open_wait,
        open_wait_seconds=open_wait_seconds,
        pieces_in_flight=pieces_in_flight,
        metadata_threads=metadata_threads,
    )
    with trio.fail_after(2 * LIMIT):
        async with trio.open_nursery() as nursery:
            await node._start(nursery)
            try:
                yield node
            finally:
                node.release_all()
                nursery.cancel_scope.cancel()
    node.manager.shut_down()
    node.unlock()
    assert node.metrics.surprises == 0, node.errors.entries()


async def until(condition: Callable[[], T], what: str) -> T:
    """Let other tasks and threads run until the condition holds."""
    deadline = time.monotonic() + LIMIT
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {LIMIT:g} s in vain until {what}"
        await in_thread(lambda: time.sleep(0.001), what)
    return value


async def in_thread(function: Callable[..., T], what: str) -> T:
    """Run something that blocks; `threading.Event.wait` gets its limit."""
    is_wait = getattr(function, "__name__", "") == "wait"
    result = await trio.to_thread.run_sync(lambda: function(LIMIT) if is_wait else function(), limiter=_limiter())
    assert result or not is_wait, f"{what} never came"
    return result


def _limiter() -> trio.CapacityLimiter:
    return trio.CapacityLimiter(1)  # threads of the tests themselves never wait for those of the node


class raises_errno:
    """The block raises OSError with exactly this errno. Keeps nothing of it, so that what its frames hold is let go."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if exc is None:
            raise AssertionError(f"no {os.strerror(self._code)}")
        if not isinstance(exc, OSError):
            return False
        assert exc.errno == self._code, f"{exc!r} instead of {os.strerror(self._code)}"
        return True


def open_descriptors(folder: Path) -> list[str]:
    """Files below a folder that this process has open, those already unlinked included, locks not."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = re.sub(r" \(deleted\)$", "", os.readlink(f"/proc/self/fd/{fd}"))
            is_file = not os.path.isdir(f"/proc/self/fd/{fd}") and not target.endswith("/lock")
            if Path(target).is_relative_to(folder) and is_file:
                found.append(target)
    return found
