"""Which files of a mount `dmfs warm` is about: from the paths a user gives to the files below them, one by one.

All of it looks into the mount, which may hang, so it is run in a child (bounded.py). Nothing is kept: directories are
read as their files are taken, and one is open for each level of depth.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple

from dmfs.cli.paths import is_inside
from dmfs.errors import DaemonUnresponsive, PathError

_COUNT_INTERVAL = 0.2  # seconds between two reports of `count`
_GONE = (errno.ENOTCONN, errno.ECONNABORTED)  # the mount is dead, or aborted


class Seen(NamedTuple):
    """Something found: a file with its size in bytes, what is none and skipped, or what could not be looked at.

    The path is relative to the mountpoint, undecodable bytes as os.fsdecode has them.
    """

    kind: Literal["file", "skipped", "failed"]
    path: str
    size: int = 0
    reason: str = ""


class Count(NamedTuple):
    """Files counted so far, and their bytes together."""

    files: int
    bytes: int
    is_complete: bool


def count(mountpoint: str, device: int, paths: tuple[str, ...]) -> Iterator[Count]:
    """How much `walk` will find, as it becomes known."""
    files = size = 0
    last = time.monotonic()
    for seen in walk(mountpoint, device, paths):
        if seen.kind == "file":
            files += 1
            size += seen.size
        if time.monotonic() - last > _COUNT_INTERVAL:
            yield Count(files, size, False)
            last = time.monotonic()
    yield Count(files, size, True)


def walk(mountpoint: str, device: int, paths: tuple[str, ...]) -> Iterator[Seen]:
    """What is at and below the paths, in the order of the directories. Each file has been looked up through the mount.

    Args:
        mountpoint: its real path.
        device: st_dev of the mount; what is mounted inside it is skipped.
        paths: see `dmfs warm --help`. Symbolic links in them are followed, those found below them are not.

    Raises:
        PathError: a path is not in the mount or does not exist; nothing has been yielded then.
        DaemonUnresponsive: the daemon is gone.
    """
    tops = [_resolve(mountpoint, path) for path in paths]
    for top in tops:
        yield from _below(top, mountpoint, device)


def _resolve(mountpoint: str, path: str) -> str:
    """The real path of what a user gave."""
    real = os.path.realpath(path)
    if not is_inside(real, mountpoint) and not os.path.isabs(path):
        real = os.path.realpath(os.path.join(mountpoint, path))
    if not is_inside(real, mountpoint):
        raise PathError(f"{path} is not in the mount {mountpoint}: name files and directories in it")
    try:
        os.lstat(real)
    except (FileNotFoundError, NotADirectoryError):
        raise PathError(f"{real} does not exist: name files and directories in the mount") from None
    except OSError as exc:
        _check_daemon(exc, mountpoint)  # other errors are the source's, and come again below
    return real


def _check_daemon(exc: OSError, mountpoint: str) -> None:
    if exc.errno in _GONE:
        raise DaemonUnresponsive(
            f"the daemon of {mountpoint} is gone: mount again, and the copies made are found again"
        )


def _below(top: str, mountpoint: str, device: int) -> Iterator[Seen]:
    root = len(os.path.join(mountpoint, ""))
    # Directories from the top down to where we are, each with what is left of it.
    levels: list[tuple[str, Iterator[str]]] = [(top, iter([top]))]
    while levels:
        path, names = levels[-1]
        try:
            found = next(names, None)
            if found is None:
                levels.pop()
                continue
            path = found
            st = os.lstat(path)
        except OSError as exc:
            _check_daemon(exc, mountpoint)
            if exc.errno not in (errno.ENOENT, errno.ESTALE):  # else it has just been removed
                yield Seen("failed", path[root:], reason=exc.strerror or repr(exc))
            continue
        if stat.S_ISREG(st.st_mode):
            yield Seen("file", path[root:], st.st_size)
        elif stat.S_ISDIR(st.st_mode) and st.st_dev == device:
            levels.append((path, _entries(path)))
        else:
            yield Seen("skipped", path[root:])


def _entries(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry.path
