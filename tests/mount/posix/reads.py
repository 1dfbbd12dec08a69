"""POSIX checks: bytes, offsets and the ways to ask for them."""

import errno
import fcntl
import mmap
import os
import select
import subprocess
import sys
import termios
import threading
from pathlib import Path

from tests.mount.posix.target import Registry, Target, raises_errno
from tests.mount.posix.tree import DENSE, MODES, PLAIN, SIZE_NAMES, SIZE_NUMBERS, SIZES, SPARSE
from tests.support.files import KiB, MiB, content, drop_pages, expect_content

reads = Registry()

REQUESTS = [1, 4096, 65536, 131072, 1 * MiB]
ONE_BYTE_LIMIT = 140_000  # bytes up to which a file is also read byte by byte: a larger one only takes longer


def _open_dense(target: Target, flags: int = 0) -> int:
    return os.open(target.view / SIZE_NAMES[DENSE], os.O_RDONLY | flags)


def _dense(offset: int, length: int) -> bytes:
    return content(SIZE_NUMBERS[DENSE], offset, length)


@reads.add
def every_size_by_every_request_size(target: Target) -> None:
    for size in SIZES:
        path = target.view / SIZE_NAMES[size]
        for request in [*REQUESTS, size + 10]:
            if request == 1 and size > ONE_BYTE_LIMIT:
                continue
            drop_pages(path)
            fd = os.open(path, os.O_RDONLY)
            try:
                parts = []
                while part := os.read(fd, request):
                    assert len(part) == request or len(parts) == size // request, (
                        f"{size}: short read of {len(part)} for {request} in the middle of the file"
                    )
                    parts.append(part)
            finally:
                os.close(fd)
            expect_content(b"".join(parts), SIZE_NUMBERS[size], 0, size)


@reads.add
def pread_around_the_end(target: Target) -> None:
    for size in SIZES:
        drop_pages(target.view / SIZE_NAMES[size])
        fd = os.open(target.view / SIZE_NAMES[size], os.O_RDONLY)
        try:
            for offset in (size, size + 1, size + 4096, 2**40, 2**62):
                assert os.pread(fd, 4096, offset) == b"", f"{size}: bytes at offset {offset}"
            if size:
                expect_content(os.pread(fd, 4096, size - 1), SIZE_NUMBERS[size], size - 1, 1)
            if size > 7:
                expect_content(os.pread(fd, 14, size - 7), SIZE_NUMBERS[size], size - 7, 7)
        finally:
            os.close(fd)


@reads.add
def pread_everywhere(target: Target) -> None:
    size = SIZES[-1]
    drop_pages(target.view / SIZE_NAMES[size])
    fd = os.open(target.view / SIZE_NAMES[size], os.O_RDONLY)
    try:
        for step in range(300):
            offset, length = step * 7_654_321 % size, 1 + step * 977 % 200_000
            data = os.pread(fd, length, offset)
            expect_content(data, SIZE_NUMBERS[size], offset, min(length, size - offset))
    finally:
        os.close(fd)


@reads.add
def pread_at_a_negative_offset(target: Target) -> None:
    fd = _open_dense(target)
    try:
        with raises_errno(errno.EINVAL):
            os.pread(fd, 1, -1)
    finally:
        os.close(fd)


@reads.add
def read_of_a_directory(target: Target) -> None:
    fd = os.open(target.view / "nested", os.O_RDONLY)
    try:
        with raises_errno(errno.EISDIR):
            os.read(fd, 1)
    finally:
        os.close(fd)


@reads.add
def write_on_a_read_only_descriptor(target: Target) -> None:
    fd = _open_dense(target)
    try:
        with raises_errno(errno.EBADF):
            os.write(fd, b"x")
        with raises_errno(errno.EBADF):
            os.pwrite(fd, b"x", 0)
    finally:
        os.close(fd)


@reads.add
def readv_into_odd_buffers(target: Target) -> None:
    fd = _open_dense(target)
    try:
        lengths = [1, 4095, 10, 70_000, 3, 60_000]
        buffers = [bytearray(length) for length in lengths]
        count = os.preadv(fd, buffers, 1)
        joined = b"".join(buffers)
        assert count == DENSE - 1, f"preadv gave {count} bytes up to the end, not {DENSE - 1}"
        assert joined[:count] == _dense(1, count), "wrong bytes by preadv"
        assert not any(joined[count:]), "preadv wrote behind the end of the file"
        os.lseek(fd, 4090, os.SEEK_SET)
        assert os.readv(fd, buffers[:3]) == 4106
        assert b"".join(buffers[:3]) == _dense(4090, 4106), "wrong bytes by readv"
    finally:
        os.close(fd)


