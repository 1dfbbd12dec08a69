"""Mounting, unmounting, aborting, and the mount table. No protocol: what is said over /dev/fuse is kernel.py's matter.

Used by the daemon, the command line and the test file systems. Plain blocking functions without state. None of them,
`is_dead` excepted, ever touches what lies inside a FUSE mount: whoever serves it may hang, or be the caller itself.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import NamedTuple

from dmfs import privileges
from dmfs.errors import FuseUnavailable, MountpointError, UserError

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MNT_FORCE = 1
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

DEVICE = "/dev/fuse"
FUSE_CONF = "/etc/fuse.conf"
CONNECTIONS = "/sys/fs/fuse/connections"
SYSCTL = "/proc/sys/fs/fuse"
_STANDARD_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_HELPER_TIMEOUT = 30.0  # seconds for fusermount3, which makes two system calls
_DEAD_TIMEOUT = 2.0  # seconds `is_dead` waits for an answer
_MAX_LINKS = 40  # symlinks followed by `find_mount`, as many as the kernel follows

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]


class MountInfo(NamedTuple):
    """One line of /proc/self/mountinfo. Paths hold undecodable bytes as os.fsdecode does.

    Attributes:
        device: "major:minor".
        owner, group: ids of the user whom a FUSE mount is for; None for other file systems.
    """

    mount_id: int
    parent_id: int
    device: str
    mountpoint: str
    fs_type: str
    source: str
    owner: int | None = None
    group: int | None = None


class Process(NamedTuple):
    """A process, named as in /proc/PID/comm."""

    pid: int
    name: str


def mount(
    mountpoint: str, *, fsname: str, allow_other: bool, subtype: str = "dmfs", readahead_kib: int | None = None
) -> int:
    """Mount a read-only FUSE file system for the user of this process, and return the descriptor of its connection.

    The descriptor is close-on-exec (a child that kept it would turn a dead mount into a hanging one) and non-blocking.
    The caller owns it; closing it ends the connection but leaves the mount, dead, until `unmount`.

    Args:
        mountpoint: the absolute real path.
        fsname: the source that the mount table shows; any characters.
        subtype: the mount table's type is "fuse." and this.
        readahead_kib: set the kernel's readahead, where that may be done; the answer to INIT has to allow as much.

    Raises:
        FuseUnavailable: FUSE can't be used here, or not like this.
        MountpointError: the mountpoint is not a directory or may not be mounted on.
    """
    device = _open_device()
    try:
        if privileges.has_sys_admin() and _mount_privileged(device, mountpoint, fsname, allow_other, subtype):
            if readahead_kib is not None:
                set_readahead(mountpoint, readahead_kib)
            return device
    except BaseException:
        os.close(device)
        raise
    os.close(device)
    return _mount_with_helper(mountpoint, fsname, allow_other, subtype)


def check_available(*, allow_other: bool) -> None:
    """Look at what `mount` will need, as far as it can be told beforehand. Raises FuseUnavailable."""
    os.close(_open_device())
    if privileges.has_sys_admin():
        return
    _find_helper()
    if allow_other and os.geteuid() != 0 and not _is_allow_other_permitted():
        raise FuseUnavailable(_ALLOW_OTHER_REMEDY)


def request_timeout() -> int:
    """Seconds after which this kernel aborts a whole mount because one request was not answered; 0: never.

    fs.fuse.max_request_timeout and fs.fuse.default_request_timeout, Linux 6.14.
    """
    limits = []
    for name in ("max_request_timeout", "default_request_timeout"):
        with contextlib.suppress(OSError, ValueError), open(f"{SYSCTL}/{name}", encoding="ascii") as file:
            limits.append(int(file.read()))
    return min((limit for limit in limits if limit > 0), default=0)


def _open_device() -> int:
    try:
        with privileges.raised():
            return os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError:
        raise FuseUnavailable(
            f"{DEVICE} may not be opened by this user: ask the administrator for read and write permission on it"
        ) from None
    except OSError as exc:
        raise FuseUnavailable(
            f"{DEVICE} cannot be opened ({exc.strerror}): load the kernel module (modprobe fuse), "
            f"or give the container the device (--device {DEVICE})"
        ) from exc


def _mount_privileged(device: int, mountpoint: str, fsname: str, allow_other: bool, subtype: str) -> bool:
    """mount(2); False if it may not be used for all the capability, as in a container."""
    data = f"fd={device},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},default_permissions"
    if allow_other:
        data += ",allow_other"
    try:
        with _directory(mountpoint) as (fd, path):
            # A user must not lead us elsewhere, by exchanging a folder on the way that is his.
            if os.geteuid() != 0 and path != mountpoint:
                raise MountpointError(f"{mountpoint} is not in its place any more, it is {path} now: mount again")
            _mount(fsname, _through(fd), f"fuse.{subtype}", MS_NOSUID | MS_NODEV | MS_RDONLY, data)
    except OSError as exc:
        if exc.errno == errno.EPERM:
            return False
        if exc.errno == errno.ENODEV:
            raise FuseUnavailable("this kernel has no FUSE: load the module (modprobe fuse)") from exc
        raise MountpointError(f"cannot mount on {mountpoint}: {exc.strerror}") from exc
    return True


@contextlib.contextmanager
def _directory(path: str) -> Iterator[tuple[int, str]]:
    """A descriptor that stands for a directory, whatever becomes of its path, and its real path."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd, os.readlink(_through(fd))
    finally:
        os.close(fd)


