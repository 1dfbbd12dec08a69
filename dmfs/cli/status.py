"""`dmfs status`: what is mounted and what it does, from the daemons' control sockets. Never looks into a mount.

Light on purpose: rich is loaded by table.py for a table alone, and nothing here imports trio or pydantic.
"""

import contextlib
import json
import os
import threading
from typing import Any

import click

from dmfs import privileges, runtime
from dmfs.cli import client
from dmfs.cli.paths import find_daemon, real_mountpoint
from dmfs.errors import DaemonUnresponsive

ANSWER_TIMEOUT = (
    1.5  # seconds for one daemon; all are asked at the same time, and the whole command is to take under two
)


@click.command("status")
@click.argument("mountpoint", required=False)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: an object with MOUNTPOINT, without it a list of them."
)
def command(mountpoint: str | None, as_json: bool) -> None:
    """Show all your mounts of dmfs on this node, or the one at MOUNTPOINT. Root
    sees those of all users.

    Counters are since the daemon's start. What the kernel's page cache serves
    is not seen. Works while a mount hangs.

    \b
    Examples:
      dmfs status
      dmfs status /tmp/imagenet --json
    """
    path = None if mountpoint is None else real_mountpoint(mountpoint)
    answers = _answers(path)
    if os.geteuid() == 0 and not (path and answers):
        answers += _answers_to_others(path)
    if path is not None and not answers:
        answers = [_ask(find_daemon(path))]
    if as_json:
        click.echo(json.dumps(answers if mountpoint is None else answers[0], indent=2))
    elif not answers:
        click.echo("No dmfs mounts of this user on this node.")
    else:
        from dmfs.cli import table  # rich

        table.show(answers)


def _answers(path: str | None) -> list[dict[str, Any]]:
    """The statuses of this user's mounts, or of the one at `path` if there is one."""
    record = None if path is None else runtime.find(path)
    return _ask_all(runtime.records() if path is None else [record] if record else [])


def _answers_to_others(path: str | None) -> list[dict[str, Any]]:
    """The same for root, of what is mounted by other users: each is asked as that user."""
    from dmfs.cli import bounded, owners  # for root only
    from dmfs.fuse import mounting

    owner = owners.owner_of(mounting.find_mount(path)) if path is not None else None
    answers = []
    for account in owners.other_owners() if path is None else [owner] if owner else []:
        with contextlib.suppress(OSError):  # TimeoutError is one
            answers += bounded.call(ANSWER_TIMEOUT + 1, _answers_as, account, path)
    return answers


def _answers_as(account: privileges.Account, path: str | None) -> list[dict[str, Any]]:
    privileges.become(account)
    return _answers(path)


def _ask(record: runtime.MountRecord) -> dict[str, Any]:
    try:
        return client.ask(record, {"op": "status"}, timeout=ANSWER_TIMEOUT)
    except DaemonUnresponsive:
        return {
            "mountpoint": record.mountpoint,
            "source": {"path": record.source},
            "pid": record.pid,
            "state": "unresponsive",
        }


def _ask_all(records: list[runtime.MountRecord]) -> list[dict[str, Any]]:
    """The answers in the order of `records`."""
    answers: dict[str, dict[str, Any]] = {}

    def ask(record: runtime.MountRecord) -> None:
        answers[record.mountpoint] = _ask(record)

    threads = [threading.Thread(target=ask, args=(record,)) for record in records]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[record.mountpoint] for record in records if record.mountpoint in answers]
