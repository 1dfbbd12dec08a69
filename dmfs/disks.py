"""What kind of file system a path lies on, from the magic number of statfs(2), how much room it has, and whose it is.

Tells local disks from memory, stacked and network file systems. The path need not exist yet: its nearest existing
parent answers. Knows nothing of caches or configuration; the calls block, so a path on a hung file system hangs them.
"""

import ctypes
import os
import stat
from typing import Literal, NamedTuple

Kind = Literal["disk", "memory", "stacked", "network"]

# Numbers from include/uapi/linux/magic.h and, for those that live outside the kernel tree, from coreutils' stat.c.
_FILE_SYSTEMS: dict[int, tuple[str, Kind]] = {
    0x0000EF53: ("ext4", "disk"),  # ext2 and ext3 have the same number
    0x58465342: ("xfs", "disk"),
    0x9123683E: ("btrfs", "disk"),
    0x2FC12FC1: ("zfs", "disk"),
    0xF2F52010: ("f2fs", "disk"),
    0xCA451A4E: ("bcachefs", "disk"),
    0x52654973: ("reiserfs", "disk"),
    0x3153464A: ("jfs", "disk"),
    0x00003434: ("nilfs2", "disk"),
    0x00004D44: ("vfat", "disk"),
    0x2011BAB0: ("exfat", "disk"),
    0x7366746E: ("ntfs3", "disk"),
    0x01021994: ("tmpfs", "memory"),
    0x858458F6: ("ramfs", "memory"),
    0x958458F6: ("hugetlbfs", "memory"),
    0x794C7630: ("overlayfs", "stacked"),
    0x61756673: ("aufs", "stacked"),
    0x0000F15F: ("ecryptfs", "stacked"),
    0x00006969: ("NFS", "network"),
    0x0BD00BD0: ("Lustre", "network"),
    0x47504653: ("GPFS", "network"),
    0x19830326: ("BeeGFS", "network"),
    0x00C36400: ("Ceph", "network"),
    0x20030528: ("OrangeFS", "network"),
    0xAAD7AAEA: ("PanFS", "network"),
    0xFF534D42: ("CIFS", "network"),
    0xFE534D42: ("SMB", "network"),
    0x0000517B: ("SMB", "network"),
    0x65735546: ("FUSE", "network"),  # GlusterFS, sshfs, virtiofs, ...; what is behind it cannot be told from here
    0x01021997: ("9p", "network"),
    0x5346414F: ("AFS", "network"),
    0x6B414653: ("AFS", "network"),
    0x73757245: ("Coda", "network"),
    0x01161970: ("GFS2", "network"),
    0x7461636F: ("OCFS2", "network"),
    0xBEEFDEAD: ("SNFS", "network"),
    0x013111A8: ("IBRIX", "network"),
    0x61636673: ("ACFS", "network"),
    0x786F4256: ("vboxsf", "network"),
    0xBACBACBC: ("vmhgfs", "network"),
}

_libc = ctypes.CDLL(None, use_errno=True)

_STATFS_BYTES = 512  # struct statfs is 120 bytes on 64-bit Linux; f_type is its first member, a long


class FileSystem(NamedTuple):
    """A kind of file system: `name` for people ("ext4", or the number in hex), `kind` None if it is not a known one."""

    name: str
    kind: Kind | None


class Room(NamedTuple):
    """Bytes of a file system: its whole size, and what this user may still write."""

    total: int
    free: int


def existing_parent(path: str) -> str:
    """`path` if it exists, else the nearest of its parents that does."""
    path = os.path.abspath(path)
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def _magic(path: str) -> int:
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.statfs(ctypes.c_char_p(os.fsencode(path)), buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF  # the sign of f_type differs between architectures


def file_system(path: str) -> FileSystem:
    """The file system that `path` lies on, or would lie on. Raises OSError."""
    magic = _magic(existing_parent(path))
    name, kind = _FILE_SYSTEMS.get(magic, (f"{magic:#x}", None))
    return FileSystem(name, kind)


def room(path: str) -> Room:
    """Room of the file system that `path` lies on, or would lie on. Raises OSError."""
    st = os.statvfs(existing_parent(path))
    return Room(st.f_frsize * st.f_blocks, st.f_frsize * st.f_bavail)


def is_network_file_system(path: str) -> str | None:
    """The name of the network file system (or FUSE) that `path` lies on, None if it lies on none. Raises OSError."""
    found = file_system(path)
    return found.name if found.kind == "network" else None


def is_own_directory(path: str) -> bool:
    """True if this is a directory (no link to one) that belongs to this user."""
    try:
        st = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(st.st_mode) and st.st_uid == os.geteuid()
