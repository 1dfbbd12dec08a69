"""The kernel front end message by message, with a socket in place of /dev/fuse: no mount, no privilege."""

import errno
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from dmfs.errors import FuseUnavailable
from dmfs.fuse import abi
from dmfs.fuse.kernel import KernelSession
from dmfs.fuse.passthrough import Probe
from dmfs.tiers.descriptors import Descriptor
from dmfs.types import AskedIo, unpack_attributes
from tests.operations.fake_operations import ROOT, FakeOperations, Rule

if TYPE_CHECKING:
    from dmfs.fuse.operations import Operations

FLAGS = abi.FUSE_ASYNC_READ | abi.FUSE_DO_READDIRPLUS | abi.FUSE_PARALLEL_DIROPS | abi.FUSE_MAX_PAGES
CONTENT = b"0123456789"
LIMIT = 5.0  # seconds for one answer; all of them come at once


class Kernel:
    """The other end of the socket: sends requests and takes replies, as the kernel does."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = trio.socket.from_stdlib_socket(end)
        self._last_unique = 0

    async def send(self, opcode: int, body: bytes = b"", *, node: int = ROOT) -> int:
        """Send a request. Returns its `unique`."""
        self._last_unique += 2
        length = abi.IN_HEADER.size + len(body)
        header = abi.IN_HEADER.pack(length, opcode, self._last_unique, node, 0, 0, 0, 0, 0)
        await self._socket.send(header + body)
        return self._last_unique

    async def send_raw(self, message: bytes) -> None:
        """Send something that need not be a message."""
        await self._socket.send(message)

    async def reply(self) -> tuple[int, int, bytes]:
        """The next reply: unique, errno or 0, body."""
        with trio.fail_after(LIMIT):
            packet = await self._socket.recv(2 << 20)
        length, error, unique = abi.OUT_HEADER.unpack_from(packet)
        assert length == len(packet)
        assert -4096 < error <= 0
        assert not error or length == abi.OUT_HEADER.size
        return unique, -error, packet[abi.OUT_HEADER.size :]

    async def ask(self, opcode: int, body: bytes = b"", *, node: int = ROOT) -> tuple[int, bytes]:
        """Send a request and take its reply, which must be the next one: errno or 0, body."""
        unique = await self.send(opcode, body, node=node)
        answered, error, answer = await self.reply()
        assert answered == unique
        return error, answer

    def close(self) -> None:
        """End the connection, as an unmount does."""
        self._socket.close()


def init_body(minor: int, flags: int = FLAGS, *, major: int = 7) -> bytes:
    """What a kernel of this protocol sends: 16 bytes up to 7.35, then 64."""
    low = abi._INIT_IN.pack(major, minor, 128 * 1024, flags & 0xFFFFFFFF | (abi.FUSE_INIT_EXT if minor >= 36 else 0))
    return low + (flags >> 32).to_bytes(4, "little") + bytes(44) if minor >= 36 else low


def pair() -> tuple[int, socket.socket]:
    """A descriptor for the session, which will close it, and the kernel's end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    ours.setblocking(False)
    return ours.detach(), theirs


def session(fd: int, fake: FakeOperations) -> KernelSession:
    """A session over the fake, which stands for the real operations."""
    return KernelSession(fd, cast("Operations", fake))


def plant() -> FakeOperations:
    """A tree with `file` (node 2) and `dir` (node 3), of which `file` is known to the kernel."""
    fake = FakeOperations()
    fake.add_file(b"file", CONTENT)
    fake.add_directory(b"dir")
    fake.references[2] = 1
    return fake


@asynccontextmanager
async def serving(fake: FakeOperations) -> AsyncIterator[Kernel]:
    """A session after INIT; at the end it has to stop when the connection does."""
    fd, end = pair()
    kernel = Kernel(end)
    try:
        with trio.fail_after(3 * LIMIT):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session(fd, fake).run)
                assert (await kernel.ask(abi.FUSE_INIT, init_body(45)))[0] == 0
                yield kernel
                kernel.close()
    finally:
        kernel.close()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.close(fd)


