"""Which mounts there are: the runtime directory, one lock file and one control socket per mount. Standard library only.

A daemon holds the lock of its mountpoint for its life, so a lock that is held means a daemon, and one that is not
means leftovers, whatever is written in the file and whoever has that pid today. The locks are open-file-description
locks on two bytes of the file: byte 0 is the daemon's, byte 1 is held for the moment of taking or clearing away.
Unlike flock(2) such a lock can be looked at without taking it, so nobody who looks is mistaken for a daemon.

The directory is $XDG_RUNTIME_DIR/dmfs, else /tmp/dmfs-UID. Sessions of one user on one node may differ in
XDG_RUNTIME_DIR (ssh and a batch job), so with its usual value or none both places are looked at.
"""

import contextlib
import fcntl
import json
import os
import shlex
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import blake2b

from dmfs.disks import is_own_directory
from dmfs.errors import MountpointError, UserError

_FLOCK = struct.Struct("hhqqi0q")  # struct flock of fcntl(2)
_DAEMON = 0  # the byte that a daemon holds
_CHANGE = 1  # the byte held while taking or clearing away
_CHANGE_TIMEOUT = 10.0  # seconds for a change by others, which takes them microseconds
_CHANGE_PAUSE = 0.005  # seconds between two looks at it
_MAX_RECORD = 16384  # bytes; two paths of 4096 bytes, each escaped at worst
_MAX_ADDRESS = 107  # bytes of a path in struct sockaddr_un


@dataclass(frozen=True, slots=True)
class MountRecord:
    """What is written in the lock file of a mount.

    Attributes:
        started: seconds since 1970.
        socket: the path of the control socket; not written, known from where the file is.
    """

    mountpoint: str
    source: str
    pid: int
    started: float
    socket: str = field(default="", compare=False)


class MountLock:
    """The lock of one mountpoint, held until `release` or the end of the process.

    Attributes:
        socket: the path where the control socket belongs.
    """

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self.socket = _socket_of(path)
        # systemd-tmpfiles empties /tmp of what is ten days old, but leaves alone a directory with a flock on it.
        self._folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._folder, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def __repr__(self) -> str:
        return f"<MountLock {self._path} {'released' if self._fd < 0 else 'held'}>"

    def release(self) -> None:
        """Remove the socket and the lock file, then let go. Harmless when done twice."""
        if self._fd < 0:
            return
        if _is_at(self._fd, self._path):
            _remove(self._path)
        os.close(self._folder)
        os.close(self._fd)
        self._fd = -1


def runtime_dir() -> str:
    """The runtime directory of this user, made if it is missing.

    Raises:
        UserError: it cannot be made, or is not a directory that belongs to this user alone.
    """
    path = folders()[0]
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        st = os.lstat(path)
        if stat.S_ISDIR(st.st_mode) and st.st_uid == os.geteuid():
            if stat.S_IMODE(st.st_mode) & 0o077:
                os.chmod(path, 0o700)
            return path
    except OSError as exc:
        raise UserError(
            f"the runtime directory {path} cannot be used: {exc.strerror}; "
            "set XDG_RUNTIME_DIR to a directory of your own"
        ) from exc
    raise UserError(
        f"the runtime directory {path} is not a directory of this user: "
        "remove it, or set XDG_RUNTIME_DIR to a directory of your own"
    )


def _usual() -> str:
    """Where XDG_RUNTIME_DIR points in a login session of this user."""
    return f"/run/user/{os.geteuid()}"


def _fallback() -> str:
    return f"/tmp/dmfs-{os.geteuid()}"


def folders() -> list[str]:
    """Where mounts of this user may be recorded; new ones go into the first."""
    xdg = os.environ.get("XDG_RUNTIME_DIR", "")
    if not xdg.startswith("/") or not is_own_directory(xdg):
        return [_fallback(), os.path.join(_usual(), "dmfs")]
    folder = os.path.join(xdg, "dmfs")
    return [folder, _fallback()] if os.path.normpath(xdg) == _usual() else [folder]


def _name(mountpoint: str) -> str:
    return blake2b(os.fsencode(mountpoint), digest_size=8).hexdigest() + ".lock"


def _socket_of(lock_path: str) -> str:
    return lock_path.removesuffix(".lock") + ".sock"


