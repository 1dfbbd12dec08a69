"""POSIX checks: mapped files, programs run from the mount, libraries that map, and copies made inside the kernel."""

import ctypes
import errno
import mmap
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.mount.posix.target import Registry, Target, raises_errno
from tests.mount.posix.tree import DENSE, SIZE_NAMES, SIZE_NUMBERS
from tests.support.files import KiB, MiB, content, drop_pages, expect_content, raw_listing, write_file

mapping = Registry()

COPY_SIZES = [0, 1, 327680, 3 * MiB + 1]


def _map(path: Path, flags: int, prot: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(fd, 0, flags=flags, prot=prot)
    finally:
        os.close(fd)


def _dense(target: Target) -> Path:
    return target.view / SIZE_NAMES[DENSE]


def _run_child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python code that may die of a signal."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=30
    )


@mapping.add
def shared_read_only_map(target: Target) -> None:
    drop_pages(_dense(target))
    with _map(_dense(target), mmap.MAP_SHARED, mmap.PROT_READ) as view:
        expect_content(view[131000:], SIZE_NUMBERS[DENSE], 131000, DENSE - 131000)
        expect_content(view[:], SIZE_NUMBERS[DENSE], 0, DENSE)


@mapping.add
def private_writable_map(target: Target) -> None:
    before = _dense(target).read_bytes()
    with _map(_dense(target), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view:
        expect_content(view[:], SIZE_NUMBERS[DENSE], 0, DENSE)
        view[5000:5005] = b"mine!"
        assert view[5000:5005] == b"mine!"
    assert _dense(target).read_bytes() == before, "a private change reached the file"


@mapping.add
def shared_writable_map(target: Target) -> None:
    with raises_errno(errno.EACCES):
        _map(_dense(target), mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


@mapping.add
def map_and_read_agree(target: Target) -> None:
    size = 3 * MiB + 1
    path = target.view / SIZE_NAMES[size]
    with path.open("rb") as file, _map(path, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        for step in range(100):
            offset = step * 1_234_567 % size
            assert os.pread(file.fileno(), 6000, offset) == view[offset : offset + 6000], f"differ at {offset}"


@mapping.add
def map_outlives_its_descriptor_and_a_listing(target: Target) -> None:
    path = target.view / "hard/first/one"
    drop_pages(path)
    with _map(path, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        expect_content(view[:100], 3, 0, 100)
        for entry in raw_listing(path.parent):
            os.lstat(path.parent / os.fsdecode(entry.name))
        for entry in os.scandir(path.parent):
            entry.stat()
        expect_content(view[8192:], 3, 8192, 10_000 - 8192)


@mapping.add
def advice_on_a_map(target: Target) -> None:
    with _map(_dense(target), mmap.MAP_SHARED, mmap.PROT_READ) as view:
        for advice in (mmap.MADV_SEQUENTIAL, mmap.MADV_WILLNEED, mmap.MADV_RANDOM, mmap.MADV_DONTNEED):
            view.madvise(advice)
        expect_content(view[:], SIZE_NUMBERS[DENSE], 0, DENSE)


BEHIND_THE_END = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
fd = os.open(sys.argv[1], os.O_RDONLY)
size = os.fstat(fd).st_size
start = libc.mmap(None, 16384, 1, 1, fd, 0)
rest = ctypes.string_at(start + size, 4096 - size)
print(any(rest), flush=True)
ctypes.string_at(start + int(sys.argv[2]), 1)
print("survived", flush=True)
"""


@mapping.add
def bytes_behind_the_end_of_a_mapped_file(target: Target) -> None:
    child = _run_child(BEHIND_THE_END, target.view / "plain", 100)
    assert child.stdout.split() == ["False", "survived"], f"the rest of the last page is not zero: {child}"
    child = _run_child(BEHIND_THE_END, target.view / "plain", 4096)
    assert child.stdout.split() == ["False"], f"a page behind the file could be read: {child}"
    assert child.returncode == -signal.SIGBUS, f"not SIGBUS: {child}"


MAP_THEN_TRUNCATE = """
import mmap, os, sys
view, source = sys.argv[1:]
fd = os.open(view, os.O_RDONLY)
mapped = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
first = mapped[:4096]
os.truncate(source, 4096)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
sys.stdout.write(mapped[8192:8224].hex())
sys.stdout.flush()
"""


def _map_then_truncate(target: Target) -> subprocess.CompletedProcess[str]:
    place = f"{target.mutable}/truncated"
    write_file(target.source / place, 7, 12 * KiB)
    return _run_child(MAP_THEN_TRUNCATE, target.view / place, target.source / place)


@mapping.add
def page_behind_a_truncated_end(target: Target) -> None:
    child = _map_then_truncate(target)
    assert child.returncode == -signal.SIGBUS, f"expected SIGBUS: {child}"


def page_behind_a_truncated_end_is_kept(target: Target) -> None:
    """The copy made at open is a version of its own: a mapping of it does not lose its end."""
    child = _map_then_truncate(target)
    assert child.returncode == 0, f"the mapped version was lost: {child}"
    assert bytes.fromhex(child.stdout) == content(7, 8192, 32), "the mapped version changed"


@mapping.add
def replaced_file_keeps_old_bytes_for_old_readers(target: Target) -> None:
    place = f"{target.mutable}/replaced"
    fresh = target.source / target.mutable / "fresh"
    write_file(fresh, 8, 20 * KiB)
    _old_reader_keeps(target, place, lambda: fresh.rename(target.source / place))


@mapping.add
def unlinked_file_keeps_old_bytes_for_old_readers(target: Target) -> None:
    place = f"{target.mutable}/unlinked"
    _old_reader_keeps(target, place, (target.source / place).unlink)


def _old_reader_keeps(target: Target, place: str, change: object) -> None:
    assert callable(change)
    fd = os.open(target.view / place, os.O_RDONLY)
    try:
        with mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as view:
            expect_content(view[:100], 7, 0, 100)
            change()
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            expect_content(os.pread(fd, 20 * KiB, 0), 7, 0, 12 * KiB)
            expect_content(view[:], 7, 0, 12 * KiB)
    finally:
        os.close(fd)


@mapping.add
def run_a_program(target: Target) -> None:
    for _ in range(2):
        done = subprocess.run([target.view / "programs/echo", "it runs"], capture_output=True, text=True, check=True)
        assert done.stdout == "it runs\n"


@mapping.add
def run_a_script(target: Target) -> None:
    done = subprocess.run([target.view / "programs/script"], capture_output=True, text=True, check=True)
    assert done.stdout == "from the script\n"
    with raises_errno(errno.EACCES):
        subprocess.run([target.view / "plain"])


@mapping.add
def import_modules(target: Target) -> None:
    code = """
import importlib.util, sys
folder = sys.argv[1]
sys.path.insert(0, folder)
import pure_module
spec = importlib.util.spec_from_file_location("_xxhash", folder + "/extension.so")
extension = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extension)
assert folder + "/extension.so" in open("/proc/self/maps").read()
print(pure_module.ANSWER, extension.xxh3_64_hexdigest(b"bytes"))
"""
    child = _run_child(code, target.view / "programs")
    assert child.returncode == 0, child.stderr
    wanted = _run_child("import xxhash; print(42, xxhash.xxh3_64_hexdigest(b'bytes'))")
    assert child.stdout == wanted.stdout


@mapping.add
def load_with_libraries(target: Target) -> None:
    array = np.load(target.view / "programs/array.npy", mmap_mode="r")
    assert array[99_999] == 99_999
    assert int(array.sum()) == 4_999_950_000
    base = sqlite3.connect(f"file:{target.view}/programs/rows.sqlite?mode=ro", uri=True)
    try:
        assert base.execute("select sum(square) from rows").fetchone() == (sum(n * n for n in range(2000)),)
    finally:
        base.close()


def _cold_then_warm(target: Target) -> Iterator[tuple[int, Path]]:
    for size in COPY_SIZES:
        path = target.view / SIZE_NAMES[size]
        drop_pages(path)
        yield size, path
        yield size, path


@mapping.add
def copy_by_copyfile(target: Target) -> None:
    for size, path in _cold_then_warm(target):
        copy = target.scratch / "copy"
        shutil.copyfile(path, copy)
        expect_content(copy.read_bytes(), SIZE_NUMBERS[size], 0, size)
        shutil.copy2(path, copy)
        assert copy.stat().st_mtime_ns == path.stat().st_mtime_ns


@mapping.add
def copy_by_sendfile(target: Target) -> None:
    for size, path in _cold_then_warm(target):
        with path.open("rb") as file, (target.scratch / "sent").open("w+b") as copy:
            sent = os.sendfile(copy.fileno(), file.fileno(), 0, size + 100)
            assert sent == size, f"sendfile sent {sent} of {size} bytes"
            assert os.sendfile(copy.fileno(), file.fileno(), size, 100) == 0, "sendfile at the end"
            expect_content(os.pread(copy.fileno(), size + 100, 0), SIZE_NUMBERS[size], 0, size)


@mapping.add
def copy_by_splice(target: Target) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.splice.restype = ctypes.c_ssize_t
    libc.splice.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_uint,
    ]
    for size, path in _cold_then_warm(target):
        out, into = os.pipe()
        fd = os.open(path, os.O_RDONLY)
        try:
            parts = []
            while count := libc.splice(fd, None, into, None, 65536, 0):
                assert count > 0, f"splice: {os.strerror(ctypes.get_errno())}"
                parts.append(os.read(out, count))
            expect_content(b"".join(parts), SIZE_NUMBERS[size], 0, size)
        finally:
            for each in (fd, out, into):
                os.close(each)


@mapping.add
def copy_by_copy_file_range(target: Target) -> None:
    for size, path in _cold_then_warm(target):
        with path.open("rb") as file, (target.scratch / "ranged").open("w+b") as copy:
            done = 0
            while count := os.copy_file_range(file.fileno(), copy.fileno(), size + 100):
                done += count
            assert done == size, f"copy_file_range ended at {done} of {size} bytes"
            expect_content(os.pread(copy.fileno(), size + 100, 0), SIZE_NUMBERS[size], 0, size)


def copy_file_range_is_refused(target: Target) -> None:
    """The kernel itself refuses between types of file systems and callers fall back; never 0 before the end."""
    for size, path in _cold_then_warm(target):
        with path.open("rb") as file, (target.scratch / "ranged").open("w+b") as copy:
            if size == 0:
                continue
            with raises_errno(errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL):
                os.copy_file_range(file.fileno(), copy.fileno(), size)


@mapping.add
def copy_file_range_into_the_mount(target: Target) -> None:
    with (target.view / "plain").open("rb") as file, _dense(target).open("rb") as other, raises_errno(errno.EBADF):
        os.copy_file_range(file.fileno(), other.fileno(), 10)
