"""Paths that a user names: the real path of a mountpoint and its daemon, found without touching the mount."""

import os
import shlex

from dmfs import runtime
from dmfs.errors import NotMounted

_MAX_LINKS = 40  # symlinks followed, as many as the kernel follows


def real_mountpoint(path: str) -> str:
    """The absolute real path of a mountpoint. Symlinks are followed, but the mountpoint itself is never asked anything.

    readlink(2) of the root of a mount is refused by the kernel alone, so a mount that hangs does not hang this.
    """
    path = os.path.abspath(path)
    for _ in range(_MAX_LINKS):
        folder, name = os.path.split(path)
        path = os.path.join(os.path.realpath(folder), name) if name else path
        try:
            target = os.readlink(path)
        except OSError:
            break
        path = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return path


def find_daemon(path: str) -> runtime.MountRecord:
    """The record of the daemon of a mountpoint, given by its real path. Raises NotMounted."""
    record = runtime.find(path)
    if record is not None:
        return record
    from dmfs.fuse import mounting  # for this sentence only

    found = mounting.find_mount(path)
    if found is not None and found.fs_type == "fuse.dmfs":
        raise NotMounted(
            f"{path} is a mount of dmfs, but no daemon of this user serves it: "
            f"unmount it with: dmfs umount {shlex.quote(path)}"
        )
    raise NotMounted(f"{path} is not mounted by dmfs: dmfs status lists the mounts of this user")


def is_inside(path: str, folder: str) -> bool:
    """True if `path` is `folder` or below it, both being real paths."""
    return path == folder or path.startswith(os.path.join(folder, ""))