def _through(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def _mount(source: str, target: str, fs_type: str, flags: int, data: str) -> None:
    encode = os.fsencode
    _check(_libc.mount(encode(source), encode(target), encode(fs_type), flags, encode(data)), target)


def _check(result: int, path: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)


def _mount_with_helper(mountpoint: str, fsname: str, allow_other: bool, subtype: str) -> int:
    if allow_other and os.geteuid() != 0 and not _is_allow_other_permitted():
        raise FuseUnavailable(_ALLOW_OTHER_REMEDY)
    escaped = fsname.replace("\\", "\\\\").replace(",", "\\,")
    options = f"ro,nosuid,nodev,default_permissions,subtype={subtype},fsname={escaped}"
    if allow_other:
        options += ",allow_other"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        result = _run_helper(["-o", options, "--", mountpoint], pass_fd=theirs.fileno())
        if result.returncode != 0:
            raise _helper_error(mountpoint, result.stderr)
        ours.setblocking(False)  # the helper is gone, so its message is here or will never be
        try:
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        except BlockingIOError:
            fds = []
    if not fds:
        raise FuseUnavailable(f"fusermount3 mounted {mountpoint} but handed over no descriptor: {result.stderr}")
    os.set_inheritable(fds[0], False)
    os.set_blocking(fds[0], False)
    return fds[0]


_ALLOW_OTHER_REMEDY = (
    f"--allow-other is for root only here: ask the administrator to write the line user_allow_other into {FUSE_CONF}"
)


def _is_allow_other_permitted() -> bool:
    try:
        with open(FUSE_CONF, "rb") as file:
            return any(line.strip() == b"user_allow_other" for line in file)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # fusermount3 can read it and will say


def _find_helper() -> str:
    helper = shutil.which("fusermount3") or shutil.which("fusermount3", path=_STANDARD_PATH)
    if helper is None:
        raise FuseUnavailable("fusermount3 is not installed: install the package fuse3, or mount as root")
    return helper


def _run_helper(arguments: list[str], *, pass_fd: int | None = None) -> "subprocess.CompletedProcess[str]":
    """Run fusermount3 to its end. Raises FuseUnavailable if it is missing or hangs."""
    helper = _find_helper()
    environment = {**os.environ, "LC_ALL": "C"}
    if pass_fd is not None:
        environment["_FUSE_COMMFD"] = str(pass_fd)
    try:
        return subprocess.run(
            [helper, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=() if pass_fd is None else (pass_fd,),
            timeout=_HELPER_TIMEOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise FuseUnavailable(f"{helper} did not end within {_HELPER_TIMEOUT:.0f} s and was killed") from exc
    except OSError as exc:
        raise FuseUnavailable(f"{helper} cannot be run: {exc.strerror}") from exc


def _helper_error(mountpoint: str, stderr: str) -> UserError:
    lines = [line.removeprefix("fusermount3: ") for line in stderr.splitlines() if line.strip()]
    text = "; ".join(lines) or "it gave no reason"
    if "user_allow_other" in text:
        return FuseUnavailable(_ALLOW_OTHER_REMEDY)
    if "mount failed: Operation not permitted" in text:
        return FuseUnavailable(
            "fusermount3 may not mount here: it must be setuid root, and a container needs the capability SYS_ADMIN"
        )
    if DEVICE in text or "fuse device" in text or "mount_max" in text:
        return FuseUnavailable(f"fusermount3 could not mount {mountpoint}: {text}")
    return MountpointError(f"cannot mount on {mountpoint}: {text}")


def unmount(mountpoint: str, *, lazy: bool = False, force: bool = False) -> None:
    """Unmount, with CAP_SYS_ADMIN by umount2(2), else by fusermount3. Who is not root may unmount what is his.

    Args:
        lazy: detach now, let the mount end with its last user.
        force: abort the connection first, so that whoever waits on it gets an error.

    Raises:
        OSError: EBUSY if it is in use, EINVAL if it is not a mount, EPERM.
        FuseUnavailable: fusermount3 is needed and cannot be run.
    """
    if privileges.has_sys_admin():
        try:
            _unmount_privileged(mountpoint, (MNT_DETACH if lazy else 0) | (MNT_FORCE if force else 0))
            return
        except PermissionError:
            pass  # as in a container, or it is not his
    elif force:
        found = find_mount(mountpoint)
        if found is not None:
            abort(int(found.device.partition(":")[2]))
    result = _run_helper(["-u", *(["-z"] if lazy else []), "--", mountpoint])
    if result.returncode != 0:
        code = _errno_in(result.stderr)
        raise OSError(code, f"{os.strerror(code)} ({result.stderr.strip()})", mountpoint)


def _unmount_privileged(mountpoint: str, flags: int) -> None:
    """umount2(2). Raises OSError."""
    if os.geteuid() == 0:
        _check(_libc.umount2(os.fsencode(mountpoint), flags | UMOUNT_NOFOLLOW), mountpoint)
        return
    # The power is root's, the path may be the user's to change: so the folder is held, and only his own mount goes.
    parent, name = os.path.split(mountpoint)
    with _directory(parent) as (fd, path):
        found = _topmost(mounts(), os.path.join(path, name))
        if found is None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), mountpoint)
        if found.owner != os.geteuid():
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), mountpoint)
        _check(_libc.umount2(os.fsencode(f"{_through(fd)}/{name}"), flags | UMOUNT_NOFOLLOW), mountpoint)


