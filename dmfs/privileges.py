"""Root becomes an ordinary user and keeps one capability, CAP_SYS_ADMIN: for `dmfs mount --user NAME`.

A source that takes root for "nobody" (root_squash) is read by a process that is NAME through and through: a FUSE source
looks at the saved ids too, so a seteuid(2) would not do. What root alone can do is still to be done after that: open
/dev/fuse, set the readahead, start the daemon. So `become` keeps root's capabilities aside without effect, `raised`
gives them effect for a block, and `settle` gives them away for good. Only CAP_SYS_ADMIN is in effect all the time: to
mount, to unmount, and to hand files over to the kernel.

Capabilities belong to a thread and go over to the threads it starts, so all of this is done while there is one thread.
None of it survives an exec: a child gets what a program of that user gets. The kernel lets that user neither trace the
process nor dump its memory.
"""

import codecs
import contextlib
import ctypes
import os
import pwd
from collections.abc import Iterator
from typing import NamedTuple

from dmfs.disks import is_own_directory

CAP_SYS_ADMIN = 21
_LATE_CODECS = ("ascii", "idna")  # what Python loads at first use, perhaps from a folder that is root's alone
_PR_SET_KEEPCAPS = 8
_VERSION_3 = 0x20080522  # _LINUX_CAPABILITY_VERSION_3: 64 bits in two halves

_libc = ctypes.CDLL(None, use_errno=True)


class Account(NamedTuple):
    """A user of this node."""

    name: str
    uid: int
    gid: int
    home: str


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


class _Capabilities(NamedTuple):
    """Of this thread, as masks: those in effect, and those that may be put into effect."""

    effective: int
    permitted: int


def find_account(name: str) -> Account:
    """The user of this name or, where no name is like that, of this number.

    Raises:
        ValueError: with the end of a sentence, if there is none, or it is root.
    """
    try:
        entry = _look_up(name)
    except (KeyError, ValueError, OverflowError):
        raise ValueError("this node knows no such user; look with: getent passwd") from None
    if entry.pw_uid == 0:
        raise ValueError("it should be an ordinary user; leave it out to mount as root")
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir)


def _look_up(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        if not (name.isascii() and name.isdigit()):
            raise
        return pwd.getpwuid(int(name))


def account_of(uid: int, gid: int) -> Account:
    """The user of these ids, whether this node knows him or not."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return Account(str(uid), uid, gid, "/")
    return Account(entry.pw_name, uid, gid, entry.pw_dir)


def become(account: Account) -> None:
    """Turn this process, root's, into that user's, ids, groups and environment; there is no way back.

    CAP_SYS_ADMIN stays in effect as far as root has it, the other capabilities wait for `raised` or `settle`.

    Raises:
        OSError: this root may not do that, as in some containers; part of it may have been done.
    """
    for codec in _LATE_CODECS:
        codecs.lookup(codec)
    permitted = _read().permitted
    groups = os.getgrouplist(account.name, account.gid)
    _set_keepcaps(True)
    try:
        os.setgroups(groups)
        os.setresgid(account.gid, account.gid, account.gid)
        os.setresuid(account.uid, account.uid, account.uid)
        _write(_Capabilities(permitted & 1 << CAP_SYS_ADMIN, permitted))
    finally:
        _set_keepcaps(False)
    os.environ.update(HOME=account.home, USER=account.name, LOGNAME=account.name)
    runtime = f"/run/user/{account.uid}"
    if is_own_directory(runtime):
        os.environ["XDG_RUNTIME_DIR"] = runtime
    else:
        os.environ.pop("XDG_RUNTIME_DIR", None)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Within the block every capability that this thread may have is in effect. Without `become` nothing changes."""
    before = _read()
    if before.effective == before.permitted:
        yield
        return
    _write(_Capabilities(before.permitted, before.permitted))
    try:
        yield
    finally:
        _write(before)


def settle() -> None:
    """Give away, for good, every capability that is not in effect now."""
    effective = _read().effective
    _write(_Capabilities(effective, effective))


def has_sys_admin() -> bool:
    """Whether this thread may mount and unmount by itself; the kernel may have other reasons to refuse."""
    return bool(_read().effective >> CAP_SYS_ADMIN & 1)


def _read() -> _Capabilities:
    data = (_Data * 2)()
    _check(_libc.capget(ctypes.byref(_Header(_VERSION_3, 0)), data))
    low, high = data
    return _Capabilities(low.effective | high.effective << 32, low.permitted | high.permitted << 32)


def _write(wanted: _Capabilities) -> None:
    """Set both; nothing is inheritable, which empties the ambient set too."""
    halves = [
        _Data(wanted.effective >> shift & 0xFFFFFFFF, wanted.permitted >> shift & 0xFFFFFFFF, 0) for shift in (0, 32)
    ]
    _check(_libc.capset(ctypes.byref(_Header(_VERSION_3, 0)), (_Data * 2)(*halves)))


def _set_keepcaps(is_on: bool) -> None:
    """Whether the capabilities outlive the change of the user id."""
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(_PR_SET_KEEPCAPS, ctypes.c_ulong(is_on), zero, zero, zero))


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
