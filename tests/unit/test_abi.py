"""The structures of the kernel's protocol: sizes as in include/uapi/linux/fuse.h, and what goes in comes out."""

import os
import struct

import pytest

from dmfs.fuse import abi
from dmfs.types import ATTRIBUTES_SIZE, Stat, pack_attributes, unpack_attributes

ATTRIBUTES = bytes(range(88))


def message(opcode: int, body: bytes) -> bytes:
    return abi.IN_HEADER.pack(40 + len(body), opcode, 2, 1, 0, 0, 4711, 0, 0) + body


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (abi.IN_HEADER, 40),
        (abi.OUT_HEADER, 16),
        (abi.FORGET_IN, 8),
        (abi.GETATTR_IN, 16),
        (abi.OPEN_IN, 8),
        (abi.READ_IN, 40),
        (abi.RELEASE_IN, 24),
        (abi.FLUSH_IN, 24),
        (abi.GETXATTR_IN, 8),
        (abi.ACCESS_IN, 8),
        (abi.INTERRUPT_IN, 8),
        (abi.LSEEK_IN, 24),
        (abi.ENTRY_OUT, 128),
        (abi.ATTR_OUT, 104),
        (abi.OPEN_OUT, 16),
        (abi.STATFS_OUT, 80),
        (abi.GETXATTR_OUT, 8),
        (abi.LSEEK_OUT, 8),
    ],
)
def test_sizes_of_the_header(layout: struct.Struct, size: int) -> None:
    assert layout.size == size


def test_attributes_fit_entry_and_attr() -> None:
    assert ATTRIBUTES_SIZE == 88
    assert abi.ENTRY_OUT.size - 40 == ATTRIBUTES_SIZE
    assert abi.ATTR_OUT.size - 16 == ATTRIBUTES_SIZE


def test_opcode_names() -> None:
    opcodes = {
        name[5:]: value
        for name, value in vars(abi).items()
        if name.startswith("FUSE_") and abi.OPCODE_NAMES.get(value) == name[5:]
    }
    assert len(opcodes) == len(abi.OPCODE_NAMES) == 51  # 1 to 53 without 7 and 19
    assert opcodes["LOOKUP"] == 1
    assert opcodes["READ"] == 15
    assert opcodes["STATX"] == 52
    assert set(abi.OPCODE_NAMES) >= abi.MODIFYING | abi.WITHOUT_REPLY
    assert not abi.MODIFYING & abi.WITHOUT_REPLY


def test_init_old_kernel_sends_16_bytes() -> None:
    got = abi.unpack_init(message(abi.FUSE_INIT, struct.pack("=IIII", 7, 31, 131072, abi.FUSE_ASYNC_READ)))
    assert got == (7, 31, 131072, abi.FUSE_ASYNC_READ)


def test_init_new_kernel_sends_flags2() -> None:
    body = struct.pack("=5I", 7, 45, 131072, abi.FUSE_INIT_EXT, abi.FUSE_PASSTHROUGH >> 32) + bytes(44)
    assert len(body) == 64
    assert abi.unpack_init(message(abi.FUSE_INIT, body)).flags == abi.FUSE_INIT_EXT | abi.FUSE_PASSTHROUGH


def test_init_flags2_without_init_ext_is_not_read() -> None:
    body = struct.pack("=5I", 7, 45, 0, 1, 0xFFFFFFFF) + bytes(44)
    assert abi.unpack_init(message(abi.FUSE_INIT, body)).flags == 1


def test_init_out_fields_at_their_offsets() -> None:
    out = abi.pack_init_out(
        minor=36,
        max_readahead=1,
        flags=abi.FUSE_ASYNC_READ | abi.FUSE_DIRECT_IO_ALLOW_MMAP,
        max_background=3,
        congestion_threshold=4,
        max_write=5,
        time_gran=6,
        max_pages=7,
        map_alignment=8,
        max_stack_depth=9,
        request_timeout=10,
    )
    assert len(out) == 64
    assert struct.unpack_from("=4I", out) == (7, 36, 1, abi.FUSE_ASYNC_READ | abi.FUSE_INIT_EXT)
    assert struct.unpack_from("=HHIIHH", out, 16) == (3, 4, 5, 6, 7, 8)
    assert struct.unpack_from("=IIH", out, 32) == (1 << 4, 9, 10)
    assert out[42:] == bytes(22)


def test_init_out_without_upper_flags_does_not_claim_init_ext() -> None:
    out = abi.pack_init_out(minor=31, max_readahead=0, flags=1, max_background=1, congestion_threshold=1)
    assert struct.unpack_from("=I", out, 12) == (1,)


def test_error_reply() -> None:
    assert abi.OUT_HEADER.unpack(abi.pack_error(2**63 + 1, 5)) == (16, -5, 2**63 + 1)