def _errno_in(stderr: str) -> int:
    """The errno that fusermount3 wrote out in words."""
    if "not found in" in stderr:
        return errno.EINVAL
    for code in (errno.EBUSY, errno.EINVAL, errno.ENOENT, errno.EACCES):
        if os.strerror(code) in stderr:
            return code
    return errno.EPERM


def mounts() -> list[MountInfo]:
    """The mount table of this mount namespace, in the kernel's order."""
    with open("/proc/self/mountinfo", "rb") as file:
        return [_parse(line) for line in file.read().split(b"\n") if line]


def _parse(line: bytes) -> MountInfo:
    head, _, tail = line.partition(b" - ")
    mount_id, parent_id, device, _, mountpoint = head.split(b" ", 5)[:5]
    fs_type, source, options = tail.split(b" ", 2)
    return MountInfo(
        int(mount_id),
        int(parent_id),
        device.decode(),
        _unescape(mountpoint),
        _unescape(fs_type),
        _unescape(source),
        *(_owner(options) if fs_type.startswith(b"fuse") else (None, None)),
    )


def _owner(options: bytes) -> tuple[int | None, int | None]:
    """The user and the group that a FUSE mount is for."""
    values = {key: value for key, is_set, value in (part.partition(b"=") for part in options.split(b",")) if is_set}
    return (int(values[b"user_id"]), int(values[b"group_id"])) if b"user_id" in values else (None, None)