@pytest.fixture
def fake() -> Iterator[FakeOperations]:
    fake = plant()
    yield fake
    assert fake.misuse == []


# INIT


@pytest.mark.parametrize("minor", [31, 35, 36, 45, 60])
async def test_init_agrees_on_a_protocol(fake: FakeOperations, nursery: trio.Nursery, minor: int) -> None:
    fd, end = pair()
    kernel = Kernel(end)
    offered = FLAGS | (1 << 41 if minor >= 36 else 0)  # a flag that nobody knows
    unique = await kernel.send(abi.FUSE_INIT, init_body(minor, offered))
    await nursery.start(session(fd, fake).run)
    answered, error, body = await kernel.reply()
    assert (answered, error, len(body)) == (unique, 0, 64)
    fields = abi._INIT_OUT.unpack(body)
    assert fields[:2] == (7, min(minor, 45))
    flags = fields[3] | fields[10] << 32
    assert flags & ~(offered | abi.FUSE_INIT_EXT) == 0
    assert flags & FLAGS == FLAGS
    assert (await kernel.ask(abi.FUSE_GETATTR, abi.GETATTR_IN.pack(0, 0, 0)))[0] == 0
    kernel.close()


@pytest.mark.parametrize(("major", "minor"), [(7, 20), (7, 30), (6, 45)])
async def test_init_of_an_old_kernel_is_refused(fake: FakeOperations, major: int, minor: int) -> None:
    fd, end = pair()
    kernel = Kernel(end)
    await kernel.send(abi.FUSE_INIT, init_body(minor, major=major))
    raised: list[Exception] = []
    with trio.fail_after(LIMIT):
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(session(fd, fake).run)
        except Exception as exc:
            raised.append(exc)
    (refusal,) = raised
    while not isinstance(refusal, FuseUnavailable):
        (refusal,) = refusal.exceptions  # type: ignore[attr-defined]  # trio wraps it once for each nursery
    assert f"{major}.{minor}" in str(refusal)
    assert fake.metrics.surprises == 0
    kernel.close()


@asynccontextmanager
async def agreed(
    fake: FakeOperations, *, io: AskedIo, offered: int, readahead: int = 0
) -> AsyncIterator[tuple[KernelSession, Kernel, abi.InitIn]]:
    """A session that was asked for a mode, after INIT, and what it answered: flags and most bytes to read ahead."""
    fd, end = pair()
    kernel = Kernel(end)
    probe = Probe("/tier", Descriptor(os.open(os.devnull, os.O_RDONLY)))
    served = KernelSession(fd, cast("Operations", fake), io=io, probes=[probe], readahead=readahead)
    try:
        await kernel.send(abi.FUSE_INIT, init_body(45, FLAGS | offered))
        async with trio.open_nursery() as nursery:
            await nursery.start(served.run)
            _, error, body = await kernel.reply()
            assert error == 0
            major, minor, ahead, low, *_, high, _, _ = fields = abi._INIT_OUT.unpack(body)
            flags = low | high << 32
            assert fields[11] == (1 if flags & abi.FUSE_PASSTHROUGH else 0), "how deep what lies below may be stacked"
            yield served, kernel, abi.InitIn(major, minor, ahead, flags)
            kernel.close()
    finally:
        kernel.close()


async def test_pagecache_mode_reads_by_node(fake: FakeOperations) -> None:
    offered = abi.FUSE_NO_OPEN_SUPPORT | abi.FUSE_PASSTHROUGH
    async with agreed(fake, io="pagecache", offered=offered, readahead=1 << 20) as (served, kernel, answer):
        assert served.io_mode is not None
        assert served.io_mode.name == "pagecache"
        assert answer.flags & offered == abi.FUSE_NO_OPEN_SUPPORT
        assert answer.max_readahead == 1 << 20
        assert (fake.keeps_superseded, fake.manager.drops_served_pages) == (True, True)
        assert await kernel.ask(abi.FUSE_OPEN, abi.OPEN_IN.pack(0, 0), node=2) == (errno.ENOSYS, b"")
        read = abi.READ_IN.pack(0, 2, 4096, 0, 0, 0, 0)
        assert await kernel.ask(abi.FUSE_READ, read, node=2) == (0, CONTENT[2:])


