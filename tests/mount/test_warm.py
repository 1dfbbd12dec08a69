"""`dmfs warm` on real mounts: what it costs the source, what it saves the readers, and how it ends."""

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.badsrc import BadSource
from tests.faults.conftest import bad_source  # noqa: F401  (a fixture)
from tests.support.files import expect_content, make_files, write_file
from tests.support.mounts import WAYS, DmfsMount, MountFactory
from tests.support.waiting import wait_until

KiB = 1024
MiB = 1024 * KiB

SIZES = [100 * KiB, 1, 0, 9 * MiB + 1, 4 * MiB, *[20 * KiB] * 300]


def warm(mount: DmfsMount, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the counts."""
    done = mount.command("warm", str(mount.view), *arguments, "--json")
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def read_all(folder: Path, sizes: list[int]) -> None:
    for number, (path, size) in enumerate(zip(sorted(folder.iterdir()), sizes, strict=True)):
        expect_content(path.read_bytes(), number, 0, size)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_copied_once_and_found_there(tmp_path: Path, dmfs_mount: MountFactory, way: str) -> None:
    make_files(tmp_path / "set/files", SIZES)
    mount = dmfs_mount(tmp_path / "set", way=way)
    code, counts = warm(mount, ".")
    assert code == 0
    assert (counts["files"], counts["bytes"], counts["failures"]) == (len(SIZES), sum(SIZES), 0)
    assert (counts["fetched"], counts["fetched_bytes"]) == (len(SIZES) - 1, sum(SIZES))  # an empty one needs no copy
    assert len(mount.copies()) == len(SIZES) - 1
    before = mount.status()["source"]
    assert warm(mount, "files")[1]["fetched"] == 0
    read_all(mount.view / "files", SIZES)
    after = mount.status()["source"]
    assert [after[name] - before[name] for name in ("opens", "reads", "bytes")] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pagecache", "plain"])
def test_pushed_files_are_read_without_a_message(tmp_path: Path, dmfs_mount: MountFactory, way: str) -> None:
    make_files(tmp_path / "set/files", SIZES)
    mount = dmfs_mount(tmp_path / "set", way=way)
    code, counts = warm(mount, ".", "--push")
    assert code == 0
    assert (counts["pushed"], counts["pushed_bytes"]) == (len(SIZES) - 1, sum(SIZES))
    read_all(mount.view / "files", SIZES)
    served = mount.status()["served"]
    assert [served[place]["reads"] for place in ("local", "source")] == [0, 0]


@pytest.mark.parametrize("way", ["passthrough", "pyfuse3"])
def test_where_nothing_can_be_pushed(tmp_path: Path, dmfs_mount: MountFactory, way: str) -> None:
    make_files(tmp_path / "set", [1])
    mount = dmfs_mount(tmp_path / "set", way=way)
    done = mount.command("warm", str(mount.view), ".", "--push")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("dmfs: ")
    assert "warm without --push" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_undecodable_names(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    folder = os.fsencode(tmp_path) + b"/set/\xff\xfe"
    os.makedirs(folder)
    for name in (b"\x80", b"a\nb", "ä".encode()):
        Path(os.fsdecode(os.path.join(folder, name))).write_bytes(name)
    mount = dmfs_mount(tmp_path / "set")
    code, counts = warm(mount, os.fsdecode(b"\xff\xfe"))
    assert (code, counts["fetched"]) == (0, 3)
    assert len(mount.copies()) == 3


def test_no_room(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    make_files(tmp_path / "set", [MiB] * 4)
    mount = dmfs_mount(tmp_path / "set", caches=[f"{tmp_path}/cache:{2 * MiB + 64 * KiB}"])
    code, counts = warm(mount, ".")
    assert (code, counts["files"], counts["no_room"], counts["failures"]) == (0, 2, 2, 0)


def test_errors_of_the_source_are_named(
    tmp_path: Path,
    bad_source: Callable[..., BadSource],  # noqa: F811
    dmfs_mount: MountFactory,
) -> None:
    make_files(tmp_path / "set", [KiB] * 4)
    (tmp_path / "set/folder").mkdir()
    write_file(tmp_path / "set/folder/file", 0, 10)
    source = bad_source(tmp_path / "set")
    source.rule("OPEN", "00001.bin", error=errno.EIO)
    source.rule("READ", "00002.bin", error=errno.ETIMEDOUT)
    source.rule("OPENDIR", "folder", error=errno.EACCES)
    mount = dmfs_mount(source.mountpoint)
    code, counts = warm(mount, ".")
    assert (code, counts["files"], counts["failures"]) == (1, 2, 3)
    assert sorted((failure["path"], failure["reason"]) for failure in counts["failed"]) == [
        ("00001.bin", os.strerror(errno.EIO)),
        ("00002.bin", os.strerror(errno.ETIMEDOUT)),
        ("folder", os.strerror(errno.EACCES)),
    ]


@pytest.mark.parametrize("operation", ["READ", "LOOKUP"])
def test_ctrl_c_while_the_source_hangs(
    tmp_path: Path,
    bad_source: Callable[..., BadSource],  # noqa: F811
    dmfs_mount: MountFactory,
    operation: str,
) -> None:
    """In the daemon, or in the command's own look into the mount. The mount lives on."""
    make_files(tmp_path / "set", [KiB] * 4)
    source = bad_source(tmp_path / "set")
    mount = dmfs_mount(source.mountpoint)
    source.rule(operation, "00000.bin", hangs=True)
    process = mount.spawn("warm", str(mount.view), "00000.bin")
    wait_until(source.hanging, 5, f"a {operation} hangs")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 130
    expect_content((mount.view / "00003.bin").read_bytes(), 3, 0, KiB)
    source.clear()
    assert warm(mount, ".")[1]["files"] == 4
