"""The dataset tree of the POSIX suite: one of everything a file system can hold.

Built once on a disk and shared by all targets. Access times lie in the future of everything else, so that native reads
of the source (relatime) leave them alone and attributes can be compared exactly.
"""

import contextlib
import math
import os
import shutil
import socket
import sqlite3
import stat
import time
from pathlib import Path

import numpy as np
import xxhash

from tests.support.files import KiB, MiB, content, write_file

SIZES = [0, 1, 4095, 4096, 4097, 131071, 131072, 131073, 327680, 3 * MiB + 1]
"""Around every size at which something changes: page, default readahead, message, several messages."""

SIZE_NAMES = {size: f"sizes/{size}.bin" for size in SIZES}
SIZE_NUMBERS = {size: number for number, size in enumerate(SIZES)}

DENSE = 131073
"""The size of the file most checks read: it ends one byte into a page and into a message."""

MANY = 20_000
"""Entries of `many/`: several getdents calls and several READDIR messages, large hashed cookies on ext4."""

TIMES_NS = {
    "epoch": 0,
    "minus-1ns": -1,
    "minus-1.5s": -1_500_000_000,
    "1969": -31_536_000 * 10**9,
    "2^31": 2**31 * 10**9,
    "2^32-1": (2**32 - 1) * 10**9,
    "2^32": 2**32 * 10**9,
    "2^33": 2**33 * 10**9,
    "nanoseconds": 1_600_000_000_123_456_789,
}
"""Modification times that clocks with too few bits, or signs, or floats get wrong."""

ODD_NAMES = [
    "caf\u00e9".encode(),  # composed
    "cafe\u0301".encode(),  # decomposed: another file
    b"caf\xe9",  # Latin-1: not UTF-8 at all
    b"Readme",
    b"README",
    b"readme",
    b"new\nline",
    b" leading and trailing ",
    b"...",
    b"-rf",
    b"%s%n",
    b"back\\slash",
    b"a:b*c?d|e",
    b"\x01\x7f",
    b"x" * 255,
    "\u00fc".encode() * 127 + b"!",  # 255 bytes, 128 characters
    *(bytes([byte]) for byte in range(1, 256) if byte not in b"./"),
]

LINKS = {
    b"relative": b"../sizes/131073.bin",
    b"chain": b"relative",
    b"to-directory": b"../nested",
    b"out-of-tree": b"../../../../../../../../../../../../etc/hostname",
    b"dangling": b"nowhere/at/all",
    b"loop": b"loop",
    b"long": b"x/" * 2047 + b"y",  # 4095 bytes, the longest there is
    b"odd-bytes": b"\xff\xfe target",
}
"""Symbolic links and what they hold. `absolute` is added with the path of the source itself."""

SPARSE = {
    "hole-at-end": (1 * MiB, [(0, 4 * KiB)]),
    "hole-at-start": (1 * MiB, [(1 * MiB - 4 * KiB, 4 * KiB)]),
    "holes-between": (2 * MiB, [(512 * KiB, 4 * KiB), (1536 * KiB + 64 * KiB, 64 * KiB)]),
    "only-hole": (1 * MiB + 13, []),
}
"""Sparse files: logical size, and the (offset, length) of their data, which is that of file 0 there."""

MODES = [0o000, 0o400, 0o200, 0o111, 0o644, 0o666, 0o777, 0o4755, 0o2755, 0o1644]
PLAIN = b"plain text of a small file\n"
XATTR = ("user.dmfs", b"a value")


def build(root: Path, targets: list[str]) -> None:
    """Fill the empty folder `root`, with a folder below `mutable/` for each target."""
    _build_data(root)
    _build_names(root)
    _build_kinds(root)
    _build_programs(root)
    for target in targets:
        folder = root / "mutable" / target
        folder.mkdir(parents=True)
        for name in ("replaced", "unlinked", "truncated"):
            write_file(folder / name, 7, 12 * KiB)
        (folder / "quiet").mkdir()  # changed by no check
        for name in ("quiet/times", "cold"):
            write_file(folder / name, 7, 300_000)
    _allocate(root)
    _set_times(root)


def _build_data(root: Path) -> None:
    (root / "sizes").mkdir()
    for size, name in SIZE_NAMES.items():
        write_file(root / name, SIZE_NUMBERS[size], size)
    (root / "handles").mkdir()
    for number in range(200):
        write_file(root / "handles" / f"{number}", number, 5000)
    (root / "sparse").mkdir()
    for name, (size, data) in SPARSE.items():
        with (root / "sparse" / name).open("wb") as file:
            file.truncate(size)
            for offset, length in data:
                file.seek(offset)
                file.write(content(0, offset, length))
    (root / "plain").write_bytes(PLAIN)


