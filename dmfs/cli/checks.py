"""What must be right before a mount is started, each wrong thing said in one sentence. Nothing is started here.

Looks at the file systems it is given within limits of time: a source that is down or a dead mount cannot hang it. The
one thing it changes is a dead mount of dmfs itself at the mountpoint, which it takes away.
"""

import importlib.util
import os
import shlex
import stat
from collections.abc import Mapping
from typing import NamedTuple

from dmfs import disks, privileges, runtime
from dmfs.cli import bounded
from dmfs.cli.paths import is_inside, real_mountpoint
from dmfs.config import CacheConfig, MountConfig, default_cache
from dmfs.errors import CacheError, ConfigError, FuseUnavailable, MountpointError, SourceError
from dmfs.fuse import mounting

LOOK_TIMEOUT = 10.0  # seconds to look at a mountpoint or a cache, which are local
SOURCE_TIMEOUT = (
    30.0  # seconds to look at a source; a Lustre server that fails over takes minutes, but then so does the mount
)
_MAX_STACK = 64  # dead mounts, one over the other, taken away


class Checked(NamedTuple):
    """A mount that may be started: settings with real paths and a cache; `notes` are to be said to the user."""

    config: MountConfig
    notes: list[str]
    is_default_cache: bool


def check(config: MountConfig, environ: Mapping[str, str], *, mend: bool = True) -> Checked:
    """Look at everything that a mount needs.

    Args:
        mend: take a dead mount of our own away; else only say that it would be.

    Raises:
        UserError: the first thing that is wrong.
    """
    notes: list[str] = []
    mountpoint = _resolve_mountpoint(config.mountpoint)
    _check_not_mounted(mountpoint, notes, mend=mend)
    source = _look_at_source(config.source)
    _check_apart(source, mountpoint)
    if not notes or mend:
        _check_mountpoint(mountpoint)
    if config.user is not None:
        _check_led_astray(config.mountpoint, mountpoint)

    is_default = not config.cache
    caches = (default_cache(environ),) if is_default else tuple(_look_at_cache(cache) for cache in config.cache)
    _check_caches(caches, source, mountpoint, notes)
    _check_log_file(config.log_file)
    _check_fuse(config, notes)
    update = {"source": source, "mountpoint": mountpoint, "cache": caches}
    return Checked(config.model_copy(update=update), notes, is_default)


def _resolve_mountpoint(path: str) -> str:
    try:
        return bounded.call(LOOK_TIMEOUT, real_mountpoint, path)
    except TimeoutError:
        raise MountpointError(
            f"the way to the mountpoint {path} does not answer: is it inside a mount that hangs?"
        ) from None
    except OSError as exc:
        raise MountpointError(f"the mountpoint {path} cannot be looked at: {exc.strerror}") from exc


def _check_not_mounted(mountpoint: str, notes: list[str], *, mend: bool) -> None:
    record = runtime.find(mountpoint)
    if record is not None:
        raise MountpointError(
            f"{mountpoint} is already mounted (or being mounted) by dmfs with pid {record.pid}; "
            f"unmount it first with: dmfs umount {shlex.quote(mountpoint)}"
        )
    for _ in range(_MAX_STACK):
        found = mounting.find_mount(mountpoint)
        if found is None:
            return
        if not mounting.is_dead(mountpoint):
            raise MountpointError(
                f"{mountpoint} is already a mountpoint, of {found.source} ({found.fs_type}): "
                "mount on an empty directory of your own"
            )
        if not mend:
            notes.append(f"the dead mount at {mountpoint} would be unmounted first")
            return
        try:
            mounting.unmount(mountpoint, lazy=True)
        except OSError as exc:
            raise MountpointError(
                f"the dead mount at {mountpoint} cannot be unmounted: {exc.strerror}; "
                f"try as root: umount -l {shlex.quote(mountpoint)}"
            ) from exc
        notes.append(f"the dead mount at {mountpoint} (its daemon is gone) was unmounted first")


def _look_at_source(path: str) -> str:
    """The real path of the source, which is a directory that can be listed."""
    try:
        return bounded.call(SOURCE_TIMEOUT, _list_one, path)
    except TimeoutError:
        raise SourceError(
            f"the source {path} did not answer within {SOURCE_TIMEOUT:.0f} s: is its file system up?"
        ) from None
    except FileNotFoundError:
        raise SourceError(f"the source {path} does not exist: is its file system mounted on this node?") from None
    except NotADirectoryError:
        raise SourceError(f"the source {path} is not a directory: name the directory that holds the dataset") from None
    except PermissionError:
        raise SourceError(f"the source {path} may not be read by this user: ask its owner for r-x permission") from None
    except OSError as exc:
        raise SourceError(f"the source {path} cannot be read: {exc.strerror}") from exc


def _list_one(path: str) -> str:
    """One name is enough to know that the others can be read: a whole listing may take long."""
    real = os.path.realpath(path)
    with os.scandir(real) as names:
        next(names, None)
    if not os.access(real, os.X_OK):
        raise PermissionError
    return real


def _check_apart(source: str, mountpoint: str) -> None:
    if source == mountpoint:
        raise MountpointError(f"the source and the mountpoint are both {source}: mount on another, empty directory")
    if is_inside(mountpoint, source):
        raise MountpointError(
            f"the mountpoint {mountpoint} is inside the source {source}: mount on a directory outside it"
        )
    if is_inside(source, mountpoint):
        raise MountpointError(f"the source {source} is inside the mountpoint {mountpoint}, which would hide it")


