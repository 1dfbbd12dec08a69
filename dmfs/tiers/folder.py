"""The folder of one dataset on one tier: made, checked, locked. What lies in it is the business of `store`.

Everything here blocks and is called before the event loop starts, or in threads. A lock is flock(2): it dies with the
process that holds it, so a killed daemon leaves nothing that has to be cleaned up by hand.
"""

import contextlib
import fcntl
import json
import os
import socket
import stat
from dataclasses import dataclass
from hashlib import blake2b

from dmfs.errors import CacheError
from dmfs.tiers.descriptors import Descriptor

FORMAT = 1
OBJECTS = "objects"
TMP = "tmp"
LOCK = "lock"
FORMAT_FILE = "format.json"


def folder_name(source: str, dataset_id: str) -> str:
    """`<basename>-<dataset hash>`: readable for people, and one folder per dataset."""
    basename = os.path.basename(source.rstrip("/")) or "root"
    digest = blake2b(os.fsencode(dataset_id), digest_size=8).hexdigest()
    # 255 bytes is the longest name; a cut in the middle of a character is harmless, the hash tells datasets apart.
    return os.fsdecode(os.fsencode(basename)[:200]) + "-" + digest


@dataclass(slots=True)
class DatasetFolder:
    """An open, locked dataset folder. The lock and the descriptors go with this object.

    Attributes:
        tier: the tier's directory. path: this folder. objects_fd, tmp_fd: directory descriptors for *at() calls.
    """

    tier: str
    path: str
    _objects: Descriptor
    _tmp: Descriptor
    _lock: Descriptor

    @property
    def objects_fd(self) -> int:
        """Descriptor of the directory of complete copies."""
        return self._objects.fd

    @property
    def tmp_fd(self) -> int:
        """Descriptor of the directory of copies on their way."""
        return self._tmp.fd

    def clear_tmp(self) -> None:
        """Remove what an earlier daemon left unfinished, as far as that can be done. Raises OSError."""
        with os.scandir(self.tmp_fd) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    os.unlink(entry.name, dir_fd=self.tmp_fd)

    def others_allocated(self) -> int:
        """Bytes of disk that the copies of other datasets on this tier take. Raises OSError."""
        total = 0
        for other in _siblings(self.tier, self.path):
            for part in (OBJECTS, TMP):
                with contextlib.suppress(FileNotFoundError), os.scandir(f"{other}/{part}") as entries:
                    total += sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
        return total


def open_folder(tier: str, *, source: str, dataset_id: str) -> DatasetFolder:
    """Make the tier's directory and the dataset's folder if they are missing, check them, and lock the folder.

    Raises:
        CacheError: it cannot be made, belongs to somebody else, is in use, or has another format; says which and what
            to do.
    """
    try:
        os.makedirs(tier, mode=0o700, exist_ok=True)
        tier_dir = Descriptor(os.open(tier, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        _check_tier(tier, os.fstat(tier_dir.fd))
        path = f"{tier}/{folder_name(source, dataset_id)}"
        for part in (path, f"{path}/{OBJECTS}", f"{path}/{TMP}"):
            _make_private(part)
        # Held only while this start looks around, so that two starts at the same instant cannot both see a free tier.
        fcntl.flock(tier_dir.fd, fcntl.LOCK_EX)
        for other in _siblings(tier, path):
            _refuse_if_in_use(tier, other)
        lock = _lock(tier, path)
        _check_format(path, source=source, dataset_id=dataset_id)
        return DatasetFolder(tier, path, _open_directory(f"{path}/{OBJECTS}"), _open_directory(f"{path}/{TMP}"), lock)
    except OSError as exc:
        raise CacheError(
            f"cannot use the cache {tier}: {exc.strerror or exc}; give a directory you can write to with --cache"
        ) from exc


def _check_tier(tier: str, st: os.stat_result) -> None:
    is_ours = st.st_uid == os.geteuid()
    is_shared_safely = st.st_uid == 0 and (not st.st_mode & stat.S_IWOTH or st.st_mode & stat.S_ISVTX)
    if not is_ours and not is_shared_safely:
        raise CacheError(
            f"the cache {tier} belongs to user {st.st_uid}, who could replace what you read; "
            "give a directory of your own with --cache"
        )


def _make_private(path: str) -> None:
    """A directory of ours with mode 0700, whatever the umask was, and never a link that somebody put there."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    st = os.lstat(path)
    if not stat.S_ISDIR(st.st_mode) or st.st_uid != os.geteuid():
        raise CacheError(f"{path} is not a directory of yours; remove it or give another --cache")
    if stat.S_IMODE(st.st_mode) != 0o700:
        os.chmod(path, 0o700)


def _open_directory(path: str) -> Descriptor:
    return Descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))


def _siblings(tier: str, path: str) -> list[str]:
    """The other dataset folders of a tier."""
    with os.scandir(tier) as entries:
        own = os.path.basename(path)
        return [e.path for e in entries if e.name != own and os.path.lexists(f"{e.path}/{FORMAT_FILE}")]


def _refuse_if_in_use(tier: str, folder: str) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        probe = Descriptor(os.open(f"{folder}/{LOCK}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
        _flock(tier, probe, fcntl.LOCK_SH)


def _lock(tier: str, path: str) -> Descriptor:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = Descriptor(os.open(f"{path}/{LOCK}", flags, 0o600))
    _flock(tier, lock, fcntl.LOCK_EX)
    holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
    os.ftruncate(lock.fd, 0)
    os.pwrite(lock.fd, holder, 0)
    return lock


def _flock(tier: str, lock: Descriptor, kind: int) -> None:
    try:
        fcntl.flock(lock.fd, kind | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        try:
            holder = json.loads(os.pread(lock.fd, 4096, 0))
            who = f"by dmfs with pid {holder['pid']} on {holder['host']}"
        except (ValueError, KeyError, TypeError):
            who = "by another dmfs"
        raise CacheError(
            f"the cache {tier} is in use {who}; unmount that one first, "
            "or give this mount a cache of its own with --cache"
        ) from exc


def _check_format(path: str, *, source: str, dataset_id: str) -> None:
    file = f"{path}/{FORMAT_FILE}"
    try:
        with open(file, "rb") as stream:
            found = json.loads(stream.read(65536))["format"]
    except FileNotFoundError:
        text = json.dumps({"format": FORMAT, "source": source, "dataset_id": dataset_id})
        temp = f"{path}/{TMP}/{FORMAT_FILE}"
        with open(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())  # once for a folder; an empty file after a power cut would lock its owner out
        os.rename(temp, file)
        return
    except (ValueError, KeyError, TypeError):
        found = "unreadable"
    if found != FORMAT:
        raise CacheError(
            f"the cache folder {path} has format {found}, this dmfs knows {FORMAT}; "
            "remove the folder or give another --cache"
        )
