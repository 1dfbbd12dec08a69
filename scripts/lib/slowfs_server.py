"""The file system of slowfs: latency for every operation, one bandwidth for all, counters, and a control socket.

One thread, one event loop. A message waits in a heap until its latency is over and is carried out then, so what it
answers is what the folder below has at that moment. A READ then waits again until the bandwidth has let its bytes
through. Whoever uses the mount shares the limits and the counters.

A test double subclasses `SlowFileSystem` and overrides `before_operation`, `attributes` and `control`.
"""

import contextlib
import errno
import heapq
import json
import os
import select
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from dmfs.fuse import abi
from dmfs.types import pack_attributes, unpack_attributes
from scripts.lib.slowfs_tree import Tree, sized

STATS_XATTR = b"user.slowfs.stats"
"""Extended attribute of the root that holds the counters as JSON. Reading it is neither slow nor counted."""

MAX_READ_PAGES = 256  # 1 MiB, as the readahead of a Lustre client
BURST = 0.005  # seconds of bandwidth that an idle file system saves up
_DRAIN = 64  # messages taken before those that are due are looked at again
_CONTROL_TIMEOUT = 1.0  # seconds a control client may hold up the loop
_CONTROL_LIMIT = 1 << 20  # bytes of a control request

FUSE_ATTR = struct.Struct("=QQQqqqIIIIIIIIII")
"""The layout of `dmfs.types.Attributes`, to pack a changed `Stat`."""


@dataclass(slots=True)
class Counters:
    """What was asked since the start: files opened, READs and the bytes delivered, LOOKUPs and GETATTRs, OPENDIRs."""

    opens: int = 0
    reads: int = 0
    bytes: int = 0
    stats: int = 0
    listings: int = 0


class Verdict(NamedTuple):
    """What shall become of an operation.

    Attributes:
        delay: seconds it takes beyond the latency.
        error: the errno it ends with, or 0.
        hangs: it waits for `release_hanging`; latency, delay and the rest come after that.
        limit: the most bytes that a READ delivers.
    """

    delay: float = 0.0
    error: int = 0
    hangs: bool = False
    limit: int | None = None


@dataclass(slots=True)
class _Request:
    unique: int
    opcode: int
    node: int
    message: bytes
    error: int = 0
    delay: float = 0.0
    limit: int | None = None
    size: int = -1  # of a READ: bytes to deliver, once the bandwidth has been asked for them
    is_gone: bool = False  # answered, by an interrupt, before it was due


