"""How bytes get from a copy to a reader, one way for a whole mount. The choice only; each way is built elsewhere.

plain        each range that is not in the page cache of the mount is a message; the kernel keeps pages between opens
passthrough  at open the kernel gets the copy and reads it itself; Linux 6.9, and the capability CAP_SYS_ADMIN
pagecache    opens cost no message, so that what is in the page cache of the mount is read at native speed; any kernel
auto         passthrough where the kernel takes files of at least one tier, else pagecache
"""

from typing import Literal, NamedTuple

from dmfs.errors import FuseUnavailable
from dmfs.fuse.passthrough import Passthrough
from dmfs.types import AskedIo

NOT_OFFERED = "this kernel does not offer it (Linux 6.9 and later do)"


class IoMode(NamedTuple):
    """What was chosen, and why, in words for people."""

    name: Literal["passthrough", "pagecache", "plain"]
    reason: str


def wants_passthrough(asked: AskedIo) -> bool:
    """True if the kernel is to be asked for it."""
    return asked in ("auto", "passthrough")


def choose(asked: AskedIo, passthrough: Passthrough | None, *, can_omit_open: bool) -> IoMode:
    """Choose a mode.

    Args:
        passthrough: after it has tried the tiers; None where it is not wanted.
        can_omit_open: whether the kernel does without OPEN if it is told so (Linux 3.16, and not for every server).

    Raises:
        FuseUnavailable: what was asked for is not to be had here.
    """
    if passthrough is not None and passthrough.refusal is None:
        reason = "the kernel reads local copies itself"
        for tier, why in passthrough.refused_tiers.items():
            reason += f"; those on {tier} are read by messages: {why}"
        return IoMode("passthrough", reason)
    if asked == "passthrough":
        assert passthrough is not None
        raise FuseUnavailable(
            f"--io passthrough cannot be had here: {passthrough.refusal}; mount with --io auto, "
            "which takes the next best way"
        )
    if asked == "plain":
        return IoMode("plain", "asked for; each range that is not in the page cache is a message")
    if not can_omit_open:
        if asked == "pagecache":
            raise FuseUnavailable("--io pagecache cannot be had here: this kernel wants to be told of every open")
        return IoMode("plain", "this kernel wants to be told of every open")
    if passthrough is None:
        return IoMode("pagecache", "asked for; what is in the page cache is read without a message")
    return IoMode("pagecache", f"no passthrough: {passthrough.refusal}")