def test_name() -> None:
    assert abi.unpack_name(message(abi.FUSE_LOOKUP, b"\xff caf\xe9\0")) == b"\xff caf\xe9"
    xattr = message(abi.FUSE_GETXATTR, abi.GETXATTR_IN.pack(64, 0) + b"user.x\0")
    assert abi.unpack_name(xattr, abi.BODY + abi.GETXATTR_IN.size) == b"user.x"


def test_batch_forget() -> None:
    pairs = [(5, 1), (2**64 - 1, 3)]
    body = struct.pack("=II", 2, 0) + b"".join(struct.pack("=QQ", *pair) for pair in pairs)
    assert list(abi.unpack_batch_forget(message(abi.FUSE_BATCH_FORGET, body))) == pairs


@pytest.mark.parametrize("unpack", [abi.unpack_init, abi.unpack_name, abi.unpack_batch_forget])
def test_truncated_bodies(unpack: object) -> None:
    assert callable(unpack)
    with pytest.raises(abi.ProtocolError):
        unpack(message(0, b"\xff\xff\xff"))


def test_lying_batch_forget() -> None:
    with pytest.raises(abi.ProtocolError):
        abi.unpack_batch_forget(message(abi.FUSE_BATCH_FORGET, struct.pack("=IIQQ", 0xFFFFFFFF, 0, 1, 1)))


@pytest.mark.parametrize("cut", [0, 1, 39])
def test_truncated_header_and_read(cut: int) -> None:
    with pytest.raises(abi.ProtocolError):
        abi.IN_HEADER.unpack_from(bytes(cut))
    with pytest.raises(abi.ProtocolError):
        abi.READ_IN.unpack_from(message(abi.FUSE_READ, bytes(cut)), abi.BODY)


@pytest.mark.parametrize(
    ("ttl", "expected"),
    [
        (0.0, (0, 0)),
        (-1.5, (0, 0)),
        (float("-inf"), (0, 0)),
        (1, (1, 0)),
        (0.25, (0, 250_000_000)),
        (3600.5, (3600, 500_000_000)),
        (float("inf"), (1 << 31, 0)),
        (1e300, (1 << 31, 0)),
        (0.9999999999, (0, 999_999_999)),
    ],
)
def test_ttl(ttl: float, expected: tuple[int, int]) -> None:
    assert struct.unpack_from("=QI", abi.pack_attr(ATTRIBUTES, ttl)) == expected


def test_entry() -> None:
    out = abi.pack_entry(7, ATTRIBUTES, 1.5, 2.25, generation=9)
    assert abi.ENTRY_OUT.unpack(out) == (7, 9, 1, 2, 500_000_000, 250_000_000, ATTRIBUTES)
    same = abi.pack_entry(7, ATTRIBUTES, 1.5, 1.5)
    assert abi.ENTRY_OUT.unpack(same) == (7, 0, 1, 1, 500_000_000, 500_000_000, ATTRIBUTES)


def test_negative_entry() -> None:
    out = abi.pack_negative_entry(1.5)
    assert struct.unpack_from("=QQQQII", out) == (0, 0, 1, 0, 500_000_000, 0)
    assert out[40:] == bytes(88)
    assert not any(abi.NULL_ENTRY)
    assert len(abi.NULL_ENTRY) == 128


def test_attributes_with_times_before_1970(tmp_path: object) -> None:
    path = os.path.join(str(tmp_path), "old")
    with open(path, "wb"):
        os.utime(path, ns=(-1, -1_500_000_000))
    fields = unpack_attributes(abi.pack_attr(pack_attributes(os.stat(path)), 1)[16:])
    assert isinstance(fields, Stat)
    assert (fields.atime, fields.atime_nsec) == (-1, 999_999_999)
    assert (fields.mtime, fields.mtime_nsec) == (-2, 500_000_000)


def test_statfs() -> None:
    st = os.statvfs("/")
    out = abi.pack_statfs(st)
    assert struct.unpack_from("=5Q3I", out) == (
        st.f_blocks,
        st.f_bfree,
        st.f_bavail,
        st.f_files,
        st.f_ffree,
        st.f_bsize,
        st.f_namemax,
        st.f_frsize,
    )
    assert out[52:] == bytes(28)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 255])
def test_dirent_padding_and_offsets(length: int) -> None:
    name = b"n" * length
    record = abi.pack_dirent(2**64 - 1, 3, 8, name)
    assert len(record) == abi.dirent_size(name)
    assert len(record) % 8 == 0
    assert struct.unpack_from("=QQII", record) == (2**64 - 1, 3, length, 8)
    assert record[24 : 24 + length] == name
    assert record[24 + length :] == bytes(-(24 + length) % 8)

    plus = abi.pack_direntplus(abi.NULL_ENTRY, 1, 3, 8, name)
    assert len(plus) == 128 + len(record)
    assert plus[:128] == abi.NULL_ENTRY
    assert plus[128:] == abi.pack_dirent(1, 3, 8, name)