BOTH = abi.FUSE_NO_OPEN_SUPPORT | abi.FUSE_PASSTHROUGH


@pytest.mark.parametrize(
    ("offered", "name", "reason"),
    [
        (BOTH, "pagecache", "this kernel does not know it"),
        (abi.FUSE_NO_OPEN_SUPPORT, "pagecache", "does not offer it"),
        (0, "plain", "told of every open"),
    ],
)
async def test_auto_takes_what_the_kernel_offers(fake: FakeOperations, offered: int, name: str, reason: str) -> None:
    """A socket takes no copies, so passthrough is asked for, and is not had."""
    async with agreed(fake, io="auto", offered=offered) as (served, _, answer):
        assert served.io_mode is not None
        assert (served.io_mode.name, reason in served.io_mode.reason) == (name, True), served.io_mode
        assert answer.flags & BOTH == offered


@pytest.mark.parametrize("io", ["passthrough", "pagecache"])
async def test_a_mode_that_is_not_to_be_had_ends_the_session(fake: FakeOperations, io: AskedIo) -> None:
    raised: list[BaseException] = []
    try:
        async with agreed(fake, io=io, offered=0):
            pass
    except Exception as exc:
        raised.append(exc)
    (refusal,) = raised
    while not isinstance(refusal, FuseUnavailable):
        (refusal,) = refusal.exceptions  # type: ignore[attr-defined]  # trio wraps it once for each nursery
    assert f"--io {io} cannot be had here" in str(refusal)


# Messages out of the ordinary


async def test_an_unknown_operation_is_answered_enosys(fake: FakeOperations) -> None:
    async with serving(fake) as kernel:
        for opcode in (7, 19, 54, 4096, 0xFFFFFFFF):
            assert await kernel.ask(opcode, bytes(100)) == (errno.ENOSYS, b"")
        assert (await kernel.ask(abi.FUSE_LOOKUP, b"file\0"))[0] == 0
    assert fake.metrics.surprises == 0


@pytest.mark.parametrize("opcode", sorted(abi.MODIFYING), ids=lambda opcode: abi.OPCODE_NAMES[opcode])
async def test_a_modifying_operation_is_answered_erofs(fake: FakeOperations, opcode: int) -> None:
    async with serving(fake) as kernel:
        assert await kernel.ask(opcode, bytes(200), node=2) == (errno.EROFS, b"")


async def test_messages_without_reply_get_none(fake: FakeOperations) -> None:
    fake.references[3] = 3
    async with serving(fake) as kernel:
        await kernel.send(abi.FUSE_FORGET, abi.FORGET_IN.pack(1), node=2)
        await kernel.send(abi.FUSE_BATCH_FORGET, abi._BATCH_FORGET_IN.pack(1, 0) + abi._FORGET_ONE.pack(3, 3), node=0)
        await kernel.send(abi.FUSE_INTERRUPT, abi.INTERRUPT_IN.pack(999_999), node=0)
        await kernel.send(abi.FUSE_NOTIFY_REPLY, bytes(40), node=2)
        await kernel.ask(abi.FUSE_LOOKUP, b"nothing\0")  # asserts that its reply is the next
    assert sum(fake.references.values()) == 0


async def test_a_fault_in_one_entry_of_batch_forget_leaves_the_others(fake: FakeOperations) -> None:
    fake.references[3] = 1
    fake.rules["forget"] = Rule(RuntimeError("bug"), subject=b"file")
    async with serving(fake) as kernel:
        pairs = abi._FORGET_ONE.pack(2, 1) + abi._FORGET_ONE.pack(3, 1)
        await kernel.send(abi.FUSE_BATCH_FORGET, abi._BATCH_FORGET_IN.pack(2, 0) + pairs, node=0)
        await kernel.ask(abi.FUSE_STATFS)
    assert sum(fake.references.values()) == 0
    assert fake.metrics.surprises == 1