@reads.add
def seeking(target: Target) -> None:
    fd = _open_dense(target)
    try:
        assert os.lseek(fd, -5, os.SEEK_END) == DENSE - 5
        assert os.read(fd, 100) == _dense(DENSE - 5, 5)
        assert os.lseek(fd, 10, os.SEEK_CUR) == DENSE + 10, "seeking past the end is allowed"
        assert os.read(fd, 100) == b""
        with raises_errno(errno.EINVAL):
            os.lseek(fd, -1, os.SEEK_SET)
        with raises_errno(errno.EINVAL):
            os.lseek(fd, -DENSE - 1, os.SEEK_END)
    finally:
        os.close(fd)


@reads.add
def holes_of_a_dense_file(target: Target) -> None:
    fd = _open_dense(target)
    try:
        assert os.lseek(fd, 0, os.SEEK_HOLE) == DENSE
        assert os.lseek(fd, 5000, os.SEEK_HOLE) == DENSE
        assert os.lseek(fd, 5000, os.SEEK_DATA) == 5000
        for offset in (DENSE, DENSE + 1):
            for whence in (os.SEEK_HOLE, os.SEEK_DATA):
                with raises_errno(errno.ENXIO):
                    os.lseek(fd, offset, whence)
    finally:
        os.close(fd)


@reads.add
def holes_of_sparse_files(target: Target) -> None:
    for name, (size, extents) in SPARSE.items():
        fd = os.open(target.view / "sparse" / name, os.O_RDONLY)
        try:
            in_data = {offset for start, length in extents for offset in range(start, start + length, 4 * KiB)}
            for offset in range(0, size, 4 * KiB):
                following = min((at for at in in_data if at >= offset), default=None)
                data = _seek_data(fd, offset)
                if data is None:
                    assert following is None, f"{name}: no data said to follow {offset}, but there is at {following}"
                else:
                    assert offset <= data < size, f"{name}: SEEK_DATA from {offset} gave {data}"
                    assert following is None or data <= following, f"{name}: data at {following} reported as a hole"
                hole = os.lseek(fd, offset, os.SEEK_HOLE)
                assert offset <= hole <= size, f"{name}: SEEK_HOLE from {offset} gave {hole}"
                assert hole == size or hole not in in_data, f"{name}: data at {hole} reported as a hole"
        finally:
            os.close(fd)


