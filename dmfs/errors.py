"""The exceptions of dmfs, and the one table that turns an exception into an errno or an exit code.

Inside dmfs a miss is a value and a fault is an exception. An OSError of the source keeps its own errno all the way to
the reader; faults of tiers never reach one. Front ends call `to_errno`, the command line reads `UserError.exit_code`;
nobody else translates.
"""

import errno


class DmfsError(Exception):
    """Base of everything dmfs raises on purpose."""


class StaleFile(DmfsError):
    """The file at the source is no longer the version that was asked for (ESTALE: the next open sees the new one)."""


class TierUnavailable(DmfsError):
    """A tier could not do what was asked of it (full, failing, gone): ask the next tier, or the source."""


class CopyDamaged(TierUnavailable):
    """One copy in a tier does not have the bytes it must have; the tier itself may be well."""


def without_traceback(exc: Exception) -> Exception:
    """The same error, to be kept or to be given to several callers.

    A traceback holds frames, and what those hold (descriptors, buffers, the error itself) would stay until the garbage
    collector comes round.
    """
    if isinstance(exc, OSError):
        return OSError(exc.errno, exc.strerror)
    return type(exc)(*exc.args) if isinstance(exc, DmfsError) else exc


def to_errno(exc: BaseException) -> int | None:
    """The errno a reader sees for `exc`, or None if `exc` is a surprise: log it, count it, answer EIO."""
    if isinstance(exc, OSError):
        return exc.errno or errno.EIO
    if isinstance(exc, StaleFile):
        return errno.ESTALE
    return None


class UserError(DmfsError):
    """A mistake or a circumstance that the user can mend: one sentence that names the thing and the remedy, no
    traceback.

    Attributes:
        exit_code: what the command returns. The table is in docs/configuration.md and never changes its meanings.
    """

    exit_code = 1


class ConfigError(UserError):
    """A setting is wrong: unknown key, bad size, unreadable YAML."""

    exit_code = 3


class SourceError(UserError):
    """The source directory is missing or cannot be read."""

    exit_code = 4


class MountpointError(UserError):
    """The mountpoint is missing, not empty, already mounted, or overlaps the source or a cache."""

    exit_code = 5


class CacheError(UserError):
    """No usable cache: none on a local disk, in use, owned by somebody else, of another format."""

    exit_code = 6


class FuseUnavailable(UserError):
    """FUSE cannot be used here: /dev/fuse, fusermount3, user_allow_other, or the pyfuse3 package is missing."""

    exit_code = 7


class NotMounted(UserError):
    """The directory is not a mountpoint of dmfs."""

    exit_code = 8


class MountBusy(UserError):
    """The mount is in use, so it was not unmounted."""

    exit_code = 9


class DaemonUnresponsive(UserError):
    """The daemon did not answer, or did not end, within its time."""

    exit_code = 10


class PathError(UserError):
    """A path given to `dmfs warm` is not in the mount, or does not exist."""

    exit_code = 11
