"""What the kernel is told without having asked: file contents pushed into its page cache, names to be looked up anew.

The kernel makes such a notice wait while a READ of that page (or a LOOKUP in that directory) is unanswered, so the task
that answers must never give one. All of them are given here, one after the other, in one thread at a time, out of a
bounded queue. Whoever stops answering messages must wait for `idle` first, or abort the connection.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from dmfs.fuse import abi
from dmfs.log import ErrorLog
from dmfs.tiers.descriptors import Descriptor
from dmfs.types import MiB

if TYPE_CHECKING:
    import outcome

STORE_SIZE = 1 * MiB  # bytes of one NOTIFY_STORE: enough that the call's own cost is nothing
PUSH_SIZE = 32 * MiB  # bytes of a file pushed before other notices get a turn
QUEUE = 64  # notices waiting; whoever has more to push waits for a place
BATCH = 64  # notices given in one thread call, as a hand-over costs as much as pushing a small file
MAX_CHANGED_NAMES = 1024  # that wait to be told; of more the kernel hears when their TTL is over
TELL_LIMIT = 1.0  # seconds somebody waits for the kernel to be told
RETRY = 0.1  # seconds before the next look at a directory that is being looked into
GONE = (errno.ENOENT, errno.ENODEV, errno.ECONNABORTED, errno.EPIPE)  # the kernel has forgotten it, or is unmounted


@dataclass(slots=True)
class _Notice:
    give: Callable[[], bool]
    is_given: bool = False
    error: Exception | None = None
    done: trio.Event = field(default_factory=trio.Event)


class Notifier:
    """Gives notices on a connection, which belongs to somebody else.

    Attributes:
        idle: set while no thread is giving a notice; the connection may be closed only then, after `stop`.
    """

    def __init__(self, fd: int, *, is_being_read: Callable[[int], bool], errors: ErrorLog) -> None:
        """`is_being_read` tells whether a READ of a node is unanswered; it is called in the thread."""
        self.idle = trio.Event()
        self.idle.set()
        self._fd = fd
        self._is_being_read = is_being_read
        self._errors = errors
        self._send, self._receive = trio.open_memory_channel[_Notice](QUEUE)
        self._is_stopping = False
        self._buffer = mmap.mmap(-1, STORE_SIZE)

    async def run(self) -> None:
        """Give notices until cancelled; a thread may go on with one, see `idle`."""
        token = trio.lowlevel.current_trio_token()
        while True:
            await self._give_next(await self._receive.receive(), token)

    async def _give_next(self, first: _Notice, token: trio.lowlevel.TrioToken) -> None:
        # No part of `run`, whose frame would hold the last notices, with the copies they push, until the next one.
        batch = [first]
        while len(batch) < BATCH:
            try:
                batch.append(self._receive.receive_nowait())
            except trio.WouldBlock:
                break
        self.idle = trio.Event()
        trio.lowlevel.start_thread_soon(partial(self._give_all, batch), partial(self._deliver, token), "notifier")
        await self.idle.wait()
        for notice in batch:
            if notice.error is not None:
                self._errors.add(f"a notice to the kernel failed: {notice.error}", kind=repr(notice.error))
            notice.done.set()

    def _deliver(self, token: trio.lowlevel.TrioToken, result: "outcome.Outcome[None]") -> None:
        """In the thread, when it has given its notices."""
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(self.idle.set)

    def stop(self) -> None:
        """Give no further notice; the one that is being given ends when the kernel lets it."""
        self._is_stopping = True

    async def push(self, node: int, copy: Descriptor, size: int) -> bool:
        """Put the `size` bytes of a copy into the page cache of a node, as the whole of its file.

        False if that was not done: it is being read just now, or the kernel does not know the node any more, or the
        copy cannot be read. A cancelled caller leaves; the push may still happen.
        """
        for offset in range(0, size, PUSH_SIZE):
            end = min(offset + PUSH_SIZE, size)
            if not await self._give(partial(self._push, node, copy, offset, end)):
                return False
        return True

    async def forget_name(self, parent: int, name: bytes) -> None:
        """Have the kernel look up a name anew before it is used again. Waits until it will.

        No LOOKUP in that directory may be unanswered at the time of the call, or those to come would wait behind this.
        """
        await self._give(partial(self._write, abi.pack_inval_entry(parent, name)))

    async def _give(self, give: Callable[[], bool]) -> bool:
        notice = _Notice(give)
        await self._send.send(notice)
        await notice.done.wait()
        return notice.is_given

    # ---- in the thread

    def _give_all(self, batch: list[_Notice]) -> None:
        for notice in batch:
            if self._is_stopping:
                return
            try:
                notice.is_given = notice.give()
            except Exception as exc:  # told by `run`, and no reason to give no others
                notice.error = exc.with_traceback(None)

    def _push(self, node: int, copy: Descriptor, start: int, end: int) -> bool:
        """Blocks. In order, so that a reader who comes meanwhile finds the beginning first."""
        with memoryview(self._buffer) as buffer:
            for offset in range(start, end, STORE_SIZE):
                if self._is_stopping or self._is_being_read(node):
                    return False
                with buffer[: min(STORE_SIZE, end - offset)] as part:
                    if not _read_whole(copy, part, offset):
                        return False
                    if not self._write(abi.pack_store(node, offset, len(part)), part):
                        return False
        return True

    def _write(self, *parts: bytes | memoryview) -> bool:
        """Give a notice. False if the kernel knows the node or the name no more. Blocks, see above."""
        try:
            os.writev(self._fd, parts)
        except OSError as exc:
            if exc.errno in GONE:
                return False
            raise
        return True


class ChangedNames:
    """Names that lead elsewhere at the source before their TTL is over, to be looked up anew by the kernel.

    A notice is put off while a name of that directory is being looked up: it would wait for that answer, and every
    later look-up in the directory for the notice.
    """

    def __init__(self, notifier: Notifier, *, is_looked_into: Callable[[int], bool]) -> None:
        """`is_looked_into` tells whether a LOOKUP in a directory is unanswered."""
        self._notifier = notifier
        self._is_looked_into = is_looked_into
        self._names: dict[tuple[int, bytes], trio.Event] = {}  # the event is set when the kernel has been told
        self._something = trio.Event()

    def add(self, parent: int, name: bytes) -> None:
        """What the kernel knows of a name is not to be believed any more."""
        if len(self._names) < MAX_CHANGED_NAMES:
            self._names.setdefault((parent, name), trio.Event())
            self._something.set()

    async def wait_told(self) -> None:
        """Wait, for a moment at most, until the kernel has been told of all that were added."""
        with trio.move_on_after(TELL_LIMIT):
            for told in list(self._names.values()):
                await told.wait()

    async def run(self) -> None:
        """Tell the kernel until cancelled."""
        while True:
            await self._something.wait()
            for key, told in list(self._names.items()):
                if not self._is_looked_into(key[0]):
                    await self._notifier.forget_name(*key)
                    del self._names[key]
                    told.set()
            if self._names:
                await trio.sleep(RETRY)
            else:
                self._something = trio.Event()


def _read_whole(copy: Descriptor, view: memoryview, offset: int) -> bool:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(copy.fd, [view[done:]], offset + done)
        except OSError:
            return False
        if not count:
            return False
        done += count
    return True