def acquire(mountpoint: str, record: MountRecord) -> MountLock:
    """Become the daemon of a mountpoint: take its lock, write the record, clear away what a dead one left.

    Args:
        mountpoint: the absolute real path.

    Raises:
        MountpointError: a daemon has it.
        UserError: the runtime directory cannot be used.
    """
    other = find(mountpoint)  # in the other folder too
    if other is not None:
        raise _taken(mountpoint, other)
    path = os.path.join(runtime_dir(), _name(mountpoint))
    while True:
        fd = _open_for_change(path)
        try:
            if _is_held(fd):
                raise _taken(mountpoint, _read(fd, path))
            _write(fd, record)
            # After the writing, so that a held lock always has its whole record.
            _lock(fd, _DAEMON)
            if _is_at(fd, path):  # else the daemon before removed its file just now
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(_socket_of(path))
                _lock(fd, _CHANGE, fcntl.F_UNLCK)
                return MountLock(fd, path)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _write(fd: int, record: MountRecord) -> None:
    content = {name: value for name, value in asdict(record).items() if name != "socket"}
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(content).encode() + b"\n", 0)


def _taken(mountpoint: str, record: MountRecord | None) -> MountpointError:
    pid = f" with pid {record.pid}" if record else ""
    return MountpointError(
        f"{mountpoint} is already mounted (or being mounted) by dmfs{pid}; "
        f"unmount it first with: dmfs umount {shlex.quote(mountpoint)}"
    )


def records() -> list[MountRecord]:
    """The mounts of this user whose daemons live, oldest first. What dead ones left is cleared away."""
    found = []
    for folder in folders():
        if not is_own_directory(folder):
            continue
        for name in os.listdir(folder):
            if name.endswith(".lock"):
                record = _look(os.path.join(folder, name))
                if record is not None:
                    found.append(record)
    return sorted(found, key=lambda record: record.started)


def find(mountpoint: str) -> MountRecord | None:
    """The record of the living daemon of a mountpoint (absolute real path), None if there is none."""
    for folder in folders():
        if is_own_directory(folder):
            record = _look(os.path.join(folder, _name(mountpoint)))
            if record is not None:
                return record
    return None


def _look(path: str) -> MountRecord | None:
    """The record in a lock file that is held; a file that is not is removed."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if _is_held(fd):
            return _read(fd, path)
        # Whoever holds the change byte now is taking it, or clearing it away: either way there is nothing to do here.
        if _lock(fd, _CHANGE) and not _is_held(fd) and _is_at(fd, path):
            _remove(path)
        return None
    finally:
        os.close(fd)


def _open_for_change(path: str) -> int:
    """Open the lock file, make it if need be, and hold its change byte; the file is still the one at `path`."""
    deadline = time.monotonic() + _CHANGE_TIMEOUT
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if _lock(fd, _CHANGE) and _is_at(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if time.monotonic() > deadline:
            raise UserError(
                f"another process has been changing {path} for {_CHANGE_TIMEOUT:.0f} s: end it, or remove the file"
            )
        time.sleep(_CHANGE_PAUSE)


def _lock(fd: int, byte: int, kind: int = fcntl.F_WRLCK) -> bool:
    """Take (or give back) one byte without waiting; False if another open file has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except BlockingIOError:
        return False
    return True


def _is_held(fd: int) -> bool:
    """True if another open file holds the daemon's byte."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _DAEMON, 1, 0))
    kind: int = _FLOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _remove(path: str) -> None:
    for name in (_socket_of(path), path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _read(fd: int, path: str) -> MountRecord | None:
    try:
        content = json.loads(os.pread(fd, _MAX_RECORD, 0))
        return MountRecord(
            mountpoint=str(content["mountpoint"]),
            source=str(content["source"]),
            pid=int(content["pid"]),
            started=float(content["started"]),
            socket=_socket_of(path),
        )
    except (ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def socket_address(path: str) -> Iterator[str]:
    """An address of the Unix socket `path` that fits into the 107 bytes of sockaddr_un; valid inside the block."""
    if len(os.fsencode(path)) <= _MAX_ADDRESS:
        yield path
        return
    folder, name = os.path.split(path)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)