class SlowFileSystem:
    """A read-only view of `source`.

    Attributes:
        latency: seconds that each operation takes; FORGET, RELEASE and FLUSH take none.
        bandwidth: bytes per second of all READs together, 0 for no limit.
        counters: see there. Anybody may look, `reset` of the control socket sets them to 0.
    """

    def __init__(
        self,
        source: str,
        *,
        latency: float = 0.0,
        bandwidth: float = 0.0,
        age: float = 0.0,
        attr_timeout: float = 1.0,
    ) -> None:
        """
        Args:
            age: seconds that mtimes and ctimes are set back, rounded down.
            attr_timeout: seconds that the kernel may remember names and attributes. A missing name is never remembered.
        """
        self.latency = latency
        self.bandwidth = bandwidth
        self.counters = Counters()
        self._age = int(age)
        self._tree = Tree(source, attr_timeout=attr_timeout, attributes=self.attributes)
        self._device = -1
        self._on_ready: Callable[[], None]
        self._pending: dict[int, _Request] = {}  # by `unique`; what can still be interrupted
        self._hanging: list[_Request] = []
        self._heap: list[tuple[float, int, _Request]] = []
        self._sequence = 0  # keeps the order of requests that are due at the same time
        self._paid_until = 0.0  # when the bandwidth will have delivered all that was asked of it
        self._buffer = memoryview(bytearray(MAX_READ_PAGES * os.sysconf("SC_PAGE_SIZE")))

    # What a test double overrides

    def before_operation(self, operation: str, path: bytes, offset: int, size: int) -> Verdict | None:
        """Asked once for each operation when it arrives; None lets it pass.

        Args:
            operation: the kernel's name, as in "LOOKUP".
            path: relative to the source; for LOOKUP that of the name.
            offset: of READ, else 0; `size` likewise.
        """
        return None

    def attributes(self, path: bytes, st: os.stat_result) -> bytes:
        """The attributes shown of a path, 88 bytes."""
        if not self._age:
            return pack_attributes(st)
        fields = unpack_attributes(pack_attributes(st))
        return FUSE_ATTR.pack(*fields._replace(mtime=fields.mtime - self._age, ctime=fields.ctime - self._age))

    def control(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of the control socket. Raises ValueError, KeyError, TypeError... for a bad one."""
        match request.get("op"):
            case "stats":
                return asdict(self.counters)
            case "set":
                self.latency = float(request.get("latency_ms", self.latency * 1e3)) / 1e3
                self.bandwidth = float(request.get("bandwidth", self.bandwidth / 1e6)) * 1e6
                return {"latency_ms": self.latency * 1e3, "bandwidth": self.bandwidth / 1e6}
            case "reset":
                self.counters = Counters()
                return {}
            case _:
                raise ValueError(f"unknown op {request.get('op')!r}")

    @property
    def hanging(self) -> int:
        """How many operations hang."""
        return len(self._hanging)

    def release_hanging(self) -> int:
        """Let all operations that hang go on; returns how many."""
        released, self._hanging = self._hanging, []
        for request in released:
            self._schedule(request, self.latency + request.delay)
        return len(released)

    # The loop

    def run(self, device: int, *, control: socket.socket | None, stop: int, on_ready: Callable[[], None]) -> None:
        """Serve the mount until it is unmounted or `stop` is readable.

        Args:
            device: from `mounting.mount`; the caller closes it, as it closes `control` and `stop`.
            control: a listening Unix socket.
            on_ready: called once, when the mount answers.
        """
        self._device = device
        self._on_ready = on_ready
        watched: list[Any] = [device, stop, *([control] if control else [])]
        try:
            while True:
                timeout = max(0.0, self._heap[0][0] - time.monotonic()) if self._heap else None
                readable, _, _ = select.select(watched, [], [], timeout)
                if stop in readable or (device in readable and not self._drain()):
                    return
                if control in readable and control is not None:
                    self._serve_control(control)
                self._carry_out_due()
        finally:
            self._tree.close()

    def _drain(self) -> bool:
        """Take in what the kernel asks. False if it is over."""
        for _ in range(_DRAIN):
            try:
                message = os.read(self._device, abi.FUSE_MIN_READ_BUFFER)
            except BlockingIOError:
                return True
            except OSError as exc:
                if exc.errno == errno.ENODEV:
                    return False
                if exc.errno in (errno.ENOENT, errno.EINTR):
                    continue
                raise
            self._take(message)
        return True

    def _take(self, message: bytes) -> None:
        _, opcode, unique, node, *_ = abi.IN_HEADER.unpack_from(message)
        if opcode in self._tree.answers or opcode == abi.FUSE_READ:
            request = _Request(unique, opcode, node, message)
            if opcode == abi.FUSE_GETXATTR and self._answer_stats(request):
                return
            self._count(opcode)
            try:
                self._admit(request)
            except OSError as exc:
                self._reply_error(unique, exc.errno or errno.EIO)
        else:
            self._take_free(opcode, unique, node, message)

    def _take_free(self, opcode: int, unique: int, node: int, message: bytes) -> None:
        """What costs nothing and cannot fail."""
        if opcode == abi.FUSE_FORGET:
            self._tree.forget(node, abi.FORGET_IN.unpack_from(message, abi.BODY)[0])
        elif opcode == abi.FUSE_BATCH_FORGET:
            for one, count in abi.unpack_batch_forget(message):
                self._tree.forget(one, count)
        elif opcode == abi.FUSE_INTERRUPT:
            self._interrupt(abi.INTERRUPT_IN.unpack_from(message, abi.BODY)[0])
        elif opcode in (abi.FUSE_RELEASE, abi.FUSE_RELEASEDIR):
            self._tree.release(abi.RELEASE_IN.unpack_from(message, abi.BODY)[0])
            self._reply(unique, b"")
        elif opcode == abi.FUSE_INIT:
            self._reply(unique, _answer_init(message))
            self._on_ready()
        elif opcode == abi.FUSE_DESTROY:
            self._reply(unique, b"")
        elif opcode not in abi.WITHOUT_REPLY:
            self._reply_error(unique, errno.EROFS if opcode in abi.MODIFYING else errno.ENOSYS)

    def _count(self, opcode: int) -> None:
        if opcode == abi.FUSE_READ:
            self.counters.reads += 1
        elif opcode in (abi.FUSE_LOOKUP, abi.FUSE_GETATTR):
            self.counters.stats += 1
        elif opcode == abi.FUSE_OPEN:
            self.counters.opens += 1
        elif opcode == abi.FUSE_OPENDIR:
            self.counters.listings += 1

    def _answer_stats(self, request: _Request) -> bool:
        message = request.message
        is_stats = request.node == abi.FUSE_ROOT_ID and message.endswith(b"\0" + STATS_XATTR + b"\0")
        if is_stats:
            try:
                self._reply(request.unique, sized(message, json.dumps(asdict(self.counters)).encode()))
            except OSError as exc:
                self._reply_error(request.unique, exc.errno or errno.EIO)
        return is_stats

    def _admit(self, request: _Request) -> None:
        path = self._tree.path(request.opcode, request.node, request.message)
        offset = size = 0
        if request.opcode == abi.FUSE_READ:
            _, offset, size, *_ = abi.READ_IN.unpack_from(request.message, abi.BODY)
        verdict = self.before_operation(abi.OPCODE_NAMES[request.opcode], path, offset, size)
        self._pending[request.unique] = request
        if verdict is None:
            self._schedule(request, self.latency)
            return
        request.error, request.limit, request.delay = verdict.error, verdict.limit, verdict.delay
        if verdict.hangs:
            self._hanging.append(request)
        else:
            self._schedule(request, self.latency + request.delay)

    def _schedule(self, request: _Request, delay: float) -> None:
        self._push(request, time.monotonic() + delay)

    def _push(self, request: _Request, due: float) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (due, self._sequence, request))

    def _interrupt(self, unique: int) -> None:
        request = self._pending.pop(unique, None)
        if request is not None:
            request.is_gone = True
            if request in self._hanging:
                self._hanging.remove(request)
            self._reply_error(unique, errno.EINTR)

    def _carry_out_due(self) -> None:
        heap = self._heap
        now = time.monotonic()
        while heap and heap[0][0] <= now:
            request = heapq.heappop(heap)[2]
            if request.is_gone:
                continue
            try:
                self._carry_out(request, now)
            except OSError as exc:
                self._finish_error(request, exc.errno or errno.EIO)
            except Exception:
                traceback.print_exc(file=sys.stderr)
                self._finish_error(request, errno.EIO)

    def _carry_out(self, request: _Request, now: float) -> None:
        if request.error:
            self._finish_error(request, request.error)
        elif request.opcode == abi.FUSE_READ:
            self._read(request, now)
        else:
            body = self._tree.answers[request.opcode](request.node, request.message)
            del self._pending[request.unique]
            self._reply(request.unique, body)

    def _read(self, request: _Request, now: float) -> None:
        fh, offset, size, *_ = abi.READ_IN.unpack_from(request.message, abi.BODY)
        if request.size < 0:
            request.size = self._tree.available(fh, offset, size if request.limit is None else min(size, request.limit))
            if self.bandwidth:
                self._paid_until = max(self._paid_until, now - BURST) + request.size / self.bandwidth
                if self._paid_until > now:
                    self._push(request, self._paid_until)
                    return
        view = self._buffer[: request.size]
        view = view[: self._tree.read(fh, offset, view)]
        del self._pending[request.unique]
        self.counters.bytes += len(view)
        self._reply(request.unique, view)

    def _finish_error(self, request: _Request, code: int) -> None:
        self._pending.pop(request.unique, None)
        self._reply_error(request.unique, code)

    def _reply(self, unique: int, body: "bytes | memoryview") -> None:
        self._write([abi.OUT_HEADER.pack(16 + len(body), 0, unique), body])

    def _reply_error(self, unique: int, code: int) -> None:
        self._write([abi.pack_error(unique, code)])

    def _write(self, parts: "list[bytes | memoryview]") -> None:
        try:
            os.writev(self._device, parts)
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENODEV):  # the request, or the mount, is gone
                raise

    def _serve_control(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(_CONTROL_TIMEOUT)
                line = b""
                while not line.endswith(b"\n") and len(line) < _CONTROL_LIMIT:
                    part = connection.recv(65536)
                    if not part:
                        return
                    line += part
                try:
                    answer = self.control(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError, struct.error) as exc:
                    answer = {"error": f"{type(exc).__name__}: {exc}"}
                connection.sendall(json.dumps(answer).encode() + b"\n")


def _answer_init(message: bytes) -> bytes:
    offer = abi.unpack_init(message)
    wanted = (
        abi.FUSE_ASYNC_READ
        | abi.FUSE_ASYNC_DIO
        | abi.FUSE_AUTO_INVAL_DATA
        | abi.FUSE_PARALLEL_DIROPS
        | abi.FUSE_MAX_PAGES
        | abi.FUSE_INIT_EXT
        | abi.FUSE_DIRECT_IO_ALLOW_MMAP
    )
    return abi.pack_init_out(
        minor=min(offer.minor, abi.FUSE_KERNEL_MINOR_VERSION),
        max_readahead=offer.max_readahead,
        flags=offer.flags & wanted,
        max_background=64,
        congestion_threshold=48,
        max_pages=MAX_READ_PAGES,
    )
