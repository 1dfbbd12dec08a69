"""Backing ids: one way for a node as long as it is open, kept past the last close, closed with their copies.

The kernel is a table of ids here; what it really accepts is tested on mounts in tests/faults/test_io_modes.py.
"""

import errno
import fcntl
import os
from typing import Any

import pytest

from dmfs.errors import TierUnavailable
from dmfs.fuse import abi, passthrough
from dmfs.fuse.passthrough import BY_MESSAGES, Passthrough, Probe
from dmfs.log import ErrorLog
from dmfs.metrics import Handed
from dmfs.tiers.descriptors import Descriptor
from dmfs.tiers.manager import OpenCopy
from dmfs.types import DataFile, FileKey, FileVersion


class Kernel:
    """Stands for ioctl(2) on the connection."""

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.error = 0
        self.refused_fds: set[int] = set()
        self.made = 0

    def ioctl(self, fd: int, request: int, argument: bytes | bytearray) -> int:
        if request == abi.FUSE_DEV_IOC_BACKING_CLOSE:
            self.ids.remove(abi.BACKING_ID.unpack(argument)[0])
            return 0
        assert request == abi.FUSE_DEV_IOC_BACKING_OPEN
        assert isinstance(argument, bytearray), "an immutable argument would not return the id"
        fd, *rest = abi.BACKING_MAP.unpack(argument)
        assert rest == [0, 0]
        if fd in self.refused_fds:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        self.made += 1
        self.ids.add(self.made)
        return self.made


class Place:
    """Stands for a Store, of which the tier's name is all that is used."""

    def __init__(self, path: str) -> None:
        self.path = path


class Copies:
    """Stands for the Manager: which keys have a copy, and on which tier."""

    def __init__(self) -> None:
        self.tiers: dict[FileKey, str] = {}
        self.must_wait = False
        self.fails = False
        self.on_copy_gone: Any = None
        self.descriptor = Descriptor(os.open(os.devnull, os.O_RDONLY))

    def has_copy(self, key: FileKey) -> bool:
        return key in self.tiers

    def open_copy_nowait(self, file: DataFile) -> Any:
        if self.must_wait or file.key not in self.tiers:
            return None
        return OpenCopy(Place(self.tiers[file.key]), self.descriptor)  # type: ignore[arg-type]

    async def open_copy(self, file: DataFile) -> Any:
        if self.fails:
            raise TierUnavailable("the disk is broken")
        self.must_wait = False
        return self.open_copy_nowait(file)

    def remove(self, file: DataFile) -> None:
        del self.tiers[file.key]
        self.on_copy_gone(file.key)


def a_file(number: int) -> DataFile:
    return DataFile(b"f%d" % number, FileVersion(100, 0, 0), b"%016d" % number)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(fcntl, "ioctl", kernel.ioctl)
    return kernel


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def handed() -> Handed:
    return Handed()


@pytest.fixture
def ids(kernel: Kernel, copies: Copies, handed: Handed) -> Passthrough:
    return Passthrough(99, copies, errors=ErrorLog(), handed=handed)  # type: ignore[arg-type]


def test_an_id_is_kept_past_the_last_close(ids: Passthrough, kernel: Kernel, copies: Copies, handed: Handed) -> None:
    file = a_file(1)
    copies.tiers[file.key] = "/t"
    first = ids.open_nowait(7, file)
    assert first
    assert ids.open_nowait(7, file) == first
    assert ids.statistics() == {"backing_ids": 1, "backing_ids_idle": 0}
    ids.close(7)
    ids.close(7)
    assert ids.statistics() == {"backing_ids": 1, "backing_ids_idle": 1}
    assert ids.open_nowait(8, file) == first, "another node of the same copy, such as one looked up anew, uses it too"
    assert (kernel.made, handed.as_dict()) == (1, {"opens": 3, "file_bytes": 300})


def test_the_first_open_decides_until_the_last_close(ids: Passthrough, kernel: Kernel, copies: Copies) -> None:
    file = a_file(1)
    assert ids.open_nowait(7, file) == BY_MESSAGES
    copies.tiers[file.key] = "/t"  # a fill has ended meanwhile
    assert ids.open_nowait(7, file) == BY_MESSAGES
    ids.close(7)
    assert ids.open_nowait(7, file) == BY_MESSAGES
    ids.close(7)
    ids.close(7)
    by_kernel = ids.open_nowait(7, file)
    assert by_kernel
    copies.remove(file)
    assert ids.open_nowait(7, file) == by_kernel, "the other way would be EIO in the application"
    assert kernel.ids == {by_kernel}