async def test_a_message_shorter_than_its_header_is_passed_over(fake: FakeOperations) -> None:
    async with serving(fake) as kernel:
        await kernel.send_raw(b"\1")
        await kernel.send_raw(bytes(abi.IN_HEADER.size - 1))
        assert (await kernel.ask(abi.FUSE_STATFS))[0] == 0


BODIES = {
    abi.FUSE_LOOKUP: b"file\0",
    abi.FUSE_FORGET: abi.FORGET_IN.pack(1),
    abi.FUSE_BATCH_FORGET: abi._BATCH_FORGET_IN.pack(1, 0) + abi._FORGET_ONE.pack(2, 1),
    abi.FUSE_GETATTR: abi.GETATTR_IN.pack(0, 0, 0),
    abi.FUSE_OPEN: abi.OPEN_IN.pack(0, 0),
    abi.FUSE_OPENDIR: abi.OPEN_IN.pack(0, 0),
    abi.FUSE_READ: abi.READ_IN.pack(1, 0, 4096, 0, 0, 0, 0),
    abi.FUSE_READDIR: abi.READ_IN.pack(1, 0, 4096, 0, 0, 0, 0),
    abi.FUSE_READDIRPLUS: abi.READ_IN.pack(1, 0, 4096, 0, 0, 0, 0),
    abi.FUSE_RELEASE: abi.RELEASE_IN.pack(1, 0, 0, 0),
    abi.FUSE_RELEASEDIR: abi.RELEASE_IN.pack(1, 0, 0, 0),
    abi.FUSE_LSEEK: abi.LSEEK_IN.pack(1, 0, os.SEEK_DATA, 0),
    abi.FUSE_INTERRUPT: abi.INTERRUPT_IN.pack(4),
    abi.FUSE_INIT: init_body(45),
}
"""A right body for each operation that looks at its body."""

cut_bodies = st.sampled_from(sorted(BODIES)).flatmap(
    lambda opcode: st.tuples(st.just(opcode), st.integers(0, len(BODIES[opcode])).map(lambda n: BODIES[opcode][:n]))
)
any_bodies = st.tuples(st.sampled_from([*abi.OPCODE_NAMES, 0, 63]), st.binary(max_size=120))
messages = st.lists(st.tuples(cut_bodies | any_bodies, st.integers(0, 4)), min_size=1, max_size=6)


@pytest.mark.slow
@given(messages)
@settings(max_examples=150, derandomize=True, deadline=None, database=None)
def test_cut_and_garbled_messages_get_one_answer_each(sent: list[tuple[tuple[int, bytes], int]]) -> None:
    trio.run(answer_all, sent)


async def answer_all(sent: list[tuple[tuple[int, bytes], int]]) -> None:
    async with serving(plant()) as kernel:
        expected = set()
        for (opcode, body), node in sent:
            unique = await kernel.send(opcode, body, node=node)
            if opcode not in abi.WITHOUT_REPLY:
                expected.add(unique)
        while expected:
            unique, _, _ = await kernel.reply()
            expected.remove(unique)
        assert (await kernel.ask(abi.FUSE_LOOKUP, b"file\0"))[0] == 0


# Answers


async def test_a_file_is_looked_up_opened_read_and_released(fake: FakeOperations) -> None:
    async with serving(fake) as kernel:
        _, entry = await kernel.ask(abi.FUSE_LOOKUP, b"file\0")
        node, _, _, _, _, _, attributes = abi.ENTRY_OUT.unpack(entry)
        assert (node, unpack_attributes(attributes).size) == (2, len(CONTENT))
        _, opened = await kernel.ask(abi.FUSE_OPEN, abi.OPEN_IN.pack(os.O_RDONLY, 0), node=node)
        handle = abi.OPEN_OUT.unpack(opened)[0]
        for offset, size in [(0, 10), (0, 4096), (3, 4), (9, 100), (10, 100), (1 << 62, 1), (0, 0xFFFFFFFF)]:
            body = abi.READ_IN.pack(handle, offset, size, 0, 0, 0, 0)
            assert await kernel.ask(abi.FUSE_READ, body, node=node) == (0, CONTENT[offset : offset + size])
        assert await kernel.ask(abi.FUSE_RELEASE, abi.RELEASE_IN.pack(handle, 0, 0, 0), node=node) == (0, b"")
    assert fake.handles == {}


