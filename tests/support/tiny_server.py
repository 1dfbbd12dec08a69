"""The smallest file system that can be mounted: one file, answered by a thread. Nothing of dmfs but its structures."""

import errno
import os
import select
import stat
import struct
import threading

from dmfs.fuse import abi

ATTRIBUTES = struct.Struct("=QQQqqqIIIIIIIIII")  # struct fuse_attr


class TinyServer:
    """Answers a mount whose root holds one file `f` of 4 KiB, in a thread, until it is unmounted or aborted."""

    def __init__(self, fd: int, *, is_mute: bool = False) -> None:
        self.fd = fd
        self.is_mute = is_mute  # INIT is answered, nothing else
        self.is_ready = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.is_ready.wait(10)

    def _run(self) -> None:
        try:
            while True:
                select.select([self.fd], [], [])
                try:
                    self._answer(os.read(self.fd, abi.FUSE_MIN_READ_BUFFER))
                except OSError as exc:
                    if exc.errno == errno.ENODEV:
                        return
                    if exc.errno not in (errno.EAGAIN, errno.ENOENT, errno.EINTR):
                        raise
        finally:
            os.close(self.fd)  # or a fault here would hang the test

    def _answer(self, message: bytes) -> None:
        _, opcode, unique, node, *_ = abi.IN_HEADER.unpack_from(message)
        if opcode in abi.WITHOUT_REPLY or (self.is_mute and opcode != abi.FUSE_INIT):
            return
        body = self._body(opcode, node, message)
        if body is None:
            os.write(self.fd, abi.pack_error(unique, errno.ENOSYS))
        else:
            os.write(self.fd, abi.OUT_HEADER.pack(16 + len(body), 0, unique) + body)
        if opcode == abi.FUSE_INIT:
            self.is_ready.set()

    def _body(self, opcode: int, node: int, message: bytes) -> bytes | None:
        if opcode == abi.FUSE_INIT:
            offer = abi.unpack_init(message)
            return abi.pack_init_out(
                minor=min(offer.minor, abi.FUSE_KERNEL_MINOR_VERSION),
                max_readahead=offer.max_readahead,
                flags=0,
                max_background=8,
                congestion_threshold=6,
            )
        if opcode == abi.FUSE_GETATTR:
            return abi.pack_attr(self._attributes(node), 3600)
        if opcode == abi.FUSE_LOOKUP:
            return abi.pack_entry(2, self._attributes(2), 3600, 3600)
        if opcode in (abi.FUSE_OPEN, abi.FUSE_OPENDIR):
            return abi.OPEN_OUT.pack(0, 0, 0)
        if opcode == abi.FUSE_READ:
            return b"x" * 4096
        if opcode == abi.FUSE_STATFS:
            return abi.pack_statfs(os.statvfs("/"))
        return b"" if opcode in (abi.FUSE_RELEASE, abi.FUSE_RELEASEDIR, abi.FUSE_FLUSH) else None

    @staticmethod
    def _attributes(node: int) -> bytes:
        mode = stat.S_IFDIR | 0o755 if node == 1 else stat.S_IFREG | 0o644
        return ATTRIBUTES.pack(node, 4096, 8, 0, 0, 0, 0, 0, 0, mode, 1, os.getuid(), os.getgid(), 0, 4096, 0)
