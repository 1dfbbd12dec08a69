"""Files whose every block says which file, version and offset it belongs to, and how to check what was read of them.

A wrong byte is then not only noticed but explained: `explain` says which block of which file was delivered
instead. Plain functions without state; no pytest, so that programs such as tests/doubles/storm.py can use them.
"""

import ctypes
import hashlib
import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

KiB = 1024
MiB = 1024 * KiB

BLOCK = 4 * KiB
_HEADER = struct.Struct("<8sQQQ")  # magic, file number, version, offset of the block
_MAGIC = b"dmfsblk\n"
_POOL = random.Random(20240229).randbytes(MiB)
_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbouring blocks take far places of the pool


def block(number: int, offset: int, version: int = 0) -> bytes:
    """The 4 KiB at `offset` (a multiple of 4 KiB) of file `number`."""
    place = ((number * 1_000_003 + version * 7919 + offset // BLOCK + 1) * _STEP >> 16) % (len(_POOL) - BLOCK)
    return _HEADER.pack(_MAGIC, number, version, offset) + _POOL[place : place + BLOCK - _HEADER.size]


def content(number: int, offset: int, length: int, version: int = 0) -> bytes:
    """`length` bytes at `offset` of file `number`, any alignment."""
    first = offset - offset % BLOCK
    blocks = b"".join(block(number, at, version) for at in range(first, offset + length, BLOCK))
    return blocks[offset - first : offset - first + length]


def version_of(data: bytes) -> int:
    """The version that the first block of a file says it is of; `data` has at least its first 32 bytes."""
    magic, _, version, _ = _HEADER.unpack_from(data)
    assert magic == _MAGIC, f"no block of a file: {data[:32]!r}"
    return int(version)


def write_file(path: Path, number: int, size: int, version: int = 0) -> None:
    """Write the whole file `number` with `size` bytes, in place if it exists."""
    with path.open("wb", buffering=0) as file:
        for offset in range(0, size, MiB):
            file.write(content(number, offset, min(MiB, size - offset), version))


def make_files(folder: Path, sizes: list[int], version: int = 0) -> list[Path]:
    """Files 0, 1, 2... with these sizes, named `00000.bin` and so on, so that the name tells the number."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:05d}.bin" for number in range(len(sizes))]
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        write_file(path, number, size, version)
    return paths


def explain(data: bytes, number: int, offset: int, version: int = 0) -> str | None:
    """None if `data` is what file `number` has at `offset`; else a sentence about the first byte that is not."""
    wanted = content(number, offset, len(data), version)
    if data == wanted:
        return None
    bad = next(i for i, (got, want) in enumerate(zip(data, wanted, strict=True)) if got != want)
    at = offset + bad
    start = at - at % BLOCK if at - at % BLOCK >= offset else at - at % BLOCK + BLOCK
    head = data[start - offset :][: _HEADER.size]
    found = "of no known origin"
    if len(head) == _HEADER.size and head.startswith(_MAGIC):
        _, other, other_version, other_offset = _HEADER.unpack(head)
        found = f"of file {other}, version {other_version}, offset {other_offset}"
    elif not any(data[bad : bad + 64]):
        found = "of zero bytes"
    return f"file {number}, version {version}: byte {at} is wrong; the block at {start} is {found}"


def expect_content(data: bytes, number: int, offset: int, length: int, version: int = 0) -> None:
    """Assert that `data` is exactly the `length` bytes of file `number` at `offset`."""
    assert len(data) == length, f"file {number}: {len(data)} bytes at offset {offset}, not {length}"
    problem = explain(data, number, offset, version)
    assert problem is None, problem


def digest(path: Path, request: int = MiB) -> str:
    """Digest of a file read from start to end by `read` calls of `request` bytes, unbuffered."""
    total = hashlib.blake2b(digest_size=16)
    fd = os.open(path, os.O_RDONLY)
    try:
        while data := os.read(fd, request):
            total.update(data)
    finally:
        os.close(fd)
    return total.hexdigest()


def tree_digests(root: Path) -> dict[str, str]:
    """Digest of every regular file below `root`, by relative path."""
    return {str(p.relative_to(root)): digest(p) for p in sorted(root.rglob("*")) if p.is_file() and not p.is_symlink()}


def drop_pages(path: Path) -> None:
    """Drop the page cache of a file, so that the next read of it is a message to the daemon."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


class RawEntry(NamedTuple):
    """One record of getdents64(2): what readdir(3) and os.scandir hide."""

    name: bytes
    ino: int
    cookie: int  # d_off: where a listing goes on after this entry
    type: int


_RECORD = struct.Struct("=QqHB")  # d_ino, d_off, d_reclen, d_type
_libc = ctypes.CDLL(None, use_errno=True)


def getdents(fd: int, size: int = 32 * KiB) -> list[RawEntry]:
    """One getdents64 call on an open directory; [] at its end."""
    buffer = ctypes.create_string_buffer(size)
    count = _libc.getdents64(fd, buffer, ctypes.c_size_t(size))
    if count < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    records = buffer.raw[:count]
    entries, at = [], 0
    while at < count:
        ino, cookie, length, kind = _RECORD.unpack_from(records, at)
        name = records[at + _RECORD.size : at + length].split(b"\0", 1)[0]
        entries.append(RawEntry(name, ino, cookie, kind))
        at += length
    return entries


def raw_listing(folder: Path | bytes | str, size: int = 32 * KiB) -> list[RawEntry]:
    """All records of a directory, in its order, `.` and `..` with them."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return [entry for chunk in iter_chunks(fd, size) for entry in chunk]
    finally:
        os.close(fd)


def iter_chunks(fd: int, size: int = 32 * KiB) -> Iterator[list[RawEntry]]:
    """The answers of getdents64 on an open directory, one call each, from where it stands to its end."""
    while entries := getdents(fd, size):
        yield entries