async def test_a_missing_name_is_a_negative_entry(fake: FakeOperations) -> None:
    fake.ttl = 1.5
    async with serving(fake) as kernel:
        error, entry = await kernel.ask(abi.FUSE_LOOKUP, b"nothing\0")
    assert error == 0
    assert abi.ENTRY_OUT.unpack(entry)[:6] == (0, 0, 1, 0, 500_000_000, 0)


@pytest.mark.parametrize(
    ("opcode", "body", "node"),
    [
        (abi.FUSE_LOOKUP, BODIES[abi.FUSE_LOOKUP], ROOT),
        (abi.FUSE_OPEN, BODIES[abi.FUSE_OPEN], 2),
        (abi.FUSE_OPENDIR, BODIES[abi.FUSE_OPENDIR], ROOT),
        (abi.FUSE_READDIRPLUS, BODIES[abi.FUSE_READDIRPLUS], ROOT),
    ],
    ids=["lookup", "open", "opendir", "readdirplus"],
)
async def test_what_a_refused_reply_would_have_given_is_taken_back(
    fake: FakeOperations, opcode: int, body: bytes, node: int
) -> None:
    assert fake.opendir(ROOT) == 1
    fd, end = pair()
    kernel = Kernel(end)
    await kernel.send(abi.FUSE_INIT, init_body(45))
    await kernel.send(opcode, body, node=node)
    kernel.close()  # the replies have nowhere to go
    with trio.fail_after(LIMIT):
        await session(fd, fake).run()
    assert (sum(fake.references.values()), fake.handles, fake.directory_handles) == (1, {}, {1: ROOT})


async def test_an_interrupt_ends_a_waiting_request_with_eintr(fake: FakeOperations) -> None:
    fake.declining.add("lookup_nowait")
    fake.rules["lookup"] = Rule(is_waiting=True, subject=b"slow")
    async with serving(fake) as kernel:
        waiting = await kernel.send(abi.FUSE_LOOKUP, b"slow\0")
        assert (await kernel.ask(abi.FUSE_LOOKUP, b"file\0"))[0] == 0
        assert fake.held == [("lookup", b"slow")]
        await kernel.send(abi.FUSE_INTERRUPT, abi.INTERRUPT_IN.pack(waiting), node=0)
        assert await kernel.reply() == (waiting, errno.EINTR, b"")
        assert fake.held == []
        await kernel.send(abi.FUSE_INTERRUPT, abi.INTERRUPT_IN.pack(waiting), node=0)  # too late: nothing happens
        assert (await kernel.ask(abi.FUSE_STATFS))[0] == 0


async def test_the_end_of_the_connection_ends_what_waits(fake: FakeOperations) -> None:
    fake.declining.add("lookup_nowait")
    fake.rules["lookup"] = Rule(is_waiting=True)
    async with serving(fake) as kernel:
        await kernel.send(abi.FUSE_LOOKUP, b"file\0")
        assert (await kernel.ask(abi.FUSE_STATFS))[0] == 0
        assert fake.held == [("lookup", b"file")]
    assert (fake.held, fake.cancelled) == ([], [("lookup", b"file")])


async def test_a_listing_in_which_one_name_fails_gives_its_references_back(fake: FakeOperations) -> None:
    assert fake.opendir(ROOT) == 1
    fake.rules["known_entry"] = Rule(RuntimeError("bug"), subject=b"dir")  # `file` has been counted by then
    async with serving(fake) as kernel:
        await kernel.ask(abi.FUSE_READDIRPLUS, BODIES[abi.FUSE_READDIRPLUS])
    assert fake.references[2] == 1
