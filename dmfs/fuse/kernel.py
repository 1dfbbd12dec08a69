"""The kernel front end: our own session on /dev/fuse. Converts messages only; what the tree looks like is decided in
operations.py.

One trio task waits until the device is readable, drains it, and answers at once, in plain synchronous code, what
memory can answer. Only what must wait gets a task of its own, which an INTERRUPT cancels. Every handler runs under
one guard: an expected error becomes its errno, a surprise is logged once, counted and answered EIO, and the mount
lives on.

How bytes get to readers is agreed on once, when the kernel says hello (`io_mode.py`). By passthrough, an open hands the
kernel the copy (`passthrough.py`); in pagecache mode the first OPEN is answered ENOSYS, after which the kernel sends no
OPEN and RELEASE any more, and a READ has the node for its handle. What the kernel is told unasked goes by way of
`notifier.py`, never from here.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import trio

from dmfs.errors import FuseUnavailable, StaleFile, to_errno
from dmfs.fuse import abi, io_mode
from dmfs.fuse.interrupts import CHECK_INTERVAL, PATIENCE, is_dying
from dmfs.fuse.notifier import ChangedNames, Notifier
from dmfs.fuse.operations import Operations
from dmfs.fuse.passthrough import BY_MESSAGES, Passthrough, Probe
from dmfs.types import AskedIo, DirEntry, Entry, MiB

MAX_READ = 1 * MiB  # bytes of one READ; the kernel's own limit with 4 KiB pages
MAX_PAGES = MAX_READ // 4096
LEAST_MINOR = 31  # protocol 7.31, Linux 5.4
MAX_BACKGROUND = 64  # readahead requests the kernel keeps in flight; each that waits holds a buffer of its size here
DRAIN_LIMIT = 64  # messages answered before other tasks get a turn
LINGER = 50e-6  # seconds to look for the next message before sleeping: to be woken takes as long as to answer three
END_LIMIT = 2.0  # seconds the end of a session waits for a notice that is being given

_WANTED = (
    abi.FUSE_ASYNC_READ
    | abi.FUSE_DO_READDIRPLUS
    | abi.FUSE_READDIRPLUS_AUTO
    | abi.FUSE_ASYNC_DIO
    | abi.FUSE_PARALLEL_DIROPS
    | abi.FUSE_MAX_PAGES
    | abi.FUSE_CACHE_SYMLINKS  # right because a changed link is a new node
    | abi.FUSE_NO_OPEN_SUPPORT
)

# Answered ENOSYS, after which the kernel does not ask again for most of them, and does by itself what is right for
# this file system.
_UNSUPPORTED = (
    abi.FUSE_FLUSH,
    abi.FUSE_FSYNC,
    abi.FUSE_FSYNCDIR,
    abi.FUSE_GETXATTR,
    abi.FUSE_LISTXATTR,
    abi.FUSE_ACCESS,
    abi.FUSE_BMAP,
    abi.FUSE_POLL,
    abi.FUSE_GETLK,
    abi.FUSE_SETLK,
    abi.FUSE_SETLKW,
    abi.FUSE_STATX,
    abi.FUSE_SYNCFS,
)


class _Answer(NamedTuple):
    """The body of a reply, and what to take back if the kernel does not want it any more."""

    body: bytes | memoryview
    undo: Callable[[], None] | None = None


class _Later(NamedTuple):
    """The answer has to wait: the coroutine function that will give it."""

    start: Callable[[], Coroutine[Any, Any, _Answer]]


class _Request(NamedTuple):
    """One that waits: which thread made it and when (trio's clock), what ends it, and where its tasks run."""

    pid: int
    started: float
    scope: trio.CancelScope
    nursery: trio.Nursery


_KEPT = abi.FOPEN_KEEP_CACHE | abi.FOPEN_NOFLUSH
"""How a file is opened that is read by messages.

A node is one version of a file, so the kernel's pages of it are right for as long as it lives.
"""

_Handler = Callable[[int, bytes], "_Answer | _Later | None"]
_EMPTY = _Answer(b"")


class KernelSession:
    """One connection to the kernel. Owns the descriptor, and closes it when `run` ends.

    Attributes:
        io_mode: how bytes get to readers, and why so; None until the kernel has agreed on a protocol.
        passthrough: the backing ids, in that mode.
        notifier: tells the kernel what it did not ask.
    """

    def __init__(
        self,
        fd: int,
        operations: Operations,
        *,
        io: AskedIo = "plain",
        probes: Sequence[Probe] = (),
        readahead: int = 0,
    ) -> None:
        """Takes over `fd`.

        Args:
            io: the mode that is asked for.
            probes: a file of each tier, for passthrough.
            readahead: most bytes that the kernel may read ahead, as far as its own limit for the mount allows.
        """
        self.io_mode: io_mode.IoMode | None = None
        self.passthrough: Passthrough | None = None
        self._fd = fd
        self._operations = operations
        self._asked_io = io
        self._probes = list(probes)
        self._readahead = readahead
        self.notifier = Notifier(fd, is_being_read=self._is_being_read, errors=operations.errors)
        self._reading: dict[int, int] = {}  # by node: READs that wait
        self._looking_up: dict[int, int] = {}  # by directory: LOOKUPs that wait
        self._changed_names = ChangedNames(self.notifier, is_looked_into=lambda node: node in self._looking_up)
        self._requests: dict[int, _Request] = {}  # those that wait, by their `unique`
        self._data = memoryview(bytearray(MAX_READ))  # for READs that are answered at once
        self._is_initialized = trio.Event()
        self._handlers: dict[int, _Handler] = {
            abi.FUSE_LOOKUP: self._lookup,
            abi.FUSE_FORGET: self._forget,
            abi.FUSE_BATCH_FORGET: self._batch_forget,
            abi.FUSE_GETATTR: self._getattr,
            abi.FUSE_READLINK: self._readlink,
            abi.FUSE_OPEN: self._open,
            abi.FUSE_READ: self._read,
            abi.FUSE_LSEEK: self._lseek,
            abi.FUSE_RELEASE: self._release,
            abi.FUSE_OPENDIR: self._opendir,
            abi.FUSE_READDIR: partial(self._readdir, is_plus=False),
            abi.FUSE_READDIRPLUS: partial(self._readdir, is_plus=True),
            abi.FUSE_RELEASEDIR: self._releasedir,
            abi.FUSE_STATFS: self._statfs,
            abi.FUSE_INIT: self._init,
            abi.FUSE_INTERRUPT: self._interrupt,
            abi.FUSE_DESTROY: lambda node, message: _EMPTY,
            abi.FUSE_IOCTL: partial(_refuse, errno.ENOTTY),
            **{opcode: partial(_refuse, errno.ENOSYS) for opcode in _UNSUPPORTED},
            **{opcode: partial(_refuse, errno.EROFS) for opcode in abi.MODIFYING},
        }

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until unmounted or cancelled; started once the kernel has agreed on a protocol.

        Raises:
            FuseUnavailable: the kernel is too old, or cannot do what `io` asks for.
        """
        self._operations.on_name_changed = self._changed_names.add
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._announce, task_status)
                nursery.start_soon(self.notifier.run)
                nursery.start_soon(self._changed_names.run)
                while self._serve_burst(nursery):
                    await trio.lowlevel.wait_readable(self._fd)
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + END_LIMIT):
                await self._end()
            if self.passthrough is not None:
                self.passthrough.end()
            if self.notifier.idle.is_set():  # else its thread is stuck in the descriptor, which ends with the process
                os.close(self._fd)

    async def _announce(self, task_status: "trio.TaskStatus[None]") -> None:
        await self._is_initialized.wait()
        task_status.started()

    def _serve_burst(self, nursery: trio.Nursery) -> bool:
        """Answer what is there, and what comes right behind it. False once unmounted.

        A reader that opens one small file after the other asks again sooner than this task could be woken. Where
        somebody waits for an answer, other tasks are to get their turn instead.
        """
        until = 0.0
        for _ in range(DRAIN_LIMIT):
            while True:
                try:
                    message = os.read(self._fd, abi.FUSE_MIN_READ_BUFFER)
                    break
                except BlockingIOError:
                    now = perf_counter()
                    until = until or now + LINGER
                    if now >= until or self._requests:
                        return True
                except OSError as exc:
                    if exc.errno in (errno.ENOENT, errno.EINTR):  # that request is gone
                        continue
                    if exc.errno in (errno.ENODEV, errno.ECONNABORTED):
                        return False
                    raise
            until = 0.0
            if not message:  # a closed socket, where one stands for the device
                return False
            self._dispatch(message, nursery)
        return True

    async def _end(self) -> None:
        """Nobody is answered any more. A notice may wait for an answer, so all are refused until it is through."""
        self.notifier.stop()
        while not self.notifier.idle.is_set():
            with contextlib.suppress(OSError):
                message = os.read(self._fd, abi.FUSE_MIN_READ_BUFFER)
                unique = abi.IN_HEADER.unpack_from(message)[2]
                self._write(abi.pack_error(unique, errno.ENOTCONN))
                continue
            with trio.move_on_after(0.01):
                await self.notifier.idle.wait()

    def _dispatch(self, message: bytes, nursery: trio.Nursery) -> None:
        try:
            _, opcode, unique, node, _, _, pid, *_ = abi.IN_HEADER.unpack_from(message)
        except abi.ProtocolError as exc:
            self._operations.errors.add("a message from the kernel without a whole header", exc)
            return
        handler = self._handlers.get(opcode)
        if handler is None:
            self._unknown(opcode, unique)
            return
        try:
            answer = handler(node, message)
        except FuseUnavailable:
            self._write(abi.pack_error(unique, errno.EPROTO))
            raise
        except Exception as exc:
            self._fail(opcode, unique, exc)
            return
        if isinstance(answer, _Answer):
            self._reply(unique, answer)
        elif answer is not None:
            request = self._requests[unique] = _Request(pid, trio.current_time(), trio.CancelScope(), nursery)
            nursery.start_soon(self._answer_later, opcode, unique, request.scope, answer)

    async def _answer_later(self, opcode: int, unique: int, scope: trio.CancelScope, later: _Later) -> None:
        try:
            with scope:
                answer = await later.start()
        except trio.Cancelled:  # the session ends
            self._write(abi.pack_error(unique, errno.ENOTCONN))
            raise
        except Exception as exc:
            self._fail(opcode, unique, exc)
        else:
            if scope.cancelled_caught:
                self._write(abi.pack_error(unique, errno.EINTR))
            else:
                self._reply(unique, answer)
        finally:
            del self._requests[unique]

    # ---- replies

    def _reply(self, unique: int, answer: _Answer) -> None:
        body = answer.body
        header = abi.OUT_HEADER.pack(abi.OUT_HEADER.size + len(body), 0, unique)
        is_taken = self._write(header + body) if isinstance(body, bytes) else self._write(header, body)
        if not is_taken and answer.undo is not None:
            answer.undo()

    def _write(self, *parts: bytes | memoryview) -> bool:
        """Send a reply. False if the kernel does not want it: interrupted, or unmounted."""
        try:
            if len(parts) == 1:
                os.write(self._fd, parts[0])
            else:
                os.writev(self._fd, parts)
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENODEV, errno.ECONNABORTED, errno.EPIPE):
                self._operations.errors.add(f"the kernel refused a reply: {exc.strerror}", exc)
            return False
        return True

    def _fail(self, opcode: int, unique: int, exc: Exception) -> None:
        """The guard: what the reader is told of an exception."""
        code = to_errno(exc)
        if code is None:
            name = abi.OPCODE_NAMES.get(opcode, str(opcode))
            self._operations.metrics.surprises += 1
            self._operations.errors.add(
                f"fault in {name}: {exc!r}", exc, kind=f"{name} {type(exc).__name__} {_origin(exc)}"
            )
            code = errno.EIO
        if opcode not in abi.WITHOUT_REPLY:
            self._write(abi.pack_error(unique, code))

    def _unknown(self, opcode: int, unique: int) -> None:
        if opcode not in abi.WITHOUT_REPLY:
            self._operations.errors.add(f"the kernel sent an unknown operation, {opcode}")
            self._write(abi.pack_error(unique, errno.ENOSYS))

    # ---- the connection

    def _init(self, node: int, message: bytes) -> None:
        offer = abi.unpack_init(message)
        if offer.major != abi.FUSE_KERNEL_VERSION or offer.minor < LEAST_MINOR:
            raise FuseUnavailable(
                f"this kernel speaks FUSE {offer.major}.{offer.minor}; "
                f"dmfs needs {abi.FUSE_KERNEL_VERSION}.{LEAST_MINOR} or later (Linux 5.4)"
            )
        flags = offer.flags & _WANTED
        if io_mode.wants_passthrough(self._asked_io):
            flags |= offer.flags & abi.FUSE_PASSTHROUGH
        answer = abi.pack_init_out(
            minor=min(offer.minor, abi.FUSE_KERNEL_MINOR_VERSION),
            max_readahead=max(offer.max_readahead, self._readahead),
            flags=flags,
            max_background=MAX_BACKGROUND,
            congestion_threshold=MAX_BACKGROUND * 3 // 4,
            max_pages=MAX_PAGES,
            max_stack_depth=1 if flags & abi.FUSE_PASSTHROUGH else 0,  # with 2 no overlay could be put over the mount
        )
        self._reply(abi.IN_HEADER.unpack_from(message)[2], _Answer(answer))
        # Only now can the kernel be asked about the tiers. No other message has come yet.
        self._choose_io(offer.flags)
        self._is_initialized.set()

    def _choose_io(self, offered: int) -> None:
        passthrough = None
        if io_mode.wants_passthrough(self._asked_io):
            passthrough = Passthrough(
                self._fd,
                self._operations.manager,
                errors=self._operations.errors,
                handed=self._operations.metrics.kernel,
            )
            if offered & abi.FUSE_PASSTHROUGH:
                passthrough.try_tiers(self._probes)
            else:
                passthrough.refusal = io_mode.NOT_OFFERED
        self._probes.clear()
        self.io_mode = io_mode.choose(
            self._asked_io, passthrough, can_omit_open=bool(offered & abi.FUSE_NO_OPEN_SUPPORT)
        )
        if self.io_mode.name == "passthrough":
            assert passthrough is not None
            self.passthrough = passthrough
            self._operations.manager.hands_copies_over = True
        elif self.io_mode.name == "pagecache":
            self._handlers[abi.FUSE_OPEN] = partial(_refuse, errno.ENOSYS)
            self._operations.keep_superseded()
            self._operations.manager.drops_served_pages = True

    def _interrupt(self, node: int, message: bytes) -> None:
        unique = abi.INTERRUPT_IN.unpack_from(message, abi.BODY)[0]
        request = self._requests.get(unique)
        if request is not None:  # else it has been answered meanwhile
            request.nursery.start_soon(self._end_interrupted, unique, request)

    async def _end_interrupted(self, unique: int, request: "_Request") -> None:
        """Cancel a request whose process is dying, or which hangs anyway; look again until it is answered."""
        while self._requests.get(unique) is request:
            if is_dying(request.pid) or trio.current_time() - request.started > PATIENCE:
                request.scope.cancel()
                return
            await trio.sleep(CHECK_INTERVAL)

    def _statfs(self, node: int, message: bytes) -> _Answer | _Later:
        st = self._operations.statfs_nowait()
        return _Later(self._statfs_later) if st is None else _Answer(abi.pack_statfs(st))

    async def _statfs_later(self) -> _Answer:
        return _Answer(abi.pack_statfs(await self._operations.statfs()))

    # ---- names and attributes

    def _lookup(self, node: int, message: bytes) -> _Answer | _Later:
        name = abi.unpack_name(message)
        entry = self._operations.lookup_nowait(node, name)
        return self._entry(entry) if entry is not None else _Later(partial(self._lookup_later, node, name))

    async def _lookup_later(self, node: int, name: bytes) -> _Answer:
        with _counted(self._looking_up, node):
            return self._entry(await self._operations.lookup(node, name))

    def _entry(self, entry: Entry) -> _Answer:
        node, attributes, ttl = entry
        if not node:
            return _Answer(abi.pack_negative_entry(ttl))
        return _Answer(abi.pack_entry(node, attributes, ttl, ttl), partial(self._operations.forget, node, 1))

    def _forget(self, node: int, message: bytes) -> None:
        self._operations.forget(node, abi.FORGET_IN.unpack_from(message, abi.BODY)[0])

    def _batch_forget(self, node: int, message: bytes) -> None:
        for forgotten, count in abi.unpack_batch_forget(message):
            try:
                self._operations.forget(forgotten, count)
            except Exception as exc:  # the others must be forgotten all the same, or they leak
                self._fail(abi.FUSE_BATCH_FORGET, 0, exc)

    def _getattr(self, node: int, message: bytes) -> _Answer | _Later:
        known = self._operations.getattr_nowait(node)
        return _Later(partial(self._getattr_later, node)) if known is None else _Answer(abi.pack_attr(*known))

    async def _getattr_later(self, node: int) -> _Answer:
        return _Answer(abi.pack_attr(*await self._operations.getattr(node)))

    def _readlink(self, node: int, message: bytes) -> _Later:
        return _Later(partial(self._readlink_later, node))

    async def _readlink_later(self, node: int) -> _Answer:
        return _Answer(await self._operations.readlink(node))

    # ---- files

    def _open(self, node: int, message: bytes) -> _Answer | _Later:
        handle = self._operations.open_nowait(node)
        if handle is None:
            return _Later(partial(self._open_later, node))
        if self.passthrough is None:
            return self._opened(node, handle, BY_MESSAGES)
        backing_id = self.passthrough.open_nowait(node, self._operations.file_of(handle))
        if backing_id is None:
            return _Later(partial(self._hand_over_later, node, handle))
        return self._opened(node, handle, backing_id)

    async def _open_later(self, node: int) -> _Answer:
        handle = await self._operations.open(node)
        if self.passthrough is None:
            return self._opened(node, handle, BY_MESSAGES)
        return await self._hand_over_later(node, handle)

    async def _hand_over_later(self, node: int, handle: int) -> _Answer:
        assert self.passthrough is not None
        try:
            backing_id = await self.passthrough.open(node, self._operations.file_of(handle))
        except BaseException:
            self._operations.release(handle)
            raise
        return self._opened(node, handle, backing_id)

    def _opened(self, node: int, handle: int, backing_id: int) -> _Answer:
        flags = _KEPT if backing_id == BY_MESSAGES else abi.FOPEN_PASSTHROUGH | abi.FOPEN_NOFLUSH
        return _Answer(abi.OPEN_OUT.pack(handle, flags, backing_id), partial(self._close, node, handle))

    def _release(self, node: int, message: bytes) -> _Answer:
        self._close(node, abi.RELEASE_IN.unpack_from(message, abi.BODY)[0])
        return _EMPTY

    def _close(self, node: int, handle: int) -> None:
        if self.passthrough is not None:
            self.passthrough.close(node)
        self._operations.release(handle)

    def _read(self, node: int, message: bytes) -> _Answer | _Later:
        handle, offset, size, *_ = abi.READ_IN.unpack_from(message, abi.BODY)
        count = self._operations.read_nowait(handle, offset, self._data[:size], node=node)
        if count is not None:
            return _Answer(self._data[:count])
        return _Later(partial(self._read_later, node, handle, offset, min(size, MAX_READ)))

    async def _read_later(self, node: int, handle: int, offset: int, size: int) -> _Answer:
        view = memoryview(bytearray(size))
        with _counted(self._reading, node):
            try:
                return _Answer(view[: await self._operations.read(handle, offset, view, node=node)])
            except StaleFile:
                # Whoever opens the name next is to see the new version, and does where the kernel asks at each open.
                await self._changed_names.wait_told()
                raise

    def _is_being_read(self, node: int) -> bool:
        return node in self._reading

    def _lseek(self, node: int, message: bytes) -> _Later:
        handle, offset, whence, _ = abi.LSEEK_IN.unpack_from(message, abi.BODY)
        return _Later(partial(self._lseek_later, node, handle, offset, whence))

    async def _lseek_later(self, node: int, handle: int, offset: int, whence: int) -> _Answer:
        return _Answer(abi.LSEEK_OUT.pack(await self._operations.lseek(handle, offset, whence, node=node)))

    # ---- directories

    def _opendir(self, node: int, message: bytes) -> _Answer:
        handle = self._operations.opendir(node)
        return _Answer(abi.OPEN_OUT.pack(handle, 0, 0), partial(self._operations.releasedir, handle))

    def _releasedir(self, node: int, message: bytes) -> _Answer:
        self._operations.releasedir(abi.RELEASE_IN.unpack_from(message, abi.BODY)[0])
        return _EMPTY

    def _readdir(self, node: int, message: bytes, *, is_plus: bool) -> _Answer | _Later:
        handle, index, size, *_ = abi.READ_IN.unpack_from(message, abi.BODY)
        size = min(size, MAX_READ)
        if is_plus and index:
            self._operations.advise_attributes(handle, index)
        count = size // abi.dirent_size(b".") + 1  # more never fit
        entries = self._operations.readdir_nowait(handle, index, count)
        if entries is None:
            return _Later(partial(self._readdir_later, handle, index, size, count, is_plus))
        return self._pack_entries(handle, entries, index, size, is_plus)

    async def _readdir_later(self, handle: int, index: int, size: int, count: int, is_plus: bool) -> _Answer:
        entries = await self._operations.readdir(handle, index, count)
        return self._pack_entries(handle, entries, index, size, is_plus)

    def _pack_entries(self, handle: int, entries: list[DirEntry], index: int, size: int, is_plus: bool) -> _Answer:
        overhead = abi.ENTRY_OUT.size if is_plus else 0
        packed: list[bytes] = []
        told: list[int] = []  # nodes that the kernel will count a look-up for
        for name, ino, kind in entries:
            size -= overhead + abi.dirent_size(name)
            if size < 0:
                break
            index += 1
            record = abi.pack_dirent(ino, index, kind, name)
            if is_plus:
                try:
                    record = self._plus(handle, name, told) + record
                except BaseException:
                    self._untell(told)
                    raise
            packed.append(record)
        return _Answer(b"".join(packed), partial(self._untell, told) if told else None)

    def _plus(self, handle: int, name: bytes, told: list[int]) -> bytes:
        """The attributes of a name, if they are known: a listing costs the source no stat."""
        entry = self._operations.known_entry(handle, name)
        if entry is None or not entry.node:
            return abi.NULL_ENTRY
        told.append(entry.node)
        return abi.pack_entry(entry.node, entry.attributes, entry.ttl, entry.ttl)

    def _untell(self, nodes: list[int]) -> None:
        for node in nodes:
            self._operations.forget(node, 1)


@contextlib.contextmanager
def _counted(counts: dict[int, int], node: int) -> Iterator[None]:
    """Count one more for a node inside the block."""
    counts[node] = counts.get(node, 0) + 1
    try:
        yield
    finally:
        counts[node] -= 1
        if not counts[node]:
            del counts[node]


def _refuse(code: int, node: int, message: bytes) -> _Answer:
    raise OSError(code, os.strerror(code))


def _origin(exc: Exception) -> str:
    """Where an exception was raised, which tells one surprise from another."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
