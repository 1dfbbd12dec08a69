"""Notices to the kernel: what is written, in which order, and that one that waits holds up nobody but the next one.

A socket pair stands for the connection. A full one makes a notice wait, as the kernel does while a READ is unanswered.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from dmfs.fuse import abi, notifier
from dmfs.fuse.notifier import ChangedNames, Notifier
from dmfs.log import ErrorLog
from dmfs.tiers.descriptors import Descriptor
from tests.support.files import KiB, MiB, content

LIMIT = 5.0  # seconds for any wait


@dataclass
class Connection:
    """Our end as the notifier has it, and the kernel's."""

    ours: socket.socket
    theirs: socket.socket
    reading: set[int] = field(default_factory=set)
    errors: ErrorLog = field(default_factory=ErrorLog)

    def notifier(self) -> Notifier:
        return Notifier(self.ours.fileno(), is_being_read=self.reading.__contains__, errors=self.errors)

    def received(self) -> tuple[int, bytes]:
        """The next notice: its code and body."""
        packet = self.theirs.recv(4 << 20)
        length, code, unique = abi.OUT_HEADER.unpack_from(packet)
        assert (length, unique) == (len(packet), 0)
        return code, packet[abi.OUT_HEADER.size :]


@pytest.fixture
def connection() -> Iterator[Connection]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        end.settimeout(LIMIT)
    ours.setblocking(True)
    with ours, theirs:
        yield Connection(ours, theirs)


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[int], Descriptor]:
    def make(size: int) -> Descriptor:
        (tmp_path / "copy").write_bytes(content(1, 0, size))
        return Descriptor(os.open(tmp_path / "copy", os.O_RDONLY))

    return make


@pytest.mark.parametrize("size", [1, 4096, 100 * KiB, MiB, 2 * MiB + 5])
async def test_a_file_is_pushed_whole_and_in_order(
    connection: Connection, nursery: trio.Nursery, copy: Callable[[int], Descriptor], size: int
) -> None:
    told = connection.notifier()
    nursery.start_soon(told.run)
    with trio.fail_after(LIMIT):
        assert await told.push(7, copy(size), size)
    got = b""
    while len(got) < size:
        code, body = connection.received()
        assert code == abi.FUSE_NOTIFY_STORE
        node, offset, length, padding = abi.NOTIFY_STORE_OUT.unpack_from(body)
        assert (node, offset, length, padding) == (7, len(got), len(body) - abi.NOTIFY_STORE_OUT.size, 0)
        got += body[abi.NOTIFY_STORE_OUT.size :]
    assert got == content(1, 0, size)


async def test_a_file_that_is_being_read_is_left_to_its_reader(
    connection: Connection, nursery: trio.Nursery, copy: Callable[[int], Descriptor]
) -> None:
    told = connection.notifier()
    nursery.start_soon(told.run)
    connection.reading.add(7)
    with trio.fail_after(LIMIT):
        assert not await told.push(7, copy(5), 5)
        assert await told.push(8, copy(5), 5)


async def test_a_copy_that_is_too_short_is_not_pushed(
    connection: Connection, nursery: trio.Nursery, copy: Callable[[int], Descriptor]
) -> None:
    told = connection.notifier()
    nursery.start_soon(told.run)
    with trio.fail_after(LIMIT):
        assert not await told.push(7, copy(5), 6)


async def test_a_name_is_forgotten(connection: Connection, nursery: trio.Nursery) -> None:
    told = connection.notifier()
    nursery.start_soon(told.run)
    with trio.fail_after(LIMIT):
        await told.forget_name(3, b"n\xff")
    code, body = connection.received()
    assert (code, body) == (abi.FUSE_NOTIFY_INVAL_ENTRY, abi.NOTIFY_INVAL_ENTRY_OUT.pack(3, 2, 0) + b"n\xff\0")


async def test_an_unmounted_kernel_is_no_fault_and_any_other_refusal_is_logged(
    connection: Connection, nursery: trio.Nursery, copy: Callable[[int], Descriptor]
) -> None:
    told = connection.notifier()
    nursery.start_soon(told.run)
    connection.theirs.close()
    with trio.fail_after(LIMIT):
        assert not await told.push(7, copy(5), 5)
    assert connection.errors.entries() == []
    broken = Notifier(copy(5).fd, is_being_read=lambda node: False, errors=connection.errors)  # not open for writing
    nursery.start_soon(broken.run)
    with trio.fail_after(LIMIT):
        assert not await broken.push(7, copy(5), 5)
    assert len(connection.errors.entries()) == 1


async def test_a_notice_that_waits_blocks_no_task_and_idle_tells_its_end(
    connection: Connection, nursery: trio.Nursery, copy: Callable[[int], Descriptor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "STORE_SIZE", 64 * KiB)
    size = 64 * MiB  # more than the socket holds
    told = connection.notifier()
    async with trio.open_nursery() as own:
        own.start_soon(told.run)
        own.start_soon(told.push, 7, copy(size), size)
        with trio.fail_after(LIMIT):
            while told.idle.is_set():
                await trio.lowlevel.checkpoint()
        own.cancel_scope.cancel()
    assert not told.idle.is_set(), "its thread is still in the kernel, so the connection must not be closed"
    told.stop()
    connection.theirs.setblocking(False)
    with trio.fail_after(LIMIT):
        while not told.idle.is_set():  # the kernel takes what it waited for
            with contextlib.suppress(BlockingIOError):
                connection.received()
            await trio.lowlevel.checkpoint()


async def test_names_wait_for_look_ups_in_their_directory(connection: Connection, nursery: trio.Nursery) -> None:
    told = connection.notifier()
    looked_into = {3}
    names = ChangedNames(told, is_looked_into=looked_into.__contains__)
    nursery.start_soon(told.run)
    nursery.start_soon(names.run)
    names.add(3, b"a")
    names.add(4, b"b")
    names.add(4, b"b")
    with trio.fail_after(LIMIT):
        assert await trio.to_thread.run_sync(connection.received) == (
            abi.FUSE_NOTIFY_INVAL_ENTRY,
            abi.NOTIFY_INVAL_ENTRY_OUT.pack(4, 1, 0) + b"b\0",
        )
        looked_into.clear()
        await names.wait_told()
    assert connection.received()[1].endswith(b"a\0")


async def test_nobody_waits_long_for_a_name(
    connection: Connection, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    names = ChangedNames(connection.notifier(), is_looked_into=lambda node: True)
    nursery.start_soon(names.run)
    names.add(3, b"a")
    began = trio.current_time()
    await names.wait_told()
    assert trio.current_time() - began == notifier.TELL_LIMIT