def _build_names(root: Path) -> None:
    (root / "names").mkdir()
    for number, name in enumerate(ODD_NAMES):
        Path(os.fsdecode(os.fsencode(root / "names") + b"/" + name)).write_bytes(b"content %d" % number)
    (root / "links").mkdir()
    for name, target in LINKS.items():
        os.symlink(target, os.fsencode(root / "links") + b"/" + name)
    os.symlink(root / "plain", root / "links" / "absolute")
    for folder in ("first", "second"):
        (root / "hard" / folder).mkdir(parents=True)
    write_file(root / "hard/first/one", 3, 10_000)
    os.link(root / "hard/first/one", root / "hard/second/two")
    write_file(root / "hard/first/single", 4, 10_000)
    (root / "nested/a/b/c/d/e").mkdir(parents=True)
    (root / "nested/a/b/c/d/e/leaf").write_bytes(b"leaf")
    (root / "nested/a/file").write_bytes(b"file")
    (root / "empty").mkdir()
    many = root / "many"
    many.mkdir()
    last_file = ""
    for number in range(MANY):
        name = f"{many}/entry-{number:05d}"
        if number % 1000 == 0:
            os.mkdir(name)
        elif number % 1000 == 1:
            os.symlink("target", name)
        elif number % 4 == 2:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            last_file = name
        else:
            os.link(last_file, name)  # new inodes are what makes a tree slow to build


def _build_kinds(root: Path) -> None:
    (root / "times").mkdir()
    for name in TIMES_NS:
        (root / "times" / name).write_bytes(b"dated")
    (root / "modes").mkdir()
    for mode in MODES:
        path = root / "modes" / f"{mode:04o}"
        path.write_bytes(b"%o" % mode)
        path.chmod(mode)
    for mode in (0o1777, 0o2775, 0o555):
        path = root / "modes" / f"folder-{mode:04o}"
        path.mkdir()
        path.chmod(mode)
    (root / "special").mkdir()
    os.mkfifo(root / "special/fifo")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(root / "special", os.O_RDONLY | os.O_DIRECTORY)
        server.bind(f"/proc/self/fd/{here}/socket")  # the path itself may be longer than the 108 bytes of an address
        os.close(here)
    if os.geteuid() == 0:
        os.mknod(root / "special/null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        os.mknod(root / "special/block", 0o600 | stat.S_IFBLK, os.makedev(259, 70_000))
        owned = root / "special/owned"
        owned.write_bytes(b"somebody else's")
        os.chown(owned, 12_345, 4_000_000_000)
    (root / "xattr").write_bytes(b"has a user attribute")
    with contextlib.suppress(OSError):  # without xattrs here the check compares with that
        os.setxattr(root / "xattr", *XATTR)


def _build_programs(root: Path) -> None:
    (root / "programs").mkdir()
    echo = shutil.which("echo")
    assert echo, "no echo program to copy"
    shutil.copy(echo, root / "programs/echo")
    (root / "programs/script").write_text("#!/bin/sh\necho from the script\n")
    (root / "programs/script").chmod(0o755)
    (root / "programs/pure_module.py").write_text("ANSWER = 42\n")
    shutil.copy(xxhash._xxhash.__file__, root / "programs/extension.so")
    np.save(root / "programs/array.npy", np.arange(100_000, dtype=np.int64))
    with sqlite3.connect(root / "programs/rows.sqlite") as base:
        base.execute("create table rows (number integer primary key, square integer)")
        base.executemany("insert into rows values (?, ?)", ((n, n * n) for n in range(2000)))
    base.close()


def _allocate(root: Path) -> None:
    """Write all data out, or delayed allocation would change st_blocks under the checks."""
    for folder, _, files in os.walk(os.fsencode(root)):
        for name in files:
            path = folder + b"/" + name
            if os.path.isfile(path) and os.lstat(path).st_size:
                fd = os.open(path, os.O_RDONLY)
                os.fdatasync(fd)
                os.close(fd)


def _set_times(root: Path) -> None:
    future = math.ceil(time.time()) * 10**9 + 3600 * 10**9 + 987_654_321
    for folder, folders, files in os.walk(os.fsencode(root), topdown=False):
        if folder.endswith(b"/many"):
            continue
        for name in files + folders:
            path = folder + b"/" + name
            mtime = os.lstat(path).st_mtime_ns
            if folder.endswith(b"/times"):
                mtime = TIMES_NS[os.fsdecode(name)]
            os.utime(path, ns=(max(future, mtime + 1), mtime), follow_symlinks=False)
    os.utime(root, ns=(future, os.stat(root).st_mtime_ns))
