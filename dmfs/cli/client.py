"""The asking end of the control socket: plain blocking calls, each with a limit, no trio. The server is control.py."""

import contextlib
import json
import os
import socket
import struct
import time
from typing import Any

from dmfs.errors import DaemonUnresponsive
from dmfs.runtime import MountRecord, find, socket_address

_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid
_PAUSE = 0.02  # seconds between two attempts where the daemon has more clients than it takes
_PART = 65536  # bytes


def ask(record: MountRecord, request: dict[str, Any], *, timeout: float) -> dict[str, Any]:
    """Send a request to the daemon of a mount and return its answer. `timeout` is in seconds, for all of it.

    Raises:
        DaemonUnresponsive: no answer in time; nobody listens (yet, or any more); or it refused.
    """
    deadline = time.monotonic() + timeout
    while True:
        line = b""
        with contextlib.suppress(OSError), _connect(record, deadline) as connection:
            connection.sendall(json.dumps(request).encode() + b"\n")
            line = _receive(connection, deadline)
        if line:
            break
        # It closes without a word when it has too many clients, and its socket may be about to come.
        if time.monotonic() + _PAUSE > deadline:
            raise DaemonUnresponsive(
                f"the daemon of {record.mountpoint} (pid {record.pid}) did not answer within {timeout:g} s"
            )
        time.sleep(_PAUSE)
    try:
        answer = json.loads(line)
    except ValueError:
        answer = {"error": "it said something that is not JSON"}
    if not isinstance(answer, dict) or "error" in answer:
        reason = answer["error"] if isinstance(answer, dict) else "it said something else"
        raise DaemonUnresponsive(f"the daemon of {record.mountpoint} (pid {record.pid}) did not answer: {reason}")
    return answer


def _connect(record: MountRecord, deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        with socket_address(record.socket) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """What the daemon sends before it closes; nothing if the line has no end."""
    parts = []
    while True:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(_PART)
        if not part:
            break
        parts.append(part)
    line = b"".join(parts)
    return line if line.endswith(b"\n") else b""


def open_daemon(record: MountRecord) -> int | None:
    """A pidfd of the daemon of a mount, None if it has ended. The caller closes it.

    The pid is what the kernel says of the socket's other end; where nobody listens, that of the record, which is good
    as long as the record's lock is held.
    """
    pid = 0
    with contextlib.suppress(OSError), _connect(record, time.monotonic() + 1) as connection:
        pid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
    try:
        pidfd = os.pidfd_open(pid or record.pid)
    except ProcessLookupError:
        return None
    if find(record.mountpoint) == record:  # still, so the pid has not gone to another process meanwhile
        return pidfd
    os.close(pidfd)
    return None
