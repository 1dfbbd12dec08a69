"""For how long metadata of the source may be used without asking again: the freshness rule, pure and on one page."""

import errno
from dataclasses import dataclass

from dmfs.types import NANOSECONDS, Attributes, Clock, unpack_attributes

SHORTEST = 60.0  # seconds: a file that has just changed
LONGEST = 3600.0  # seconds: the oldest one
AGE_SHARE = 0.1  # of the age of a file, that nobody has changed for so long, it is trusted to stay as it is
NEGATIVE_TTL = 60.0  # seconds, at most, for a name that does not exist
AWAY_TTL = 1.0  # seconds, for what is served while the source is away
FOREVER = 1e9  # seconds; `--immutable`

_AWAY = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENODEV,
        errno.ENXIO,
        errno.EREMOTEIO,
        errno.ESHUTDOWN,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
    }
)


def is_away(exc: OSError) -> bool:
    """True if the error says that the source could not be asked, not what the answer is.

    Only ENOENT means that a name is gone.
    """
    return exc.errno in _AWAY


@dataclass(frozen=True, slots=True)
class MetadataTtl:
    """The rule of one mount.

    Attributes:
        fixed: seconds for everything, where the user gave them; else a tenth of a file's age, between SHORTEST and
            LONGEST.
        is_immutable: nothing is ever looked at again.
    """

    clock: Clock
    fixed: float | None = None
    is_immutable: bool = False

    def of(self, attributes: Attributes) -> float:
        """Seconds that attributes fetched just now may be used, and so may a directory's listing."""
        if self.is_immutable:
            return FOREVER
        if self.fixed is not None:
            return self.fixed
        age = max(0.0, self.clock.wall() - unpack_attributes(attributes).ctime_ns / NANOSECONDS)
        return min(max(age * AGE_SHARE, SHORTEST), LONGEST)

    def of_missing(self, directory: Attributes) -> float:
        """Seconds that a name may be called missing in a directory with these attributes."""
        return FOREVER if self.is_immutable else min(NEGATIVE_TTL, self.of(directory))