def _seek_data(fd: int, offset: int) -> int | None:
    """Where data follows `offset`, or None if only a hole is said to."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as exc:
        if exc.errno != errno.ENXIO:
            raise
        return None


@reads.add
def bytes_of_sparse_files(target: Target) -> None:
    for name, (size, extents) in SPARSE.items():
        wanted = bytearray(size)
        for offset, length in extents:
            wanted[offset : offset + length] = content(0, offset, length)
        data = (target.view / "sparse" / name).read_bytes()
        assert len(data) == size, f"{name}: {len(data)} bytes, not {size}"
        assert data == wanted, f"{name}: wrong bytes"


@reads.add
def direct_reads(target: Target) -> None:
    size = SIZES[-1]
    fd = os.open(target.view / SIZE_NAMES[size], os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, MiB) as buffer:
            offset = 0
            while count := os.preadv(fd, [buffer], offset):
                expect_content(buffer[:count], SIZE_NUMBERS[size], offset, min(MiB, size - offset))
                offset += count
            assert offset == size
            with memoryview(buffer)[:4096] as page:
                assert os.preadv(fd, [page], 131072) == 4096
            expect_content(buffer[:4096], SIZE_NUMBERS[size], 131072, 4096)
    finally:
        os.close(fd)


@reads.add
def open_flags_of_readers(target: Target) -> None:
    for flags in (os.O_NOATIME, os.O_NONBLOCK, os.O_CLOEXEC, os.O_SYNC, os.O_NOCTTY, os.O_NOFOLLOW):
        fd = _open_dense(target, flags)
        try:
            assert os.pread(fd, 10, 5000) == _dense(5000, 10), f"wrong bytes with open flags {flags:#o}"
        finally:
            os.close(fd)


@reads.add
def path_descriptors(target: Target) -> None:
    fd = _open_dense(target, os.O_PATH)
    try:
        assert os.fstat(fd).st_size == DENSE
        with raises_errno(errno.EBADF):
            os.read(fd, 1)
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        try:
            assert os.pread(again, 10, 5) == _dense(5, 10)
        finally:
            os.close(again)
    finally:
        os.close(fd)


@reads.add
def opening_the_wrong_kind(target: Target) -> None:
    plain = target.view / "plain"
    with raises_errno(errno.ENOTDIR):
        os.open(plain, os.O_RDONLY | os.O_DIRECTORY)
    with raises_errno(errno.ENOTDIR):
        os.listdir(plain)
    with raises_errno(errno.ELOOP):
        os.open(target.view / "links/relative", os.O_RDONLY | os.O_NOFOLLOW)
    with raises_errno(errno.EINVAL):
        os.readlink(plain)
    with raises_errno(errno.ENOENT):
        os.open(target.view / "missing", os.O_RDONLY)
    with raises_errno(errno.ENXIO):
        os.open(target.view / "special/socket", os.O_RDONLY)


@reads.add
def fstat_of_an_open_file(target: Target) -> None:
    fd = _open_dense(target)
    try:
        assert os.fstat(fd) == os.stat(target.view / SIZE_NAMES[DENSE])
    finally:
        os.close(fd)


@reads.add
def reopening_gives_the_same(target: Target) -> None:
    for _ in range(20):
        assert (target.view / "plain").read_bytes() == PLAIN


@reads.add
def two_hundred_handles_at_once(target: Target) -> None:
    fds = [os.open(target.view / "handles" / f"{number}", os.O_RDONLY) for number in range(200)]
    more = [os.open(target.view / "handles/0", os.O_RDONLY) for _ in range(50)]
    try:
        for offset in (4000, 0, 1000):
            for number, fd in enumerate(fds):
                expect_content(os.pread(fd, 1000, offset), number, offset, 1000)
        for position, fd in enumerate(more):
            os.lseek(fd, position * 10, os.SEEK_SET)
        for position, fd in enumerate(more):
            expect_content(os.read(fd, 10), 0, position * 10, 10)
    finally:
        for fd in fds + more:
            os.close(fd)


@reads.add
def one_descriptor_in_two_processes(target: Target) -> None:
    fd = _open_dense(target)
    try:
        assert os.read(fd, 1000) == _dense(0, 1000)
        code = f"import os, sys; sys.stdout.buffer.write(os.read({fd}, 5000))"
        child = subprocess.run([sys.executable, "-c", code], pass_fds=[fd], stdout=subprocess.PIPE, check=True)
        assert child.stdout == _dense(1000, 5000), "the child did not read on from the shared offset"
        assert os.read(fd, 10) == _dense(6000, 10), "the child's read did not move the shared offset"
    finally:
        os.close(fd)


@reads.add
def eight_threads_on_a_cold_file(target: Target) -> None:
    path = target.view / target.mutable / "cold"
    problems: list[str] = []
    start = threading.Barrier(8)

    def reader(seed: int) -> None:
        try:
            start.wait(10)
            fd = os.open(path, os.O_RDONLY)
            try:
                for step in range(40):
                    offset = (seed * 37_777 + step * 65_537) % 300_000
                    expect_content(os.pread(fd, 9000, offset), 7, offset, min(9000, 300_000 - offset))
            finally:
                os.close(fd)
        except (AssertionError, OSError) as exc:
            problems.append(f"thread {seed}: {exc}")

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not problems, "\n".join(problems)
    assert not any(thread.is_alive() for thread in threads), "a reader hangs"


@reads.add
def unusual_permissions(target: Target) -> None:
    for mode in MODES:
        path = Path(f"{target.view}/modes/{mode:04o}")
        if os.geteuid() == 0 or mode & 0o400:
            assert path.read_bytes() == b"%o" % mode
        else:
            with raises_errno(errno.EACCES):
                path.read_bytes()


@reads.add
def advice_and_flushing_succeed(target: Target) -> None:
    fd = _open_dense(target)
    try:
        for advice in (os.POSIX_FADV_SEQUENTIAL, os.POSIX_FADV_RANDOM, os.POSIX_FADV_WILLNEED, os.POSIX_FADV_DONTNEED):
            os.posix_fadvise(fd, 0, 0, advice)
        os.fsync(fd)
        os.fdatasync(fd)
        assert os.pread(fd, 10, 70_000) == _dense(70_000, 10)
    finally:
        os.close(fd)
    folder = os.open(target.view / "nested", os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@reads.add
def not_a_terminal(target: Target) -> None:
    fd = _open_dense(target)
    try:
        assert not os.isatty(fd)
        with raises_errno(errno.ENOTTY):
            fcntl.ioctl(fd, termios.TIOCGWINSZ, b"\0" * 8)
    finally:
        os.close(fd)


@reads.add
def poll_says_readable(target: Target) -> None:
    fd = _open_dense(target)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert [events & select.POLLIN for _, events in poll.poll(5000)] == [select.POLLIN]
    finally:
        os.close(fd)