def _unescape(field: bytes) -> str:
    """Undo the kernel's \\ooo for blanks, newlines, backslashes and '#'."""
    first, *rest = field.split(b"\\")
    return os.fsdecode(first + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in rest))


def find_mount(mountpoint: str) -> MountInfo | None:
    """The mount that is on this directory, the topmost if several are stacked; None if it is not a mountpoint.

    Symlinks are followed, but a mountpoint itself is never looked at.
    """
    table = mounts()
    path = os.path.join(os.getcwd(), mountpoint)
    for _ in range(_MAX_LINKS):
        folder, name = os.path.split(path.rstrip("/"))
        path = os.path.realpath(path) if name in ("", ".", "..") else os.path.join(os.path.realpath(folder), name)
        found = _topmost(table, path)
        if found is not None:
            return found
        try:
            path = os.path.join(os.path.dirname(path), os.readlink(path))
        except OSError:
            return None
    return None


def _topmost(table: list[MountInfo], path: str) -> MountInfo | None:
    """The mount that is seen at a real path, if it is a mountpoint."""
    stacked = [info for info in table if info.mountpoint == path]
    covered = {info.parent_id for info in stacked}
    return next((info for info in reversed(stacked) if info.mount_id not in covered), None)


def abort(device_minor: int) -> bool:
    """Abort a FUSE connection: every request on it ends with an error. True if that could be done.

    Args:
        device_minor: the second number of `MountInfo.device`.
    """
    if privileges.has_sys_admin() and not os.path.exists(f"{CONNECTIONS}/{device_minor}"):
        with contextlib.suppress(OSError):
            _mount("fusectl", CONNECTIONS, "fusectl", 0, "")
    return _write(f"{CONNECTIONS}/{device_minor}/abort", b"1")


def set_readahead(mountpoint: str, kib: int) -> bool:
    """Set the kernel's readahead of a mount in KiB. True if that could be done (root alone may)."""
    found = find_mount(mountpoint)
    if found is None:
        return False
    with privileges.raised():
        return _write(f"/sys/class/bdi/{found.device}/read_ahead_kb", b"%d" % kib)


def _write(path: str, content: bytes) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, content)
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


def users_of(mount: MountInfo) -> list[Process]:
    """The processes that keep a mount busy by open files, mappings, working or root directory.

    Reads /proc only, so it sees what this user may see. Within other mount namespaces only mappings are found.
    """
    return [
        Process(pid, _name(pid))
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
        if _is_user(f"/proc/{pid}", mount)
    ]


def _is_user(process: str, mount: MountInfo) -> bool:
    inside = os.path.join(mount.mountpoint, "")
    for link in ("cwd", "root", "exe"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"{process}/{link}")
            if path == mount.mountpoint or path.startswith(inside):
                return True
    mount_id = b"mnt_id:\t%d\n" % mount.mount_id
    if any(mount_id in content for content in _contents(f"{process}/fdinfo")):
        return True
    major, _, minor = mount.device.partition(":")
    device = b" %02x:%02x " % (int(major), int(minor))
    with contextlib.suppress(OSError), open(f"{process}/maps", "rb") as file:
        return any(device in line for line in file)
    return False


def _contents(folder: str) -> Iterator[bytes]:
    """The contents of the small files of a folder of /proc; what vanishes meanwhile is left out."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError), open(f"{folder}/{name}", "rb") as file:
            yield file.read()


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return os.fsdecode(file.read().rstrip(b"\n"))
    except OSError:
        return "?"


def is_dead(mountpoint: str) -> bool:
    """True if a mount of dmfs is on this directory and nobody serves it any more.

    The only function that asks the mount itself: one that is served but hangs costs two seconds and counts as living.
    """
    found = find_mount(mountpoint)
    if found is None or found.fs_type != "fuse.dmfs":
        return False
    codes: list[int] = []

    def ask() -> None:
        try:
            os.statvfs(found.mountpoint)  # not stat, which the kernel may answer from memory
        except OSError as exc:
            codes.append(exc.errno or 0)

    thread = threading.Thread(target=ask, name="is_dead", daemon=True)
    thread.start()
    thread.join(_DEAD_TIMEOUT)
    return codes == [errno.ENOTCONN]
