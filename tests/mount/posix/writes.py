"""POSIX checks: every attempt to change something, with the errno of a native read-only mount (case C26)."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable

from tests.mount.posix.target import Registry, Target, raises_errno
from tests.mount.posix.tree import DENSE, PLAIN, SIZE_NAMES

writes = Registry()


def _refused(name: str, code: int, attempt: Callable[[str], object]) -> None:
    """Register the check that `attempt`, given the path of the view, fails with `code`."""

    def check(target: Target) -> None:
        with raises_errno(code):
            result = attempt(str(target.view))
            if isinstance(result, int):
                os.close(result)  # it opened something, which the check is about to report

    check.__name__ = name
    writes.add(check)


def _open(flags: int, name: str) -> Callable[[str], int]:
    return lambda view: os.open(f"{view}/{name}", flags, 0o644)


_refused("open_to_write", errno.EROFS, _open(os.O_RDWR, "plain"))
_refused("open_write_only", errno.EROFS, _open(os.O_WRONLY, "plain"))
_refused("open_to_append", errno.EROFS, _open(os.O_WRONLY | os.O_APPEND, "plain"))
_refused("open_truncating", errno.EROFS, _open(os.O_RDONLY | os.O_TRUNC, "plain"))
_refused("open_creating", errno.EROFS, _open(os.O_RDONLY | os.O_CREAT, "new-name"))
_refused("open_creating_to_write", errno.EROFS, _open(os.O_RDWR | os.O_CREAT, "nested/new-name"))
_refused("open_creating_exclusively_what_exists", errno.EEXIST, _open(os.O_RDWR | os.O_CREAT | os.O_EXCL, "plain"))
_refused("open_creating_exclusively_new", errno.EROFS, _open(os.O_RDWR | os.O_CREAT | os.O_EXCL, "new-name"))
_refused("open_temporary", errno.EROFS, _open(os.O_RDWR | os.O_TMPFILE, "nested"))
_refused("open_missing_to_write", errno.ENOENT, _open(os.O_RDWR, "missing"))
_refused("open_directory_to_write", errno.EISDIR, _open(os.O_RDWR, "nested"))
_refused("open_creating_a_directory_name", errno.EISDIR, _open(os.O_RDWR | os.O_CREAT, "nested"))

_refused("mkdir_existing", errno.EEXIST, lambda view: os.mkdir(f"{view}/nested"))
_refused("mkdir_existing_file", errno.EEXIST, lambda view: os.mkdir(f"{view}/plain"))
_refused("mkdir_new", errno.EROFS, lambda view: os.mkdir(f"{view}/new-name"))
_refused("mkdir_below_missing", errno.ENOENT, lambda view: os.mkdir(f"{view}/missing/new-name"))
_refused("mknod_new", errno.EROFS, lambda view: os.mknod(f"{view}/new-name"))
_refused("mkfifo_new", errno.EROFS, lambda view: os.mkfifo(f"{view}/new-name"))
_refused("symlink_new", errno.EROFS, lambda view: os.symlink("target", f"{view}/new-name"))
_refused("symlink_existing", errno.EEXIST, lambda view: os.symlink("target", f"{view}/plain"))
_refused("link_new", errno.EROFS, lambda view: os.link(f"{view}/plain", f"{view}/new-name"))
_refused("link_existing", errno.EEXIST, lambda view: os.link(f"{view}/plain", f"{view}/xattr"))

_refused("unlink_existing", errno.EROFS, lambda view: os.unlink(f"{view}/plain"))
_refused("unlink_missing", errno.EROFS, lambda view: os.unlink(f"{view}/missing"))
_refused("rmdir_existing", errno.EROFS, lambda view: os.rmdir(f"{view}/empty"))
_refused("rmdir_missing", errno.EROFS, lambda view: os.rmdir(f"{view}/missing"))
_refused("rename_existing", errno.EROFS, lambda view: os.rename(f"{view}/plain", f"{view}/new-name"))
_refused("rename_over_existing", errno.EROFS, lambda view: os.replace(f"{view}/plain", f"{view}/xattr"))
_refused("rename_missing", errno.EROFS, lambda view: os.rename(f"{view}/missing", f"{view}/new-name"))
_refused("rename_directory", errno.EROFS, lambda view: os.rename(f"{view}/empty", f"{view}/nested/empty"))

_refused("utime", errno.EROFS, lambda view: os.utime(f"{view}/plain"))
_refused("utime_of_a_link", errno.EROFS, lambda view: os.utime(f"{view}/links/dangling", follow_symlinks=False))
_refused("chmod", errno.EROFS, lambda view: os.chmod(f"{view}/plain", 0o600))
_refused("chown", errno.EROFS, lambda view: os.chown(f"{view}/plain", 1, 1))
_refused("lchown", errno.EROFS, lambda view: os.lchown(f"{view}/links/dangling", 1, 1))
_refused("truncate", errno.EROFS, lambda view: os.truncate(f"{view}/plain", 1))
_refused("setxattr", errno.EROFS, lambda view: os.setxattr(f"{view}/plain", "user.new", b"x"))
_refused("removexattr", errno.EROFS, lambda view: os.removexattr(f"{view}/xattr", "user.dmfs"))


def _on_descriptor(operation: Callable[[int], object]) -> Callable[[str], None]:
    def attempt(view: str) -> None:
        fd = os.open(f"{view}/{SIZE_NAMES[DENSE]}", os.O_RDONLY)
        try:
            operation(fd)
        finally:
            os.close(fd)

    return attempt


_refused("ftruncate", errno.EINVAL, _on_descriptor(lambda fd: os.ftruncate(fd, 1)))
_refused("posix_fallocate", errno.EBADF, _on_descriptor(lambda fd: os.posix_fallocate(fd, 0, 10)))
_refused("fchmod", errno.EROFS, _on_descriptor(lambda fd: os.fchmod(fd, 0o600)))
_refused("fchown", errno.EROFS, _on_descriptor(lambda fd: os.fchown(fd, 1, 1)))
_refused("futimens", errno.EROFS, _on_descriptor(lambda fd: os.utime(fd)))
_refused("fsetxattr", errno.EROFS, _on_descriptor(lambda fd: os.setxattr(fd, "user.new", b"x")))
_refused("write_lock", errno.EBADF, _on_descriptor(lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX)))


@writes.add
def open_creating_what_exists(target: Target) -> None:
    fd = os.open(target.view / "plain", os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        assert os.read(fd, 100) == PLAIN
    finally:
        os.close(fd)


@writes.add
def makedirs_of_what_exists(target: Target) -> None:
    os.makedirs(target.view / "nested/a/b", exist_ok=True)
    with raises_errno(errno.EEXIST):
        os.makedirs(target.view / "nested/a/b")
    with raises_errno(errno.EROFS):
        os.makedirs(target.view / "nested/new/b", exist_ok=True)


@writes.add
def access_as_the_superuser(target: Target) -> None:
    assert os.access(target.view / "plain", os.R_OK)
    assert os.access(target.view / "programs/echo", os.X_OK)
    assert os.access(target.view / "plain", os.F_OK)
    assert not os.access(target.view / "plain", os.W_OK)
    assert not os.access(target.view / "nested", os.W_OK)
    assert not os.access(target.view / "plain", os.X_OK), "no execute bit, so not even root may run it"
    assert not os.access(target.view / "missing", os.F_OK)


@writes.add
def flock_shared_and_exclusive(target: Target) -> None:
    path = target.view / SIZE_NAMES[DENSE]
    first, second = os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(first, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(second, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with raises_errno(errno.EWOULDBLOCK):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(first, fcntl.LOCK_UN)
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with raises_errno(errno.EWOULDBLOCK):
            fcntl.flock(first, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(first)
        os.close(second)
    again = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the locks went with their descriptors
    finally:
        os.close(again)


@writes.add
def flock_between_processes(target: Target) -> None:
    path = target.view / "plain"
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_SH | fcntl.LOCK_NB)"
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        child = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
        assert "BlockingIOError" in child.stderr, f"another process got the lock: {child}"
    subprocess.run([sys.executable, "-c", code, path], check=True)


@writes.add
def read_locks_of_fcntl(target: Target) -> None:
    with (target.view / "plain").open("rb") as file:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 10, 5)
        code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1]), fcntl.LOCK_SH | fcntl.LOCK_NB)"
        subprocess.run([sys.executable, "-c", code, target.view / "plain"], check=True)
        fcntl.lockf(file, fcntl.LOCK_UN)
