"""Paths that a user names: the real path of a mountpoint, found without touching what is mounted there."""

import os

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


def is_inside(path: str, folder: str) -> bool:
    """True if `path` is `folder` or below it, both being real paths."""
    return path == folder or path.startswith(os.path.join(folder, ""))
