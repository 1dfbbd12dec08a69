"""FUSE passthrough (Linux 6.9): the kernel gets a local copy at open and reads it itself, without a message.

The kernel wants to be told at each open of an inode, and takes one answer only for as long as the inode is open:
messages, or passthrough with one backing id (fs/fuse/iomode.c). Anything else is EIO in the application. So the first
open of a node decides, by whether a copy is here, and the others follow it until the last release.

A backing id stands for an open file inside the kernel; it costs a system call to make, so it is kept when nobody uses
it any more. It holds the blocks of its copy, also of one that was unlinked: an idle id is closed when its copy is given
up, and one in use with its last open, to which the manager pins the copy. No I/O but ioctl(2) on the connection, which
waits for no disk.
"""

import contextlib
import errno
import fcntl
import os
from collections import OrderedDict
from typing import NamedTuple

from dmfs.errors import TierUnavailable
from dmfs.fuse import abi
from dmfs.log import ErrorLog
from dmfs.metrics import Handed
from dmfs.tiers.descriptors import Descriptor
from dmfs.tiers.manager import Manager, OpenCopy
from dmfs.types import DataFile, FileKey

MAX_IDLE = (
    16_384  # backing ids kept without a user; each holds an open file in the kernel (2 KB), and no descriptor of ours
)
BY_MESSAGES = 0  # in place of a backing id, which is never 0

_REFUSED_TO_MOUNT = {
    errno.EPERM: "this process lacks the capability CAP_SYS_ADMIN",
    errno.EOPNOTSUPP: "this kernel was built without it",
    errno.ENOTTY: "this kernel does not know it (Linux 6.9 and later do)",
}
"""Errors of the ioctl that every further one would give too."""


class Probe(NamedTuple):
    """An empty file on a tier, to ask the kernel whether it takes files from there."""

    tier: str
    descriptor: Descriptor


class _Backing:
    """A backing id, how many nodes are open by it, and whether its copy has been given up."""

    __slots__ = ("id", "is_gone", "key", "users")

    def __init__(self, backing_id: int, key: FileKey) -> None:
        self.id = backing_id
        self.key = key
        self.users = 0
        self.is_gone = False


class _OpenNode:
    """How a node is read for as long as it is open (no backing: by messages), and how many opens there are."""

    __slots__ = ("backing", "opens")

    def __init__(self, backing: _Backing | None) -> None:
        self.backing = backing
        self.opens = 1