def _check_mountpoint(path: str) -> None:
    try:
        reason = bounded.call(LOOK_TIMEOUT, _unfit_mountpoint, path)
    except TimeoutError:
        raise MountpointError(f"the mountpoint {path} did not answer within {LOOK_TIMEOUT:.0f} s") from None
    except OSError as exc:
        raise MountpointError(f"the mountpoint {path} cannot be looked at: {exc.strerror}") from exc
    if reason:
        raise MountpointError(f"the mountpoint {path} {reason}")


def _unfit_mountpoint(path: str) -> str | None:
    """Why a path cannot be mounted on, None if it can."""
    try:
        st = os.stat(path)
    except FileNotFoundError:
        return f"does not exist: make it with: mkdir -p {shlex.quote(path)}"
    if not stat.S_ISDIR(st.st_mode):
        return "is not a directory: mount on an empty directory"
    with os.scandir(path) as names:
        if next(names, None) is not None:
            return "is not empty, and a mount would hide what is in it: mount on an empty directory"
    if os.geteuid() != 0 and not privileges.has_sys_admin() and not os.access(path, os.W_OK):
        return "is not writable by this user, which fusermount3 asks for: mount on a directory of your own"
    return None


def _check_led_astray(given: str, real: str) -> None:
    """Root names a mountpoint for a user, who must not send him elsewhere by a symbolic link of his own."""
    if os.path.abspath(given) != real and not os.access(real, os.W_OK):
        raise MountpointError(
            f"the mountpoint {given} is {real}, where this user may not write: name that path itself if it is meant"
        )


def _look_at_cache(cache: CacheConfig) -> CacheConfig:
    """The cache with its real path."""
    try:
        path, reason = bounded.call(LOOK_TIMEOUT, _unfit_cache, cache.path)
    except TimeoutError:
        raise CacheError(
            f"the cache {cache.path} did not answer within {LOOK_TIMEOUT:.0f} s: is its disk well?"
        ) from None
    except OSError as exc:
        raise CacheError(f"the cache {cache.path} cannot be used: {exc.strerror}") from exc
    if reason:
        raise CacheError(f"the cache {path} {reason}")
    return cache.model_copy(update={"path": path})


def _unfit_cache(path: str) -> tuple[str, str | None]:
    real = os.path.realpath(path)
    parent = disks.existing_parent(real)
    if not os.path.isdir(parent):
        return real, "is not a directory" if parent == real else f"cannot be made: {parent} is not a directory"
    if not os.access(parent, os.W_OK | os.X_OK):
        return real, "is not writable by this user" if parent == real else f"cannot be made: {parent} is not writable"
    return real, None


def _check_caches(caches: tuple[CacheConfig, ...], source: str, mountpoint: str, notes: list[str]) -> None:
    for index, cache in enumerate(caches):
        if is_inside(cache.path, mountpoint):
            raise MountpointError(
                f"the cache {cache.path} is inside the mountpoint {mountpoint}, which would hide it: put it elsewhere"
            )
        if is_inside(mountpoint, cache.path):
            raise MountpointError(
                f"the mountpoint {mountpoint} is inside the cache {cache.path}: mount on a directory outside it"
            )
        if is_inside(cache.path, source):
            raise CacheError(f"the cache {cache.path} is inside the source {source}: put it on a local disk")
        if cache.path in map(os.path.realpath, runtime.folders()):
            raise CacheError(f"the cache {cache.path} is the runtime directory of dmfs: give a folder of its own")
        if cache.path in (other.path for other in caches[:index]):
            raise CacheError(f"the cache {cache.path} is named twice: name each folder once")
        network = disks.is_network_file_system(cache.path)
        if network:
            notes.append(
                f"warning: the cache {cache.path} is on {network}, a network file system; "
                "dmfs is of use with a disk of this machine"
            )


def _check_log_file(path: str | None) -> None:
    if path is None:
        return
    folder = os.path.dirname(path)
    at = path if os.path.exists(path) else folder
    if os.path.isdir(path):
        raise ConfigError(f"the log file {path} is a directory: name a file")
    if not os.path.isdir(folder):
        raise ConfigError(f"the log file {path} cannot be written: {folder} is not a directory")
    if not os.access(at, os.W_OK):
        raise ConfigError(f"the log file {path} cannot be written: {at} is not writable by this user")


def _check_fuse(config: MountConfig, notes: list[str]) -> None:
    """Find out what would stop the mount itself. What only the attempt can tell, mounting.py says."""
    if config.front_end == "pyfuse3" and config.io not in ("auto", "plain"):
        raise ConfigError(
            f"the front end pyfuse3 has no {config.io} mode: "
            f"leave out --io {config.io}, or mount with --front-end kernel"
        )
    if config.front_end == "pyfuse3" and config.user is not None:
        raise ConfigError(
            "the front end pyfuse3 cannot mount for another user: leave out --user, or mount with --front-end kernel"
        )
    if config.front_end == "pyfuse3" and importlib.util.find_spec("pyfuse3") is None:
        raise FuseUnavailable(
            "the package pyfuse3 is not installed: install dmfs[pyfuse3], or mount with --front-end kernel"
        )
    mounting.check_available(allow_other=config.allow_other)
    timeout = mounting.request_timeout()
    if timeout:
        notes.append(
            f"warning: this kernel ends a FUSE mount when one request takes {timeout} s, as one may while the source "
            "hangs: ask the administrator for sysctl fs.fuse.max_request_timeout=0 and default_request_timeout=0"
        )
