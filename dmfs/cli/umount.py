"""`dmfs umount`: unmounts, and waits until the daemon is gone. Always ends, whatever the mount and the daemon do.

Nothing here looks into the mount. The daemon is held by a pidfd, so that no other process of that number is meant.
"""

import contextlib
import errno
import os
import select
import shlex
import signal
import time

import click

from dmfs import privileges, runtime
from dmfs.cli import client
from dmfs.cli.output import note
from dmfs.cli.owners import owner_of
from dmfs.cli.paths import real_mountpoint
from dmfs.errors import DaemonUnresponsive, MountBusy, NotMounted, UserError
from dmfs.fuse import mounting

ANSWER_TIMEOUT = 3.0  # seconds after which a daemon that says nothing is taken for hung
PROMPT_END = 1.0  # seconds in which a daemon usually ends by itself
NOTICE_AFTER = 3.0  # seconds of waiting before we say so
END_TIMEOUT = 60.0  # seconds for the daemon to end; it looks at fresh copies once more, which takes two or three
HUNG_TIMEOUT = 10.0 - ANSWER_TIMEOUT  # the same for one that did not answer
# By force, seconds for each step; five in all.
_ASK, _STOP, _TERM, _KILL = 0.3, 1.2, 1.0, 2.0
MAX_NAMED = 8  # processes named by "is in use"


@click.command("umount")
@click.argument("mountpoint")
@click.option(
    "--force", is_flag=True, help="Fail all that waits on the mount, detach it, and end the daemon: within 5 s."
)
def command(mountpoint: str, force: bool) -> None:
    """Unmount MOUNTPOINT and wait until its daemon is gone.

    The copies in the cache stay: the next mount finds them. A mount that is in
    use is left alone, and the processes that use it are named. Root can unmount
    the mounts of all users.

    \b
    Examples:
      dmfs umount /tmp/imagenet
      # also if it hangs, or is in use
      dmfs umount --force /tmp/imagenet
    """
    path = real_mountpoint(mountpoint)
    mount = mounting.find_mount(path)
    owner = owner_of(mount)
    if owner is not None:
        with contextlib.suppress(OSError):  # a root that may not, as in a container, can unmount all the same
            privileges.become(owner)
    record = runtime.find(path)
    is_ours = mount is not None and mount.fs_type == "fuse.dmfs"
    if record is None and not is_ours:
        what = f"a mount of {mount.source} ({mount.fs_type}), not of dmfs" if mount else "not a mountpoint"
        raise NotMounted(f"{path} is {what}: dmfs status lists the mounts of this user")
    os.chdir("/")  # or "dmfs umount ." would itself be in the way
    if force:
        _unmount_by_force(path, record)
    elif record is None:
        _unmount_orphan(path)
    else:
        _unmount(path, record, is_mounted=is_ours)


def _unmount(path: str, record: runtime.MountRecord, *, is_mounted: bool) -> None:
    pidfd = client.open_daemon(record)
    if pidfd is None:  # it has ended just now
        _unmount_orphan(path)
        return
    limit, patience = END_TIMEOUT, ANSWER_TIMEOUT
    try:
        client.ask(record, {"op": "status"}, timeout=patience)
    except DaemonUnresponsive:
        limit, patience = HUNG_TIMEOUT, _ASK
    deadline = time.monotonic() + limit
    try:
        if is_mounted:
            _detach(path)
            if _wait_end(pidfd, PROMPT_END):
                return
        # It may not notice by itself while calls to the source are under way, or wait for late publications.
        with contextlib.suppress(DaemonUnresponsive):
            client.ask(record, {"op": "stop", "force": False}, timeout=patience)
        if _wait_end(pidfd, NOTICE_AFTER):
            return
        note(f"{path} is unmounted; waiting for its daemon (pid {record.pid}) to end")
        if _wait_end(pidfd, deadline - time.monotonic()):
            return
    finally:
        os.close(pidfd)
    raise DaemonUnresponsive(
        f"{path} is unmounted, but its daemon (pid {record.pid}) has not ended: "
        f"end it with: dmfs umount --force {shlex.quote(path)}"
    )


def _detach(path: str) -> None:
    """The plain unmount."""
    try:
        mounting.unmount(path)
    except OSError as exc:
        if exc.errno == errno.EBUSY:
            raise MountBusy(_describe_users(path)) from exc
        if exc.errno != errno.EINVAL:  # EINVAL: somebody else was quicker
            raise UserError(f"{path} cannot be unmounted: {exc.strerror}") from exc


def _describe_users(path: str) -> str:
    mount = mounting.find_mount(path)
    users = mounting.users_of(mount) if mount else []
    remedy = f"end them, or unmount with: dmfs umount --force {shlex.quote(path)}"
    if not users:
        return f"{path} is in use by processes that this user cannot see, or by a mount below it: {remedy}"
    names = [f"{user.name} (pid {user.pid})" for user in users[:MAX_NAMED]]
    if len(users) > MAX_NAMED:
        names.append(f"{len(users) - MAX_NAMED} more")
    return f"{path} is in use by {', '.join(names)}: {remedy}"


def _unmount_orphan(path: str) -> None:
    """A mount without a daemon that we know: dead, or the record is gone, or another user's."""
    if mounting.is_dead(path):
        try:
            mounting.unmount(path, lazy=True)
        except OSError as exc:
            raise UserError(f"the dead mount at {path} cannot be unmounted: {exc.strerror}") from exc
        note(f"the daemon of {path} was gone already; the dead mount is unmounted")
        return
    _detach(path)


def _unmount_by_force(path: str, record: runtime.MountRecord | None) -> None:
    pidfd = client.open_daemon(record) if record else None
    try:
        _detach_by_force(path)
        if record is None or pidfd is None:
            return
        with contextlib.suppress(DaemonUnresponsive):
            client.ask(record, {"op": "stop", "force": True}, timeout=_ASK)
        if _wait_end(pidfd, _STOP) or _signal(pidfd, signal.SIGTERM, _TERM) or _signal(pidfd, signal.SIGKILL, _KILL):
            _detach_by_force(path)  # one that was starting may have mounted meanwhile
            return
    finally:
        if pidfd is not None:
            os.close(pidfd)
    raise DaemonUnresponsive(
        f"{path} is unmounted, but its daemon (pid {record.pid}) cannot be killed: "
        f"it is stuck in a call to the source {record.source} and ends when that answers"
    )


def _detach_by_force(path: str) -> None:
    """Abort the connection and take the mount out of the tree, whoever uses it."""
    mount = mounting.find_mount(path)
    if mount is None or mount.fs_type != "fuse.dmfs":
        return
    mounting.abort(int(mount.device.partition(":")[2]))
    try:
        mounting.unmount(path, lazy=True)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise UserError(f"{path} cannot be unmounted: {exc.strerror}") from exc


def _wait_end(pidfd: int, seconds: float) -> bool:
    """True once the process has ended, False after `seconds`."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + max(0.0, seconds)
    while True:
        if poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return True
        if time.monotonic() >= deadline:
            return False


def _signal(pidfd: int, number: signal.Signals, seconds: float) -> bool:
    """Send a signal and wait for the end."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)
    return _wait_end(pidfd, seconds)