def test_an_idle_id_goes_with_its_copy_and_one_in_use_with_its_last_close(
    ids: Passthrough, kernel: Kernel, copies: Copies
) -> None:
    used, idle = a_file(1), a_file(2)
    for node, file in enumerate((used, idle)):
        copies.tiers[file.key] = "/t"
        ids.open_nowait(node, file)
    ids.close(1)
    copies.remove(used)
    copies.remove(idle)
    assert len(kernel.ids) == 1
    copies.tiers[used.key] = "/t"  # fetched again: a copy of its own, beside the one that is still open
    assert ids.open_nowait(5, used) not in kernel.ids - {kernel.made}
    ids.close(0)
    assert kernel.ids == {kernel.made}
    ids.close(5)
    assert ids.statistics() == {"backing_ids": 1, "backing_ids_idle": 1}


def test_the_id_used_longest_ago_goes_first(
    ids: Passthrough, kernel: Kernel, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passthrough, "MAX_IDLE", 2)
    for number in (1, 2, 3, 1, 4):
        file = a_file(number)
        copies.tiers[file.key] = "/t"
        assert ids.open_nowait(number, file)
        ids.close(number)
    # 1 went when 3 came, and was made again when it was asked for, which 2 was dropped for.
    assert kernel.ids == {4, 5}
    assert ids.statistics() == {"backing_ids": 2, "backing_ids_idle": 2}


async def test_a_copy_whose_disk_must_be_asked_is_opened_meanwhile(ids: Passthrough, copies: Copies) -> None:
    file = a_file(1)
    copies.tiers[file.key] = "/t"
    copies.must_wait = True
    assert ids.open_nowait(7, file) is None
    assert await ids.open(7, file) == 1
    ids.close(7)
    assert ids.statistics()["backing_ids_idle"] == 1


async def test_who_was_slower_follows_who_was_first(ids: Passthrough, copies: Copies) -> None:
    file = a_file(1)
    assert ids.open_nowait(7, file) == BY_MESSAGES
    copies.tiers[file.key] = "/t"
    assert await ids.open(7, file) == BY_MESSAGES
    copies.fails = True
    assert await ids.open(8, file) == BY_MESSAGES, "a fault of a tier is nobody's error"


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOTTY])
def test_a_refusal_that_holds_for_the_whole_mount(ids: Passthrough, kernel: Kernel, copies: Copies, code: int) -> None:
    kernel.error = code
    ids.try_tiers([Probe("/a", copies.descriptor), Probe("/b", copies.descriptor)])
    assert ids.refusal
    assert not ids.refused_tiers


def test_a_refusal_of_one_tier(ids: Passthrough, kernel: Kernel, copies: Copies) -> None:
    overlay, disk = Descriptor(os.dup(copies.descriptor.fd)), Descriptor(os.dup(copies.descriptor.fd))
    kernel.refused_fds = {overlay.fd}
    ids.try_tiers([Probe("/a", overlay), Probe("/b", disk)])
    assert (ids.refusal, list(ids.refused_tiers), kernel.ids) == (None, ["/a"], set())
    for number, tier in enumerate(("/a", "/b")):
        copies.tiers[a_file(number).key] = tier
    assert ids.open_nowait(1, a_file(0)) == BY_MESSAGES
    assert ids.open_nowait(2, a_file(1)) != BY_MESSAGES


def test_a_refusal_of_every_tier_is_one_of_the_mount(ids: Passthrough, kernel: Kernel, copies: Copies) -> None:
    kernel.error = errno.ELOOP
    ids.try_tiers([Probe("/a", copies.descriptor)])
    assert ids.refusal
    assert "/a" in ids.refusal


def test_a_rare_refusal_is_logged_and_nobodys_error(kernel: Kernel, copies: Copies) -> None:
    errors = ErrorLog()
    ids = Passthrough(99, copies, errors=errors, handed=Handed())  # type: ignore[arg-type]
    kernel.error = errno.ENOMEM
    copies.tiers[a_file(1).key] = "/t"
    assert ids.open_nowait(7, a_file(1)) == BY_MESSAGES
    assert len(errors.entries()) == 1
    ids.close(7)
    kernel.error = 0
    assert ids.open_nowait(7, a_file(1)) != BY_MESSAGES


def test_after_the_end_the_descriptor_is_left_alone(ids: Passthrough, kernel: Kernel, copies: Copies) -> None:
    copies.tiers[a_file(1).key] = "/t"
    ids.open_nowait(7, a_file(1))
    ids.close(7)
    ids.end()
    copies.remove(a_file(1))  # the number may be another file by now
    assert kernel.ids == {1}
