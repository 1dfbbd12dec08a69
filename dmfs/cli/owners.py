"""Root and the mounts of other users: root looks at them, and ends them, as the user whose mount it is.

What a daemon leaves in its runtime directory (a pid, a socket) is believed by who asks and signals it. Root must not
believe what some user wrote there, but may become that user, who can do no harm by it but to himself.
"""

import os

from dmfs import privileges
from dmfs.fuse import mounting


def owner_of(mount: mounting.MountInfo | None) -> privileges.Account | None:
    """The other user whose mount of dmfs this is, if this process is root."""
    if os.geteuid() != 0 or mount is None or mount.fs_type != "fuse.dmfs":
        return None
    return privileges.account_of(mount.owner, mount.group) if mount.owner and mount.group is not None else None


def other_owners() -> list[privileges.Account]:
    """All the other users who have mounts of dmfs, for root; an empty list for others."""
    return sorted({owner for mount in mounting.mounts() if (owner := owner_of(mount)) is not None})
