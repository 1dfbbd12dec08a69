"""File systems by their magic numbers."""

import ctypes
import os
from pathlib import Path

import pytest

from dmfs import disks


@pytest.mark.parametrize(
    ("magic", "name", "kind"),
    [
        (0xEF53, "ext4", "disk"),
        (0x58465342, "xfs", "disk"),
        (0x01021994, "tmpfs", "memory"),
        (0x794C7630, "overlayfs", "stacked"),
        (0x6969, "NFS", "network"),
        (0x0BD00BD0, "Lustre", "network"),
        (0x47504653, "GPFS", "network"),
        (0x65735546, "FUSE", "network"),
        (0xFF534D42, "CIFS", "network"),
        (0x19830326, "BeeGFS", "network"),
        (0x00C36400, "Ceph", "network"),
        (0x01021997, "9p", "network"),
        (0x12345678, "0x12345678", None),
    ],
)
def test_kinds(monkeypatch: pytest.MonkeyPatch, magic: int, name: str, kind: disks.Kind | None) -> None:
    monkeypatch.setattr(disks, "_magic", lambda path: magic)
    assert disks.file_system("/") == (name, kind)
    assert disks.is_network_file_system("/") == (name if kind == "network" else None)


def test_the_kernel_is_asked() -> None:
    assert disks._magic("/proc") == 0x9FA0
    if os.path.ismount("/dev/shm"):
        assert disks.file_system("/dev/shm") == ("tmpfs", "memory")


def test_the_sign_of_the_number_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFS's number is negative where f_type is a signed int."""

    class Libc:
        @staticmethod
        def statfs(path: object, buffer: "ctypes.Array[ctypes.c_char]") -> int:
            ctypes.c_long.from_buffer(buffer).value = -0x00ACB2BE
            return 0

    monkeypatch.setattr(disks, "_libc", Libc)
    assert disks.file_system("/").name == "CIFS"


def test_paths_that_do_not_exist_yet(tmp_path: Path) -> None:
    assert disks.existing_parent(str(tmp_path / "a/b")) == str(tmp_path)
    assert disks.existing_parent(str(tmp_path)) == str(tmp_path)
    assert disks.existing_parent("/nowhere at all") == "/"
    assert disks.file_system(str(tmp_path / "a/b")) == disks.file_system(str(tmp_path))


def test_room(tmp_path: Path) -> None:
    room = disks.room(str(tmp_path / "a"))
    st = os.statvfs(tmp_path)
    assert room.total == st.f_blocks * st.f_frsize
    assert 0 <= room.free <= room.total


def test_errors_have_their_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disks, "existing_parent", lambda path: path)
    with pytest.raises(FileNotFoundError):
        disks.file_system(str(tmp_path / "missing"))