class Passthrough:
    """The backing ids of one connection.

    Attributes:
        refusal: why the kernel takes no file at all, None if it does.
        refused_tiers: tiers whose files it does not take, and why.
    """

    def __init__(self, fd: int, manager: Manager, *, errors: ErrorLog, handed: Handed) -> None:
        """Nothing here closes `fd`, the connection; the ids end with it."""
        self.refusal: str | None = None
        self.refused_tiers: dict[str, str] = {}
        self._fd = fd
        self._manager = manager
        self._errors = errors
        self._handed = handed
        manager.on_copy_gone = self.give_up
        self._nodes: dict[int, _OpenNode] = {}
        self._backings: dict[FileKey, _Backing] = {}
        self._idle: OrderedDict[FileKey, _Backing] = OrderedDict()

    def statistics(self) -> dict[str, int]:
        """`{backing_ids, backing_ids_idle}`: how many are held, and how many of these nobody has open."""
        return {"backing_ids": len(self._backings), "backing_ids_idle": len(self._idle)}

    def try_tiers(self, probes: list[Probe]) -> None:
        """Ask the kernel about each tier, once the connection is initialized; fills in `refusal` or `refused_tiers`."""
        for probe in probes:
            backing_id = self._register(probe.tier, probe.descriptor)
            if backing_id:
                self._close_id(backing_id)
        if self.refusal is None and len(self.refused_tiers) == len(probes):
            self.refusal = "; ".join(f"not with {tier}: {why}" for tier, why in self.refused_tiers.items())

    def open_nowait(self, node: int, file: DataFile) -> int | None:
        """One more open of a node: its backing id, or BY_MESSAGES. `close` must follow.

        None if a disk must be asked first: nothing was done, call `open`.
        """
        opened = self._nodes.get(node)
        if opened is not None:
            return self._join(opened, file)
        backing = self._backings.get(file.key)
        if backing is None and self.refusal is None and self._manager.has_copy(file.key):
            copy = self._manager.open_copy_nowait(file)
            if copy is None:
                return None
            backing = self._make(file.key, copy)
        return self._begin(node, file, backing)

    async def open(self, node: int, file: DataFile) -> int:
        """As `open_nowait`."""
        copy = None
        with contextlib.suppress(TierUnavailable):  # logged by the manager; the reads will find another way
            copy = await self._manager.open_copy(file)
        opened = self._nodes.get(node)  # somebody else may have been first meanwhile
        if opened is not None:
            return self._join(opened, file)
        backing = self._backings.get(file.key)
        if backing is None and copy is not None and self._manager.has_copy(file.key):
            backing = self._make(file.key, copy)
        return self._begin(node, file, backing)

    def _join(self, opened: _OpenNode, file: DataFile) -> int:
        opened.opens += 1
        return self._count(opened.backing, file)

    def _begin(self, node: int, file: DataFile, backing: _Backing | None) -> int:
        self._nodes[node] = _OpenNode(backing)
        if backing is not None:
            if not backing.users:
                self._idle.pop(backing.key, None)
            backing.users += 1
        return self._count(backing, file)

    def _count(self, backing: _Backing | None, file: DataFile) -> int:
        if backing is None:
            return BY_MESSAGES
        self._handed.opens += 1
        self._handed.file_bytes += file.version.size
        return backing.id

    def close(self, node: int) -> None:
        """Take back one open."""
        opened = self._nodes[node]
        opened.opens -= 1
        if opened.opens:
            return
        del self._nodes[node]
        backing = opened.backing
        if backing is None:
            return
        backing.users -= 1
        if backing.users:
            return
        if backing.is_gone:
            self._close_id(backing.id)
            return
        self._idle[backing.key] = backing
        if len(self._idle) > MAX_IDLE:
            self._drop(self._idle.popitem(last=False)[1])

    def end(self) -> None:
        """The connection is about to be closed, and the ids with it."""
        self._manager.on_copy_gone = lambda key: None

    def give_up(self, key: FileKey) -> None:
        """The copy of a key is gone from its tier: hold its blocks no longer than who has it open."""
        backing = self._backings.get(key)
        if backing is None:
            return
        if backing.users:
            backing.is_gone = True
            del self._backings[key]
        else:
            del self._idle[key]
            self._drop(backing)

    def _drop(self, backing: _Backing) -> None:
        del self._backings[backing.key]
        self._close_id(backing.id)

    def _make(self, key: FileKey, copy: OpenCopy) -> _Backing | None:
        tier = copy.store.path
        if tier in self.refused_tiers:
            return None
        backing_id = self._register(tier, copy.descriptor)
        if not backing_id:
            return None
        backing = self._backings[key] = _Backing(backing_id, key)
        self._idle[key] = backing
        return backing

    def _register(self, tier: str, descriptor: Descriptor) -> int:
        """FUSE_DEV_IOC_BACKING_OPEN: a backing id; 0 if the kernel does not take this file."""
        argument = bytearray(abi.BACKING_MAP.pack(descriptor.fd, 0, 0))  # mutable, or the id is not what is returned
        try:
            backing_id: int = fcntl.ioctl(self._fd, abi.FUSE_DEV_IOC_BACKING_OPEN, argument)
            return backing_id
        except OSError as exc:
            if exc.errno in _REFUSED_TO_MOUNT:
                self.refusal = _REFUSED_TO_MOUNT[exc.errno]
            elif exc.errno == errno.ELOOP:
                self.refused_tiers[tier] = "it is on a stacked file system, such as an overlay"
            else:
                reason = exc.strerror or os.strerror(errno.EIO)
                self._errors.add(f"the kernel did not take a copy on {tier} for passthrough: {reason}")
            return 0

    def _close_id(self, backing_id: int) -> None:
        try:
            fcntl.ioctl(self._fd, abi.FUSE_DEV_IOC_BACKING_CLOSE, abi.BACKING_ID.pack(backing_id))
        except OSError as exc:
            if exc.errno not in (errno.ENODEV, errno.ECONNABORTED, errno.EPERM):  # unmounted: it is closed already
                self._errors.add(f"the kernel did not let go of a backing id: {exc.strerror}")
