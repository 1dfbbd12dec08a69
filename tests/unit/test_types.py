"""Attributes and keys: exact for every time stamp, and never the same for two different things."""

import itertools
import os
import stat
from pathlib import Path

import pytest

from dmfs.types import ATTRIBUTES_SIZE, FileVersion, file_key, hex_key, pack_attributes, unpack_attributes

VERSION = FileVersion(size=10, mtime_ns=1_500_000_000_123_456_789, ctime_ns=1_600_000_000_000_000_001)
DATASET = b"/data/set"

TIMES = [
    -1,
    -1_500_000_000,
    -86_400 * 365 * 10**9,
    0,
    1,
    2**31 * 10**9,
    (2**32 - 1) * 10**9,
    2**33 * 10**9 + 999_999_999,
]


@pytest.mark.parametrize("mtime_ns", TIMES)
def test_times_are_kept_exactly(tmp_path: Path, mtime_ns: int) -> None:
    """C10: before 1970, at 0, and far in the future."""
    path = tmp_path / "f"
    path.touch()
    os.utime(path, ns=(mtime_ns, mtime_ns))
    st = path.lstat()
    seen = unpack_attributes(pack_attributes(st))
    assert (seen.mtime_ns, seen.ctime_ns) == (st.st_mtime_ns, st.st_ctime_ns)
    assert seen.atime * 10**9 + seen.atime_nsec == st.st_atime_ns
    for nanoseconds in (seen.atime_nsec, seen.mtime_nsec, seen.ctime_nsec):
        assert 0 <= nanoseconds < 10**9


def test_attributes_have_the_kernels_layout() -> None:
    assert ATTRIBUTES_SIZE == 88


@pytest.mark.parametrize("kind", ["file", "directory", "symlink", "fifo", "device"])
def test_attributes_of_each_kind(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "device":
        path = Path("/dev/null")
    elif kind == "directory":
        path.mkdir()
    elif kind == "symlink":
        path.symlink_to("nowhere")
    elif kind == "fifo":
        os.mkfifo(path, 0o640)
    else:
        path.write_bytes(b"12345")
    st = path.lstat()
    seen = unpack_attributes(pack_attributes(st))
    for name in ("ino", "size", "blocks", "mode", "nlink", "uid", "gid", "rdev", "blksize"):
        assert getattr(seen, name) == getattr(st, f"st_{name}"), name
    assert seen.is_regular is stat.S_ISREG(st.st_mode)
    assert seen.is_directory is stat.S_ISDIR(st.st_mode)


def test_keys_of_different_things_differ() -> None:
    versions = [
        VERSION,
        VERSION._replace(size=11),
        VERSION._replace(mtime_ns=VERSION.mtime_ns + 1),
        VERSION._replace(ctime_ns=VERSION.ctime_ns + 1),
        VERSION._replace(mtime_ns=-1),
    ]
    paths = [b"a", b"b", b"a/b", b"A", b"a\0b", b"i7", b"p", "\u00e9".encode(), "e\u0301".encode(), b"\xe9", b""]
    datasets = [DATASET, b"/data/se", b"/data/set/a"]
    keys = {file_key(dataset, path, version) for dataset, path, version in itertools.product(datasets, paths, versions)}
    assert len(keys) == len(datasets) * len(paths) * len(versions)
    assert {len(key) for key in keys} == {16}


def test_superseded_version_shows_in_the_key() -> None:
    """Same first half, other second half."""
    old, new = file_key(DATASET, b"a", VERSION), file_key(DATASET, b"a", VERSION._replace(size=11))
    assert old[:8] == new[:8]
    assert old[8:] != new[8:]
    assert file_key(DATASET, b"b", VERSION)[8:] == old[8:]


def test_names_of_a_hard_linked_file_share_a_key() -> None:
    keys = {file_key(DATASET, path, VERSION, shared_ino=7) for path in (b"a", b"b/c")}
    assert len(keys) == 1
    assert keys.isdisjoint({file_key(DATASET, b"a", VERSION), file_key(DATASET, b"a", VERSION, shared_ino=8)})
    assert keys.isdisjoint({file_key(DATASET, b"7", VERSION), file_key(DATASET, b"i7", VERSION)})


def test_version_from_mtime_leaves_ctime_out() -> None:
    other = VERSION._replace(ctime_ns=1)
    assert file_key(DATASET, b"a", VERSION, version_from="mtime") == file_key(
        DATASET, b"a", other, version_from="mtime"
    )
    assert file_key(DATASET, b"a", VERSION) != file_key(DATASET, b"a", other)
    changed = VERSION._replace(mtime_ns=1)
    assert file_key(DATASET, b"a", VERSION, version_from="mtime") != file_key(
        DATASET, b"a", changed, version_from="mtime"
    )


def test_key_is_the_same_everywhere() -> None:
    """Copies outlive the daemon, and nodes speak of keys: this value must never change without a new format."""
    assert hex_key(file_key(DATASET, b"a/b.jpg", VERSION)) == "b1fbdb115a7bde1fde118d67a325f04f"
